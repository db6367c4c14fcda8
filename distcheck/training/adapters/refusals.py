"""Errors for code that fits no form: the reason, the options, and a strategy file to complete."""

from collections.abc import Mapping

from distcheck.training.adapters.forms import form_names
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.target import (
    Parameters,
    Target,
    name_of_start_method,
    named_parameters,
    public_method_names,
    required_parameters,
)
from distcheck.training.adapters.unknown import FormError

# Expressions for usual parameters in a strategy of distcheck's own form.
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


def refusal_error(target: Target, why: str) -> FormError:
    """Return the error for code that cannot be adapted, with a strategy file for this object."""
    name = "Adapted" if target.is_class or target.maker is not None else "sync"
    return FormError(
        f"{why}. Pass its form with --as ({', '.join(form_names())}), or call it yourself from a "
        f"file next to it, and pass that as FILE.py:{name}:\n{strategy_template(target)}"
    )


def strategy_template(target: Target) -> str:
    """Return the source of a strategy that calls the code after backward, with CAPITALS to edit."""
    place, _, attribute = target.spec.partition(":")
    module = place.removesuffix(".py").rpartition("/")[2]
    head = (attribute or target.name).partition(".")[0]
    made = target.value if target.is_class else target.maker
    handed = _keyword_arguments(target.required, _GIVEN)
    if made is not None:
        methods = public_method_names(made)
        own = f"{methods[0] if len(methods) == 1 else 'METHOD'}()"
        making = _keyword_arguments(required_parameters(named_parameters(made)), _BEFORE_TRAINING)
        begins = name_of_start_method(made, takes="model")
        lines = [
            "import torch.distributed as dist",
            "class Adapted:",
            "    def wrap(self, model):",
            f"        self.made = {head}({making})",
            *[f"        self.made.{begins}(model)"] * bool(begins),
            "        return model",
            "    def sync(self, model, step):",
            f"        self.made.{own if target.is_class else f'{target.name}({handed})'}",
        ]
    else:
        call = f"made.{target.name}" if target.is_unbound else attribute or target.name
        without = [f"    made = {head}.__new__({head})", "    made.ATTRIBUTE = model"]
        lines = ["def sync(model, step):", *without * target.is_unbound, f"    {call}({handed})"]
    return "\n".join(f"    {line}" for line in [f"from {module} import {head}", *lines])


def _keyword_arguments(parameters: Parameters, known: Mapping[str, str]) -> str:
    """Return the arguments as keywords; the first is the model, if no meaning is known."""
    values = [(p.name, known.get(meaning_of(p.name))) for p in parameters]
    if values and not any(value for _, value in values):
        values[0] = (values[0][0], "model")
    return ", ".join(f"{name}={value or name.upper()}" for name, value in values)
