"""A wrapper class that shards the parameters of a module: hand-written FSDP."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from distcheck.contract import Build, Step
from distcheck.training.adapters.forms import wrapper
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.sharded_parameters import OptimizerOverShards, ShardedParameters
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import Target, author_classes
from distcheck.training.loaded import LoadedStrategy


def fits(target: Target) -> bool:
    """Return True for a wrapper that mentions shards, in a Python module that gathers."""
    made = target.owner if target.is_unbound else target.value
    if made is None or not wrapper.fits(target):
        return False
    around = Source(target.module).words if target.module is not None else set()
    gathers = any("all_gather" in word or "allgather" in word for word in around)
    words = {word for part in author_classes(made) for word in Source(part).words}
    return gathers and any("shard" in word.lower() for word in words)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that trains the wrapper in place of the module. Unsharded parameters,
    gradients and state are written to a separate copy of the model, which is recorded. Raises
    UsageError.
    """
    base = wrapper.adapt_wrapper(target, scene, in_pieces=True)
    kept: list[ShardedParameters] = []
    followed: list[_Followed] = []

    def wrap_copy(model: nn.Module) -> nn.Module:
        scene.model = model
        return base.wrap(model)

    def wrap(model: nn.Module) -> nn.Module:
        what = repr(target.spec)
        undivided = f"{what} replicates every parameter on every rank; pass --as wrapper"
        pieces = ShardedParameters(model, what=what, undivided=undivided)
        wrapped = pieces.train(wrap_copy)
        kept.append(pieces)
        followed.append(_Followed(model, pieces.trained))
        return wrapped

    def begun(model: nn.Module, step: Step) -> None:
        followed[0].follow()
        base.begun(model, step)

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        return OptimizerOverShards(build(kept[0].held), kept[0])

    def sync(model: nn.Module, step: Step) -> None:
        base.sync(model, step)
        kept[0].write_gradients()

    # Clipping by the loop would use the norm of a shard, which is not the code's error.
    promising = base.with_contract(
        sync="out-of-sight",
        optimizer_state="cut",
        one_group=True,
        declines=("clipping",),
        note=f"{base.note}; its shards are unsharded for comparison",
    )
    return dataclasses.replace(promising, wrap=wrap, optimizer=optimizer, sync=sync, begun=begun)


class _Followed:
    """Repeats a workload's changes of its model before a step on the trained model: modes, and
    attributes with plain values. Values that the strategy itself set there are kept.
    """

    def __init__(self, whole: nn.Module, worked_on: nn.Module) -> None:
        self._whole, self._worked_on = whole, worked_on
        self._seen = dict(_plain_values(whole))

    def follow(self) -> None:
        """Copy the changes since the last call."""
        theirs = dict(self._worked_on.named_modules())
        for (name, key), value in _plain_values(self._whole):
            if self._seen.get((name, key)) != value and name in theirs:
                setattr(theirs[name], key, value)
            self._seen[name, key] = value


def _plain_values(model: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and isinstance(value, bool | int | float | str):
                yield (name, key), value
