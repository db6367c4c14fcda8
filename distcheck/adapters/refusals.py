"""What is said of code that no form fits: which forms there are, and three lines that would do."""

from distcheck.adapters import form_names, load_form
from distcheck.adapters.target import Target
from distcheck.errors import UsageError


def refusal(target: Target, why: str) -> UsageError:
    """The error for code that cannot be adapted, with three lines written for this very object."""
    forms = "; ".join(f"{name}: {load_form(name).EXAMPLE}" for name in form_names())
    return UsageError(f"{why}. Forms, for --as: {forms}. {_three_lines(target)}")


def _three_lines(target: Target) -> str:
    place, _, attribute = target.spec.partition(":")
    module = place.removesuffix(".py").rpartition("/")[2]
    head = (attribute or target.name).partition(".")[0]
    parameters = [p.name for p in target.required]
    handed = ", ".join(["model", *[f"{name}=..." for name in parameters[1:]]])
    if target.is_class:
        body = f"def wrap(model):\n        return {head}({handed})"
    elif target.is_unbound:
        made = f"{head}(...).{target.name}"
        body = f"def sync(model, step):\n        {made}({handed})"
    else:
        body = f"def sync(model, step):\n        {attribute or target.name}({handed})"
    return (
        "Or put three lines beside it, and give their place as FILE.py:sync (or, of a class, "
        f"--as wrapper):\n    from {module} import {head}\n    {body}"
    )
