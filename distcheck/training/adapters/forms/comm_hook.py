"""A communication hook for DistributedDataParallel: hook(state, bucket) -> Future."""

import inspect
from functools import wraps
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import contract_of
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 10
EXAMPLE = "hook(state, bucket) or hook(bucket), registered with DDP; --arg state=..."
_NO_STATE = "None"


def fits(target: Target) -> bool:
    """A function or bound method that takes a bucket."""
    return not target.is_class and callable(target.value) and bool(_bucket_of(target))


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """DDP around the model, with the hook registered."""
    bucket = _bucket_of(target)
    if not bucket:
        raise refusal(target, f"strategy {target.spec!r} takes no bucket: {target.signature}")
    parameters = [p.name for p in target.parameters]
    before = parameters[: parameters.index(bucket)]
    state_name = before[0] if before else ""
    told = dict(target.adaptation.arguments)
    text = told.get(state_name, _NO_STATE)
    scene.check(text)
    scene.used.add(state_name)
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    supplied = [name for name in (state_name, bucket) if name]
    filling = Filling(scene, target.value, what=what, supplied=supplied, made_from=state_name)

    @wraps(target.value if inspect.isroutine(target.value) else target.value.__call__)
    def hook(state: Any, bucket: Any) -> Any:
        return filling.call(*([state, bucket] if state_name else [bucket]))

    del hook.__wrapped__  # type: ignore[attr-defined]
    hook.__annotations__ = {}  # DDP reads them, and would look them up in the wrong module
    hook.__name__ = "hook"  # DDP takes torch's bfloat16 hooks with NCCL only, by their names

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(scene.read(text), hook)
        return wrapped

    with_state = f" with state {text}" if state_name else ""
    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        wrap=wrap,
        note=f"{target.signature}, a communication hook of DDP's{with_state}",
    )


def _bucket_of(target: Target) -> str:
    """The name of the parameter that is the bucket: by annotation or by name, within the first two
    (for an explicit --as, the last of them).
    """
    first_two = target.parameters[:2]
    for parameter in first_two:
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        if "GradBucket" in text or parameter.name in ("bucket", "grad_bucket"):
            return parameter.name
    if target.adaptation.form == "comm-hook" and first_two:
        return first_two[-1].name
    return ""
