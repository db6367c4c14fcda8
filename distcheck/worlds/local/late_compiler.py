"""torch's compiler, `torch._dynamo`, imported where something of it is used and not before.

Every optimizer's `step` and `zero_grad`, and `init_process_group`, name it, only to say that they
are not to be compiled; naming it imports it. Measured with torch 2.15 on 2 cores: 1.0 s of CPU in
each interpreter, beside 1.8 s for torch itself, and 70 MB.

A stand-in in `sys.modules` answers those three. Anything else that is asked of it, or a module
below it, imports the compiler, puts it in the place of the stand-in, and answers from it: what
follows is as if the stand-in had never been.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"
# What it imports and takes longest for; others import it, too (torch.distributed.optim does).
_BRINGS = ("torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes")
_loading = threading.RLock()


class LateModule(ModuleType):
    """What is in `sys.modules` until the compiler is needed."""

    def __init__(self, file: str | None) -> None:
        super().__init__(NAME, "Stands for torch._dynamo until it is used.")
        self.__package__ = NAME
        self.__file__ = file  # `inspect` asks every module for it
        # A compiler that is not loaded compiles nothing, and has noted nothing to forget.
        self.graph_break = _nothing
        self.trace_rules = SimpleNamespace(clear_lru_cache=_nothing)

    def disable(
        self, fn: Callable[..., Any], recursive: bool = True, **options: Any
    ) -> Callable[..., Any]:
        """The function as it is while nothing can compile it, then what torch makes of it."""
        made: list[Callable[..., Any]] = []

        def called(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(NAME) is self:
                return fn(*args, **kwargs)
            if not made:
                # By an import, which waits for another thread that is just importing it.
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
    """Puts the stand-in where the compiler would be, unless it is there. torch is imported."""
    torch = sys.modules["torch"]
    if NAME in sys.modules:
        return
    found = importlib.util.find_spec(NAME)
    stand_in = LateModule(None if found is None else found.origin)
    sys.modules[NAME] = torch.__dict__["_dynamo"] = stand_in


def is_loaded() -> bool:
    found = sys.modules.get(NAME)
    return found is not None and not isinstance(found, LateModule)


def to_share() -> list[str]:
    """Its name, where a process like this one is better forked from one that has imported it."""
    return [NAME] if is_loaded() or any(name in sys.modules for name in _BRINGS) else []


def load() -> None:
    found = sys.modules.get(NAME)
    if isinstance(found, LateModule):
        found._compiler()
    else:
        importlib.import_module(NAME)


def _nothing(*_: Any, **__: Any) -> None:
    """What a compiler that is not loaded does."""
