"""Recorded state put into a model, a little beside it for a perturbation; means of gradients."""

from collections.abc import Mapping, Sequence

import torch

from distcheck.job.inside import tensors
from distcheck.job.inside.tensors import plain_name

Tensors = dict[str, torch.Tensor]
# What a copy writes beside its gradients.
NOT_GRADIENTS = ("loss", "passes", "divisor", "kind", "weights")


def load(
    models: Sequence[torch.nn.Module], kept: Mapping[str, torch.Tensor], draw: int
) -> dict[str, torch.nn.Parameter]:
    """Puts the state before a step in, and returns the parameters by name. A `draw` above 0 moves
    every parameter by one ULP.
    """
    generator = torch.Generator().manual_seed(draw)
    parameters: dict[str, torch.nn.Parameter] = {}
    with torch.no_grad():
        for model in models:
            for long_name, parameter in model.named_parameters():
                name = plain_name(long_name)
                parameters[name] = parameter
                before = kept.get(f"before/{name}")
                if before is not None:
                    local(parameter).copy_(moved(before, generator) if draw else before)
            for long_name, buffer in model.named_buffers():
                value = kept.get(f"buffer/{plain_name(long_name)}")
                if value is not None:
                    local(buffer).copy_(value)
    return parameters


def gradients(parameters: Mapping[str, torch.nn.Parameter]) -> Tensors:
    """The gradients that there are, as copies on the CPU."""
    return {
        name: tensors.whole(parameter.grad).clone()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def put(
    parameters: Mapping[str, torch.nn.Parameter], given: Mapping[str, torch.Tensor | None]
) -> None:
    """Puts other numbers into gradients that there are."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            number = given.get(name)
            if parameter.grad is not None and number is not None:
                local(parameter.grad).copy_(number)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What one rank holds of a tensor that is divided among ranks: of one rank, all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every element one ULP up or down, by chance."""
    if not tensor.is_floating_point():
        return tensor
    up = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.bool)
    end = torch.where(up, float("inf"), float("-inf")).to(tensor.dtype)
    return torch.nextafter(tensor, end)


def mean(parts: Sequence[Tensors | None], weights: Sequence[float]) -> Tensors | None:
    """The weighted mean of what copies wrote, in the dtype of each; None where one is missing."""
    total: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    for part, weight in zip(parts, weights, strict=True):
        if part is None:
            return None
        for name, tensor in part.items():
            dtypes[name] = tensor.dtype
            term = tensor.double() * weight
            total[name] = total[name] + term if name in total else term
    return {name: tensor.to(dtypes[name]) for name, tensor in total.items()}


def distance(one: Tensors, other: Tensors) -> float:
    """How far apart two sets of gradients are, over the norm of the other, in the L2 norm."""
    names = [name for name in other if name in one and name not in NOT_GRADIENTS]
    size = sum(float(other[name].double().square().sum()) for name in names)
    apart = sum(float((one[n].double() - other[n].double()).square().sum()) for n in names)
    return float((apart / size) ** 0.5) if size else 0.0


def divisor_of(loss: float, added: float) -> float:
    """What sums of torch's losses over targets, `added` up, were divided by to be a loss; a whole
    number where it is one. 0 where there are none.
    """
    if not added or not loss or added != added:
        return 0.0
    found = abs(added / loss)
    return float(round(found)) if found >= 1 and abs(found - round(found)) < 1e-3 else found
