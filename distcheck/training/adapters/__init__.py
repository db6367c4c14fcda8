"""Calling code whose author never heard of distcheck: a form per way in which people write it.

A form is a file of `distcheck.training.adapters.forms`, found by its name (`comm_hook.py` is
`--as comm-hook`). It has

    PRECEDENCE             a number; forms are asked in that order whether they fit
    EXAMPLE                what such code looks like, in one line
    fits(target) -> bool   whether this code has the form, from its signature and its source
    adapt(target, scene) -> LoadedStrategy

What the code asks for by name is filled in by the `Scene`: `names.py` lists the names. This module
and `asked.py` import no torch, so that a slip in `--as` is answered at once.
"""

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distcheck.errors import UsageError

if TYPE_CHECKING:
    from distcheck.training.adapters.scene import Scene
    from distcheck.training.adapters.target import Target
    from distcheck.training.loaded import LoadedStrategy


class Form(Protocol):
    """What a file of `forms` has."""

    PRECEDENCE: int
    EXAMPLE: str

    def fits(self, target: "Target") -> bool:
        """Whether the code has this form."""
        ...

    def adapt(self, target: "Target", scene: "Scene") -> "LoadedStrategy":
        """The code as a strategy. Raises UsageError."""
        ...


@cache
def form_names() -> list[str]:
    """What `--as` takes. Imports none of them."""
    folder = Path(__file__).parent / "forms"
    return sorted(found.name.replace("_", "-") for found in pkgutil.iter_modules([str(folder)]))


@cache
def load_form(name: str) -> Form:
    """A form by its name. Raises UsageError for one that does not exist."""
    if name not in form_names():
        raise UsageError(f"unknown form --as {name}; known are {', '.join(form_names())}")
    module = importlib.import_module(f"distcheck.training.adapters.forms.{name.replace('-', '_')}")
    form: Form = module  # type: ignore[assignment]
    return form


def choose_form(target: "Target") -> str:
    """The form that the code has; empty where none fits."""
    forms = {name: load_form(name) for name in form_names()}
    ordered = sorted(forms, key=lambda name: forms[name].PRECEDENCE)
    return next((name for name in ordered if forms[name].fits(target)), "")
