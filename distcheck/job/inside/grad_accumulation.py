"""What backward passes have added to each `.grad` since it was last None or zero.

That, and not the number of calls, says which passes a step is made of: what was cleared before the
step (a dry pass, a skipped step, the first pass of sharpness-aware minimization, what a generator's
loss leaves in the discriminator) is in no gradient that the optimizer gets.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from distcheck.job.inside import tensors
from distcheck.job.inside.step_file import StepFile
from distcheck.recordings.jobs.records import Shard
from distcheck.training.leaf_hooks import LeafHook

Tensors = dict[str, torch.Tensor]


class GradAccumulation:
    """Listens on parameters. `passes` has, by name, the numbers of the backward passes."""

    def __init__(self, listens: Callable[[str, torch.Tensor], Any]) -> None:
        self._listens = listens  # called from within backward; it must not raise
        self._hooks: dict[str, LeafHook] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._leaves: dict[str, torch.Tensor] = {}  # that backward gives gradients to
        self.parts: dict[str, Shard] = {}  # what this rank has of gradients that are divided
        self.local: Tensors = {}
        self.sizes: Tensors = {}
        self.norms: Tensors = {}
        self.passes: dict[str, list[int]] = {}
        self.backward = -1  # the number of the pass that runs, or ran last
        self.may_exchange = True  # whether a pass before the last one may

    def watch(self, name: str, parameter: torch.Tensor, used: torch.Tensor | None = None) -> None:
        """Hears of a parameter's gradients from now on: of those of the one that the model has
        `used` in its place, where fully_shard divides it.
        """
        leaf = parameter if used is None else used
        if leaf.requires_grad and leaf.is_leaf and leaf is not self._leaves.get(name):

            def heard(gradient: torch.Tensor) -> None:
                self._listens(name, gradient)

            self._hooks[name] = LeafHook(leaf, heard)
            self._parameters[name], self._leaves[name] = parameter, leaf

    def begin(self) -> None:
        """A backward pass begins. What was added to a gradient that is not there any more, counts
        no longer.
        """
        self.backward += 1
        self.forget(
            name
            for name in list(self.passes)
            if not tensors.any_held([self._parameters[name], self._leaves[name]])
        )
        for hook in self._hooks.values():
            hook.put_back()

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """A gradient is about to be added to `.grad`."""
        gradient = gradient.detach()
        if (part := tensors.part_of(gradient)) is not None:
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
        """The backward passes that are in the gradients of some parameters. Where nothing was heard
        of any: all those after number `since`.
        """
        heard = [name for name in names if name in self._hooks]
        if not heard:
            return set(range(since + 1, self.backward + 1))
        return {number for name in heard for number in self.passes.get(name, ())}

    def write(self, names: Collection[str], file: StepFile, by: float) -> None:
        """Keeps what was added to some parameters' gradients, multiplied `by` a power of two."""
        for kind, found in (("local", self.local), ("sizes", self.sizes)):
            file.add_gradients(kind, {n: g for n, g in found.items() if n in names}, by, self.parts)
        for name, norm in self.norms.items():
            if name in names:
                file.add(f"norms/{name}", norm * by)

    def forget(self, names: Iterable[str]) -> None:
        """What was added to some parameters' gradients is not in them any more."""
        for name in names:
            for kept in (self.local, self.sizes, self.norms, self.passes):
                kept.pop(name, None)
