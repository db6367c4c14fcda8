"""Tensor collectives as strategies: in place, (send, recv), or returning a tensor."""

from numbers import Number

import torch
from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.training.adapters import names
from distcheck.training.adapters.gradients import present, take_back, wait_for
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy


def adapt_collective(target: Target, scene: Scene, *, divide: bool) -> LoadedStrategy:
    """Applied to every gradient; divided by the number of ranks afterwards, or left as it is."""
    if not target.first:
        raise refusal(target, f"strategy {target.spec!r} takes no tensor")
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    into = [p.name for p in target.required[1:] if p.name in names.RECEIVED]
    if not into and target.first in names.SENT:
        into = [p.name for p in target.parameters[1:] if p.name in names.RECEIVED]
    supplied = [target.first, *into[:1]]
    filling = Filling(scene, target.value, what=what, supplied=supplied)
    as_arrays = "ndarray" in target.first_annotation or target.first.endswith(("array", "arr"))

    def reduce(gradient: torch.Tensor) -> torch.Tensor:
        # The gradient itself: code that works on a copy of it must be seen doing so.
        sent = gradient.contiguous() if as_arrays else gradient
        received = torch.zeros_like(sent)
        given = [sent, received][: len(supplied)]
        handed = [t.cpu() for t in given] if as_arrays else given  # arrays know no other device
        answer = wait_for(filling.call(*(t.numpy() if as_arrays else t for t in handed)))
        for tensor, seen in zip(given, handed, strict=True):
            if seen is not tensor:
                tensor.copy_(seen)
        if into:
            return received
        # A number (elements sent, rounds, seconds) is not a gradient: then it works in place.
        in_place = answer is None or isinstance(answer, Number | str)
        return sent if in_place else torch.as_tensor(answer)

    def sync(model: nn.Module, step: Step) -> None:
        for parameter in present(scene.parameters()):
            assert parameter.grad is not None
            take_back([parameter], reduce(parameter.grad), what=repr(target.spec))
            if divide:
                parameter.grad.div_(step.shards)

    divided = (
        "and divided by the number of ranks afterwards"
        if divide
        else "as it is; --as tensor-sum where it only adds up"
    )
    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        sync=sync,
        note=f"{target.signature}, applied to every gradient {divided}",
    )
