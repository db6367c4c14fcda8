"""A communication hook for DistributedDataParallel: hook(state, bucket) -> Future."""

import inspect
from functools import wraps
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.machine.compat import BaseFuture
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target, annotation_text
from distcheck.training.loaded import LoadedStrategy


def fits(target: Target) -> bool:
    """Return True for a function or bound method that takes a bucket."""
    return target.is_function and bool(_bucket_of(target))


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return DDP around the model, with the hook registered. Raises UsageError."""
    bucket = _bucket_of(target)
    if not bucket:
        raise refusal_error(target, f"strategy {target.spec!r} takes no bucket: {target.signature}")
    parameters = [p.name for p in target.parameters]
    before = parameters[: parameters.index(bucket)]
    state_name = before[0] if before else ""
    state = next((p for p in target.parameters if p.name == state_name), None)
    text = target.arguments.get(state_name, "")
    text = (
        text
        or (scene.argument_for_object(state, target.value) if state is not None else "")
        or "None"
    )
    scene.check(text)
    scene.used.add(state_name)
    supplied = [name for name in (state_name, bucket) if name]
    filling = Filling(
        scene, target.value, what=target.described, supplied=supplied, made_from=state_name
    )

    @wraps(target.value if inspect.isroutine(target.value) else target.value.__call__)
    def hook(state: Any, bucket: Any) -> Any:
        future = filling.call(*([state, bucket] if state_name else [bucket]))
        if not isinstance(future, BaseFuture):  # torch would abort the process without a traceback
            raise TypeError(
                f"the hook returned {type(future).__name__}; DDP expects a torch.futures.Future, "
                "such as dist.all_reduce(..., async_op=True).get_future()"
            )
        return future

    del hook.__wrapped__  # type: ignore[attr-defined]
    hook.__annotations__ = {}  # DDP would resolve them in the wrong module
    hook.__name__ = "hook"  # DDP restricts torch's bfloat16 hooks to NCCL by their names

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(scene.read(text), hook)
        return wrapped

    with_state = f" with state {text}" if state_name else ""
    note = f"{target.signature}, a DDP communication hook{with_state}"
    return target.loaded(note, wrap=wrap)


def _bucket_of(target: Target) -> str:
    """Return the name of the bucket parameter: by annotation or name, among the first two (for an
    explicit --as, the last of them); empty if there is none.
    """
    first_two = target.parameters[:2]
    for parameter in first_two:
        is_named_so = parameter.name in ("bucket", "grad_bucket")
        if is_named_so or "GradBucket" in annotation_text(parameter):
            return parameter.name
    if target.adaptation.form == "comm-hook" and first_two:
        return first_two[-1].name
    return ""
