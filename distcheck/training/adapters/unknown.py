"""Names that nothing is known of: values to try for them, and stand-ins that fail when used.

A script's loss list, its logger, a second communicator: much of what code names is never reached
in a synchronization. What is reached ends the run with the option that gives it a value, as a word
in the name suggests it, or as the code's file has it.
"""

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from distcheck.errors import UsageError

_BY_WORD = {
    "rank": "@rank",
    "ranks": "@world_size", "world": "@world_size", "workers": "@world_size",
    "procs": "@world_size", "replicas": "@world_size", "gpus": "@world_size",
    "nodes": "@world_size",
    "learners": "@world_size", "clients": "@world_size",
    "group": "@group", "pg": "@group", "comm": "@comm", "communicator": "@comm",
    "model": "@model", "net": "@model", "network": "@model", "module": "@model",
    "optim": "@optimizer", "optimizer": "@optimizer", "params": "@params",
    "parameters": "@params", "grads": "@grads", "gradients": "@grads", "device": "@device",
    "step": "@iteration", "iteration": "@iteration",
    "mb": "25", "mib": "25", "bytes": "26214400",  # as much as a bucket of DDP
}  # fmt: skip


def options(option: str, names: Sequence[str], code: Callable[..., Any] | None) -> str:
    """`--arg a=@rank --arg b=25`: the option for each of `names`, with the values that their last
    parts let expect, or that the file of `code` gives them.
    """
    defaults = _defaults(code)
    return " ".join(
        f"{option} {name}={_value(name.rpartition('.')[2], defaults)}" for name in names
    )


def _value(name: str, defaults: dict[str, str]) -> str:
    if name in defaults:
        return defaults[name]
    words = [word for word in name.lower().split("_") if word in _BY_WORD]
    return _BY_WORD[words[-1]] if words else "VALUE"


def _defaults(code: Callable[..., Any] | None) -> dict[str, str]:
    """What the file says that names are by default: in `add_argument("--name", default=25)`, and in
    assignments of plain values.
    """
    try:
        tree = ast.parse(inspect.getsource(inspect.getmodule(code)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    values: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values |= {t.id: node.value for t in node.targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            default = [k.value for k in node.keywords if k.arg == "default"]
            flags = [a.value for a in node.args if isinstance(a, ast.Constant)]
            for flag in map(str, flags):
                values |= {flag.lstrip("-").replace("-", "_"): value for value in default}
    plain = {name: node.value for name, node in values.items() if isinstance(node, ast.Constant)}
    return {name: repr(value) for name, value in plain.items() if _is_shown_as_it_is(value)}


def _is_shown_as_it_is(value: object) -> bool:
    """Whether a shell and `--arg` read what is printed as this very value."""
    if isinstance(value, str):
        return value.isidentifier()
    return isinstance(value, int | float | bool)


class FormError(UsageError):
    """Code that does not fit the form that was chosen for it; another may fit."""


class NotKnownError(UsageError, AttributeError):
    """An attribute that nothing is known of. Code that asks for it with a default gets that."""


class NotGiven:
    """A value that was not given: every use of it raises UsageError. `stand_in` makes one."""

    def __init__(self, sentence: str) -> None:
        object.__setattr__(self, "_sentence", sentence)

    def __repr__(self) -> str:
        return f"<not given: {object.__getattribute__(self, '_sentence')}>"

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # inspection asks for these, and takes no for an answer
        return _refuse(self)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        missing = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)]
        _refuse(missing[0]) if missing else NotImplemented


def _refuse(missing: NotGiven, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(object.__getattribute__(missing, "_sentence"))


_made: dict[str, str] = {}  # sentences by the name of the stand-in's class


def stand_in(name: str, sentence: str) -> NotGiven:
    """A value under this name that fails with this sentence when it is used."""
    kind = f"NotGiven_{name}"
    _made[kind] = sentence
    made: NotGiven = type(kind, (NotGiven,), {})(sentence)
    return made


def explain(error: TypeError) -> None:
    """Raises UsageError where a function refused a stand-in, which it names by its class."""
    for kind, sentence in _made.items():
        if kind in str(error):
            raise UsageError(sentence) from error


_USES = (
    "call bool len iter next getitem setitem delitem contains enter exit index int float complex "
    "round hash str format eq ne lt le gt ge neg pos abs invert add sub mul matmul truediv "
    "floordiv mod divmod pow lshift rshift and or xor radd rsub rmul rmatmul rtruediv rfloordiv "
    "rmod rdivmod rpow rlshift rrshift rand ror rxor iadd isub imul itruediv"
)
for _use in _USES.split():
    setattr(NotGiven, f"__{_use}__", _refuse)
