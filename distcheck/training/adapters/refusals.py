"""What is said of code that no form fits: why, what to do, and a file that does it."""

from collections.abc import Mapping

from distcheck.errors import UsageError
from distcheck.training.adapters import form_names, names
from distcheck.training.adapters.methods import own_names
from distcheck.training.adapters.target import Target, named_parameters

# How a strategy of distcheck's own form gives what people's parameters ask for.
_GIVEN = {
    "model": "model",
    "rank": "step.rank",
    "local_rank": "step.rank",
    "world_size": "step.world_size",
    "group": "step.group",
    "step": "step",
    "index": "step.index",
    "samples": "step.samples",
    "tokens": "step.tokens",
    "parameters": "model.parameters()",
    "listed_parameters": "list(model.parameters())",
    "named_parameters": "model.named_parameters()",
    "gradients": "[p.grad for p in model.parameters()]",
}
_BEFORE_TRAINING = _GIVEN | {
    "rank": "dist.get_rank()",
    "local_rank": "dist.get_rank()",
    "world_size": "dist.get_world_size()",
    "group": "dist.group.WORLD",
}


def refusal(target: Target, why: str) -> UsageError:
    """The error for code that cannot be adapted, with a file written for this very object."""
    return UsageError(
        f"{why}. Say with --as what it is ({', '.join(form_names())}), or call it yourself from a "
        f"file beside it, and give that as FILE.py:{_name(target)}:\n{template(target)}"
    )


def _name(target: Target) -> str:
    return "Adapted" if target.is_class or target.maker is not None else "sync"


def _known_of(known: Mapping[str, str], parameter: str) -> str | None:
    """What fills a parameter of that name; None where that cannot be said."""
    return known.get(names.MEANINGS.get(parameter, ""))


def _taking_a_model(target: Target) -> list[str]:
    """The first of a class's methods that takes a model and no more, if any: it sets up."""
    assert target.maker is not None
    for name in own_names(target.maker):
        asked = [p.name for p in named_parameters(getattr(target.maker, name), skip=1)]
        if len(asked) == 1 and names.MEANINGS.get(asked[0]) == "model":
            return [name]
    return []


def template(target: Target) -> str:
    """A strategy that calls it after backward. What a person has to fill in stands in capitals."""
    place, _, attribute = target.spec.partition(":")
    module = place.removesuffix(".py").rpartition("/")[2]
    head = (attribute or target.name).partition(".")[0]
    known = _BEFORE_TRAINING if target.is_class else _GIVEN
    meanings = [(p.name, _known_of(known, p.name)) for p in target.required]
    if meanings and not any(given for _, given in meanings):
        meanings[0] = (meanings[0][0], "model")
    handed = ", ".join(f"{name}={given or name.upper()}" for name, given in meanings)
    if target.is_class:
        methods = own_names(target.value)
        method = methods[0] if len(methods) == 1 else "METHOD"
        lines = [
            "import torch.distributed as dist",
            "class Adapted:",
            "    def wrap(self, model):",
            f"        self.inner = {head}({handed})",
            "        return model",
            "    def sync(self, model, step):",
            f"        self.inner.{method}()",
        ]
    elif target.maker is not None:
        asked = [p.name for p in named_parameters(target.maker) if p.default is p.empty]
        making = ", ".join(f"{n}={_known_of(_BEFORE_TRAINING, n) or n.upper()}" for n in asked)
        first = [f"self.made.{name}(model)" for name in _taking_a_model(target)]
        lines = [
            "import torch.distributed as dist",
            "class Adapted:",
            "    def wrap(self, model):",
            f"        self.made = {head}({making})",
            *(f"        {call}" for call in first),
            "        return model",
            "    def sync(self, model, step):",
            f"        self.made.{target.name}({handed})",
        ]
    else:
        call = f"made.{target.name}" if target.is_unbound else attribute or target.name
        made = [f"    made = {head}.__new__({head})", "    made.ATTRIBUTE = model"]
        lines = ["def sync(model, step):", *made * target.is_unbound, f"    {call}({handed})"]
    return "\n".join(f"    {line}" for line in [f"from {module} import {head}", *lines])
