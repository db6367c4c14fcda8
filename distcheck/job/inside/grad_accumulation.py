"""Tracks the gradients that backward passes have added to each `.grad` since it was last None or
zero.

These contributions, not the number of calls, define the passes of a step. Gradients that are
cleared before the step are part of no optimizer gradient: those of a dry pass, a skipped step, the
first pass of sharpness-aware minimization, or the generator's loss in the discriminator. A
script may, however, have moved cleared gradients to its own buffer (`moved_gradients`), so they are
kept as `cleared`.
"""

from collections.abc import Collection, Iterable

import torch

from distcheck.job.inside import hooks, tensors
from distcheck.job.inside.step_file import StepFile
from distcheck.recordings.jobs.records import Shard
from distcheck.training.leaf_hooks import LeafHook

Tensors = dict[str, torch.Tensor]


class GradAccumulation:
    """Gradient hooks on parameters. `passes` maps the name of a parameter to the numbers of its
    backward passes.
    """

    def __init__(self) -> None:
        self._hooks: dict[str, LeafHook] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._leaves: dict[str, torch.Tensor] = {}  # the tensors that backward writes gradients to
        self.parts: dict[str, Shard] = {}  # this rank's shards of sharded gradients
        self.local: Tensors = {}
        self.sizes: Tensors = {}
        self.norms: Tensors = {}
        self.passes: dict[str, list[int]] = {}
        self.cleared: Tensors = {}  # contributions since the last step that are no longer in .grad
        self.cleared_sizes: Tensors = {}
        self._stepped: set[str] = set()  # names whose contributions an optimizer has received
        self.backward = -1  # number of the current or last pass
        self.may_exchange = True  # if a pass before the last one may synchronize

    def watch(self, name: str, parameter: torch.Tensor, used: torch.Tensor | None = None) -> None:
        """Record the gradients of a parameter. For fully_shard, `used` is the unsharded tensor that
        is hooked instead.
        """
        leaf = parameter if used is None else used
        if leaf.requires_grad and leaf.is_leaf and leaf is not self._leaves.get(name):

            def heard(gradient: torch.Tensor) -> None:
                hooks.emit("gradient", name, gradient)

            self._hooks[name] = LeafHook(leaf, heard)
            self._parameters[name], self._leaves[name] = parameter, leaf

    def begin(self) -> None:
        """Start a backward pass, and forget contributions to gradients that were cleared."""
        self.backward += 1
        for name in list(self.passes):
            if not tensors.has_nonzero_gradient([self._parameters[name], self._leaves[name]]):
                self._clear(name)
        for hook in self._hooks.values():
            hook.put_back()

    def _clear(self, name: str) -> None:
        if name not in self._stepped:
            sizes = self.sizes.get(name, tensors.magnitudes(self.local[name]))
            for kept, added in ((self.cleared, self.local[name]), (self.cleared_sizes, sizes)):
                kept[name] = added + kept[name] if name in kept else added
        self._stepped.discard(name)
        self.forget([name])

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Record a gradient that is about to be added to `.grad`."""
        gradient = gradient.detach()
        if (part := tensors.describe_shard(gradient)) is not None:
            self.parts[name] = part
            gradient = gradient.to_local()  # type: ignore[attr-defined]
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        norm = torch.linalg.vector_norm(tensors.magnitudes(gradient).float())
        if name not in self.local:
            self.passes[name] = [self.backward]
            self.local[name], self.norms[name] = gradient.clone(), norm
            return
        if self.may_exchange:
            held = self.sizes.setdefault(name, tensors.magnitudes(self.local[name]).clone())
            held += tensors.magnitudes(gradient)
        self.norms[name] = self.norms[name] + norm
        self.local[name] = self.local[name].add_(gradient)
        self.passes[name].append(self.backward)

    def backwards_of(self, names: Iterable[str], since: int) -> set[int]:
        """Return the backward passes that contributed to the gradients of these parameters; without
        hooks, all passes after number `since`.
        """
        heard = [name for name in names if name in self._hooks]
        if not heard:
            return set(range(since + 1, self.backward + 1))
        return {number for name in heard for number in self.passes.get(name, ())}

    def write(self, names: Collection[str], file: StepFile, by: float) -> None:
        """Write the contributions to the gradients of these parameters, multiplied by `by`, a power
        of two.
        """
        cleared = {"cleared": self.cleared, "cleared-sizes": self.cleared_sizes}
        for kind, found in {"local": self.local, "sizes": self.sizes, **cleared}.items():
            file.add_gradients(kind, {n: g for n, g in found.items() if n in names}, by, self.parts)
        for name, norm in self.norms.items():
            if name in names:
                file.add(f"norms/{name}", norm * by)

    def stepped(self, names: Iterable[str]) -> None:
        """Record that an optimizer has received the gradients of these parameters."""
        for name in names:
            self._stepped.add(name)
            self.cleared.pop(name, None)
            self.cleared_sizes.pop(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """Forget the contributions to the gradients of these parameters, which were cleared."""
        for name in names:
            for kept in (self.local, self.sizes, self.norms, self.passes):
                kept.pop(name, None)
