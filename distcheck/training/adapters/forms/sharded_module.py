"""A class around the module that holds its parameters in pieces: FSDP, written by hand."""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import msgspec
from torch import nn

from distcheck.contract import Build, Step
from distcheck.training.adapters.forms import wrapper
from distcheck.training.adapters.over_pieces import Followed, OverPieces
from distcheck.training.adapters.pieces import Pieces
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import Target, own_classes
from distcheck.training.loaded import LoadedStrategy


def fits(target: Target) -> bool:
    """A wrapper that mentions shards, in a module that gathers."""
    made = target.owner if target.is_unbound else target.value
    if made is None or not wrapper.fits(target):
        return False
    around = Source(target.module).words if target.module is not None else set()
    gathers = any("all_gather" in word or "allgather" in word for word in around)
    words = {word for part in own_classes(made) for word in Source(part).words}
    return gathers and any("shard" in word.lower() for word in words)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Trained in the module's place. The model that is recorded is another, which is not trained:
    parameters, gradients and optimizer state are written into it, put together.
    """
    base = wrapper.adapt_wrapper(target, scene, in_pieces=True)
    kept: list[Pieces] = []
    models: list[tuple[nn.Module, nn.Module]] = []
    followed: list[Followed] = []

    def wrap(model: nn.Module) -> nn.Module:
        pieces = Pieces(model, what=repr(target.spec))
        pieces.learn(base.wrap)
        worked_on = copy.deepcopy(model)
        scene.model = worked_on
        wrapped = base.wrap(worked_on)
        pieces.hold(wrapped.parameters())
        kept.append(pieces)
        models.append((model, worked_on))
        followed.append(Followed(model, worked_on))
        return wrapped

    def begun(model: nn.Module, step: Step) -> None:
        followed[0].follow()
        base.begun(model, step)

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        return OverPieces(build(kept[0].held), kept[0], *models[0])

    def sync(model: nn.Module, step: Step) -> None:
        base.sync(model, step)
        kept[0].write_gradients()

    # The loop would clip pieces by their own norm, which is the loop's mistake and not the code's.
    declines = tuple(dict.fromkeys((*base.contract.declines, "clipping")))
    contract = msgspec.structs.replace(
        base.contract,
        sync="out-of-sight",
        optimizer_state="cut",
        one_group=True,
        declines=declines,
    )
    return dataclasses.replace(
        base,
        contract=contract,
        wrap=wrap,
        optimizer=optimizer,
        sync=sync,
        begun=begun,
        note=f"{base.note}; its pieces are put together to be compared",
    )
