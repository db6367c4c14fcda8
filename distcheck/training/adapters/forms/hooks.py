"""A function that registers hooks on the model, once, before training."""

from torch import nn

from distcheck.contract import contract_of
from distcheck.errors import UsageError
from distcheck.training.adapters.forms.context import is_context_function
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 40
EXAMPLE = "f(model), called once: registers hooks that synchronise during backward"


def fits(target: Target) -> bool:
    """A function of a model whose source registers hooks."""
    is_function = callable(target.value) and not target.is_class
    kinds = ("model", "parameters", "")
    return is_function and target.source.registers_hooks and target.kind_of_first in kinds


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called in place of DDP's constructor; a module that it returns is trained."""
    if target.is_class or not target.first:
        raise refusal(target, f"strategy {target.spec!r} is not a function of a model")
    if is_context_function(target.value):
        raise UsageError(
            f"strategy {target.spec!r} is a context manager, which --as hooks would call but "
            "never enter; give --as context"
        )
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    supplied = [] if scene.meaning_of(target.first) not in ("", "model") else [target.first]
    filling = Filling(scene, target.value, what=what, supplied=supplied)

    def wrap(model: nn.Module) -> nn.Module:
        given = model.parameters() if target.kind_of_first == "parameters" else model
        answer = filling.call(*([given] if supplied else []))
        return answer if isinstance(answer, nn.Module) else model

    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        wrap=wrap,
        note=f"{target.signature}, called once before training: it registers hooks",
    )
