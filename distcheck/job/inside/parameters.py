"""Names the parameters that a script trains.

A name is shown to the user, and identifies the same tensor on every rank. The parameters of a step
are those of its optimizer.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy

from distcheck.job.inside.tensors import (
    digest_of,
    has_nonzero_gradient,
    is_dtensor,
    plain_name,
    unsharded_on_cpu,
)
from distcheck.machine.compat import fsdp2_parameters


class Parameters:
    """The parameters of all outermost models, and those that were found only in optimizers."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}  # keeps references, so that ids stay unique
        self.roots: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._names: dict[int, str] = {}
        self._of_roots: dict[tuple[int, str], torch.Tensor] = {}  # by model number and name

    def add_root(self, module: torch.nn.Module) -> list[str]:
        """Name the parameters of a called module, and return the new names. Parameters that are
        created in the first forward pass are named after it. Tensors that temporarily replace a
        trained parameter, such as FSDP2's unsharded parameters, get no name.
        """
        if not any(module is one for one in self.roots):
            self.roots.append(module)
        place = next(number for number, one in enumerate(self.roots) if one is module)
        new = []
        for name, parameter in module.named_parameters():
            if id(parameter) in self._names or is_lazy(parameter):
                continue
            before = self._of_roots.get((place, name))
            if before is None or not self._is_trained(before):
                self._of_roots[place, name] = parameter
                of = f"{type(module).__name__}-{place}"
                new.append(self._add(plain_name(name), parameter, of))
        return new

    def add_others(self) -> list[str]:
        """Name parameters that forward created or that only optimizers have; return the
        new names.
        """
        found = [name for root in self.roots for name in self.add_root(root)]
        for number, optimizer in enumerate(self.optimizers):
            for name, parameter in places_in(optimizer):
                if id(parameter) not in self._names and not is_lazy(parameter):
                    found.append(self._add(f"{name} of optimizer {number}", parameter, ""))
        return found

    def _add(self, name: str, parameter: torch.Tensor, of: str) -> str:
        taken = self.by_name.get(name)
        if taken is not None and self._is_used(taken):
            name = f"{of}.{name}"
        elif taken is not None:
            del self._names[id(taken)]
        self.by_name[name] = parameter
        self._names[id(parameter)] = name
        return name

    def _is_used(self, parameter: torch.Tensor) -> bool:
        """Return True unless a parameter was replaced after it was named, for example by a new
        head.
        """
        of_roots = (one for root in self.roots for one in root.parameters())
        return any(one is parameter for one in of_roots) or self._is_trained(parameter)

    def _is_trained(self, parameter: torch.Tensor) -> bool:
        return any(one is parameter for opt in self.optimizers for _, one in places_in(opt))

    def left_out(self) -> list[str]:
        """Return the names of parameters that no optimizer of this rank trains."""
        trained = {id(p) for one in self.optimizers for _, p in places_in(one)}
        return [name for name, one in self.by_name.items() if id(one) not in trained]

    def name_of(self, parameter: torch.Tensor) -> str | None:
        return self._names.get(id(parameter))

    def names_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        return [name for one in parameters if (name := self.name_of(one)) is not None]

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters, in the order in which they were named."""
        own = set(self.names_of(parameter for _, parameter in places_in(optimizer)))
        return [name for name in self.by_name if name in own]

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        for number, one in enumerate(self.optimizers):
            if one is optimizer:
                return number
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1

    def buffers(self, within: torch.nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Return the buffers of all called modules, or of those inside `within`, without
        duplicates.
        """
        found: dict[str, torch.Tensor] = {}
        seen = set[int]()
        for place, root in enumerate(self.roots):
            for name, buffer in root.named_buffers():
                plain = plain_name(name)
                if id(buffer) not in seen:
                    of = f"{type(root).__name__}-{place}." if plain in found else ""
                    found[f"{of}{plain}"] = buffer
                    seen.add(id(buffer))
        own = seen if within is None else set(map(id, _buffers_of(within)))
        return {name: buffer for name, buffer in found.items() if id(buffer) in own}

    def used(self, called: Iterable[torch.nn.Module]) -> set[str]:
        """Return the names of trained parameters, and of all parameters and buffers of modules that
        train or are in `called`. Models that were tried and dropped are excluded.
        """
        trained = {id(p) for one in self.optimizers for _, p in places_in(one)}
        train = [one for one in self.roots if any(id(p) in trained for p in one.parameters())]
        own = {id(t) for one in (*train, *called) for t in (*one.parameters(), *_buffers_of(one))}
        named = (*self.by_name.items(), *self.buffers().items())
        return {name for name, tensor in named if id(tensor) in own | trained}

    def gradients(
        self, names: Iterable[str], copied: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return dense copies of the existing gradients. Bit-identical copies in `copied` are
        reused.
        """
        found = {}
        for name in names:
            gradient = self.by_name[name].grad
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                if is_dtensor(gradient):
                    found[name] = gradient.detach().clone()
                    continue
                plain, known = unsharded_on_cpu(gradient), (copied or {}).get(name)
                is_known = known is not None and _are_bit_identical(plain, known)
                found[name] = known if known is not None and is_known else plain.clone()
        return found

    def hold(self) -> bool:
        """Return True if some parameter has a nonzero gradient."""
        return has_nonzero_gradient(self.by_name.values())

    def of_fsdp2(self, within: torch.nn.Module | None = None) -> dict[str, torch.Tensor | None]:
        """Return the unsharded tensors of fully_shard's parameters, by name."""
        roots = self.roots if within is None else [within]
        pairs = (
            pair for root in roots for part in root.modules() for pair in fsdp2_parameters(part)
        )
        return {name: used for own, used in pairs if (name := self.name_of(own)) is not None}

    @property
    def has_parts(self) -> bool:
        return any(is_dtensor(one) for one in self.by_name.values())


def _buffers_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return the buffers; not by `buffers()`, which is an attribute of Megatron's wrapper."""
    return torch.nn.Module.buffers(module)


def _are_bit_identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return digest_of(one) == digest_of(other)


def places_in(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield f"parameter {place} of group {number}", parameter
