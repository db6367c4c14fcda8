"""Names of unknown meaning: suggested values, and stand-ins that raise when used.

Most of these names (a loss list, a logger, a second communicator) are never read during
synchronization. If one is read, the run ends, and the error shows the option that sets it. The
suggested value follows from a word in the name or from the code's file.
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
    "opt": "@optimizer", "optim": "@optimizer", "optimizer": "@optimizer", "params": "@params",
    "parameters": "@params", "grads": "@grads", "gradients": "@grads", "device": "@device",
    "step": "@iteration", "iteration": "@iteration",
    "mb": "25", "mib": "25", "bytes": "26214400",  # as large as a DDP bucket
}  # fmt: skip


def suggested_options(option: str, names: Sequence[str], code: Callable[..., Any] | None) -> str:
    """Return the option for each of `names`, such as `--arg a=@rank --arg b=25`. Values are
    suggested by the last part of the name, or found in the file of `code`.
    """
    return " ".join(
        f"{option} {name}={suggested_value(name.rpartition('.')[2], code) or 'VALUE'}"
        for name in names
    )


def suggested_value(name: str, code: Callable[..., Any] | None) -> str:
    """Return a likely value for a name; empty if the name suggests none."""
    words = [word for word in name.lower().split("_") if word in _BY_WORD]
    return _defaults(code).get(name, _BY_WORD[words[-1]] if words else "")


def _defaults(code: Callable[..., Any] | None) -> dict[str, str]:
    """Return default values of names in the file of `code`: from `add_argument("--name",
    default=25)`, and from assignments of constants.
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
    # A shell and `--arg` read these unchanged.
    words = {name for name, v in plain.items() if isinstance(v, str) and v.isidentifier()}
    return {n: repr(v) for n, v in plain.items() if n in words or isinstance(v, int | float)}


class FormError(UsageError):
    """Raised for code that does not fit its selected form, but may fit a different one."""


class UnknownArgumentsError(FormError):
    """Raised for arguments of unknown meaning; `values` are values to try, by name."""

    def __init__(self, message: str, values: dict[str, list[str]]) -> None:
        super().__init__(message)
        self.values = values


class UnknownAttributeError(UsageError, AttributeError):
    """Raised for an attribute of unknown meaning; getattr with a default returns the default."""


class MissingValue:
    """A missing value: every use raises UsageError. `stand_in` creates one."""

    def __init__(self, sentence: str) -> None:
        object.__setattr__(self, "_sentence", sentence)

    def __repr__(self) -> str:
        return f"<not given: {object.__getattribute__(self, '_sentence')}>"

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # inspection expects an AttributeError
        return _refuse(self)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        missing = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)]
        _refuse(missing[0]) if missing else NotImplemented


def _refuse(missing: MissingValue, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(object.__getattribute__(missing, "_sentence"))


_made: dict[str, str] = {}  # sentences by the name of the stand-in's class


def stand_in(name: str, sentence: str) -> MissingValue:
    kind = f"NotGiven_{name}"
    _made[kind] = sentence
    made: MissingValue = type(kind, (MissingValue,), {})(sentence)
    return made


def raise_if_stand_in_rejected(error: TypeError) -> None:
    """Raise UsageError if a function rejected a stand-in, recognized by its class in the error."""
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
    setattr(MissingValue, f"__{_use}__", _refuse)
