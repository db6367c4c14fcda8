"""Delays the import of torch's compiler, `torch._dynamo`, until code uses it.

`init_process_group`, and `step` and `zero_grad` of every optimizer, refer to the compiler only to
exclude themselves from compilation, but this reference imports it. Measured with torch 2.15 on 2
cores: the import takes 1.0 s of CPU time per interpreter, in addition to 1.8 s for torch itself,
and 70 MB.

A stand-in in `sys.modules` serves these three functions. Any other attribute, or the import of a
submodule, imports the compiler, replaces the stand-in and delegates to the compiler; from then on
the stand-in has no effect.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"
# Its imports that take longest; other modules import them, too (torch.distributed.optim does).
_BRINGS = ("torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes")
_loading = threading.RLock()


class LateModule(ModuleType):
    """Stand-in for the compiler in `sys.modules`."""

    def __init__(self, file: str | None) -> None:
        super().__init__(NAME, "Stands for torch._dynamo until it is used.")
        self.__package__ = NAME
        self.__file__ = file  # `inspect` reads it from every module
        # An unloaded compiler compiles nothing and has nothing to clear.
        self.graph_break = _nothing
        self.trace_rules = SimpleNamespace(clear_lru_cache=_nothing)

    def disable(
        self, fn: Callable[..., Any], recursive: bool = True, **options: Any
    ) -> Callable[..., Any]:
        """Return a function that calls `fn` directly while the compiler is not loaded, and torch's
        version of `fn` with compilation disabled afterwards.
        """
        made: list[Callable[..., Any]] = []

        def called(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(NAME) is self:
                return fn(*args, **kwargs)
            if not made:
                # Import it: an import waits for another thread that is importing it.
                made.append(importlib.import_module(NAME).disable(fn, recursive, **options))
            return made[0](*args, **kwargs)

        return called

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler(), name)

    def _compiler(self) -> ModuleType:
        with _loading:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                sys.modules["torch"].__dict__.pop("_dynamo", None)
            for name in ("graph_break", "trace_rules"):
                self.__dict__.pop(name, None)  # code that kept the stand-in gets torch's own
            return importlib.import_module(NAME)


def install() -> None:
    """Install the stand-in, unless the compiler is already imported. torch must be imported."""
    torch = sys.modules["torch"]
    if NAME in sys.modules:
        return
    found = importlib.util.find_spec(NAME)
    stand_in = LateModule(None if found is None else found.origin)
    sys.modules[NAME] = torch.__dict__["_dynamo"] = stand_in


def is_loaded() -> bool:
    found = sys.modules.get(NAME)
    return found is not None and not isinstance(found, LateModule)


def modules_to_share() -> list[str]:
    """Return the name of the compiler if it is loaded, so that processes like this one should be
    forked from a process that has imported it.
    """
    return [NAME] if is_loaded() or any(name in sys.modules for name in _BRINGS) else []


def load() -> None:
    found = sys.modules.get(NAME)
    if isinstance(found, LateModule):
        found._compiler()
    else:
        importlib.import_module(NAME)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing. Stands for compiler functions that have no effect while nothing is compiled."""
