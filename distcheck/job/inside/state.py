"""Recorded state put into a model, a little beside it for a perturbation; means of gradients."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from distcheck.job.inside import tensors
from distcheck.machine.numerics import spacing

Tensors = dict[str, torch.Tensor]
# What a copy writes beside its gradients.
NOT_GRADIENTS = ("loss", "passes", "backwards", "count", "sums", "own", "kind", "weights")


def load(
    into: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor], kind: str,
    moves: torch.Generator | None = None,
) -> None:  # fmt: skip
    """Puts recorded tensors of a kind in, moved by one ULP if asked to."""
    with torch.no_grad():
        for name, tensor in into.items():
            value = kept.get(f"{kind}{name}")
            if value is not None and not torch.nn.parameter.is_lazy(tensor):
                value = value if moves is None else moved(value, moves)
                local(tensor).data.copy_(value)  # graphs that have the tensor may still be used


def gradients(parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """The gradients that there are, as copies on the CPU."""
    return {
        name: tensors.whole(parameter.grad).clone()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def put(parameters: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor | None]) -> None:
    """Makes these the gradients, None for a parameter that is to have none."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            number = given.get(name)
            if number is None:
                parameter.grad = None
            elif parameter.grad is not None:
                local(parameter.grad).copy_(number)
            elif not tensors.is_in_parts(parameter):
                parameter.grad = number.to(parameter.device, parameter.dtype).clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What one rank holds of a tensor that is divided among ranks: of one rank, all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def moved(
    tensor: torch.Tensor, generator: torch.Generator, of: torch.dtype | None = None
) -> torch.Tensor:
    """Every element one ULP up or down, by chance; one of another dtype if it is coarser."""
    if not tensor.is_floating_point():
        return tensor
    up = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.bool)
    if of is None or spacing(of) <= spacing(tensor.dtype):
        end = torch.where(up, float("inf"), float("-inf")).to(tensor.dtype)
        return torch.nextafter(tensor, end)
    ulp = torch.ldexp(tensor.new_full((), spacing(of)), torch.frexp(tensor).exponent - 1)
    return torch.where(up, tensor + ulp, tensor - ulp)


def mean(parts: Sequence[Tensors | None], weights: Sequence[float]) -> Tensors | None:
    """The weighted mean of what copies wrote, in the dtype of each; None where one is missing."""
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    found: Tensors = {}
    for name in dict.fromkeys(chain(*there)):
        pairs = zip(there, weights, strict=True)
        held = [(part[name], weight) for part, weight in pairs if name in part]
        terms = [one.double() * weight for one, weight in held]
        found[name] = sum(terms[1:], terms[0]).to(held[-1][0].dtype)
    return found


def distance(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], factor: float = 1.0
) -> float:
    """How far gradients are from others times a factor, over the norm of those, in the L2 norm."""
    names = [name for name in other if name in one and name not in NOT_GRADIENTS]
    size = sum(float(other[name].double().square().sum()) for name in names) * factor**2
    apart = (one[n].double() - factor * other[n].double() for n in names)
    left = sum(float(part.square().sum()) for part in apart)
    return float((left / size) ** 0.5) if size else 0.0


def spread_of(
    gradient: torch.Tensor, moved: Sequence[torch.Tensor], name: str, known: dict[str, float]
) -> float:
    """The distance of a gradient from the farthest of those that parameters moved by one ULP give.
    Its share of the norm is kept in `known`, by which it is estimated if no parameter was moved.
    """
    norm = float(gradient.double().norm())
    if not moved:
        return known.get(name, math.nan) * norm
    most = max(float((one - gradient).double().norm()) for one in moved)
    if norm:
        known[name] = most / norm
    return most


def factor_of(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The factor between one set of gradients and another, by least squares; 0 if there is none."""
    names = [name for name in other if name in one and name not in NOT_GRADIENTS]
    square = sum(float(other[name].double().square().sum()) for name in names)
    product = sum(float((one[n].double() * other[n].double()).sum()) for n in names)
    return product / square if square else 0.0
