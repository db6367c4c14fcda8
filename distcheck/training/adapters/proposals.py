"""Values to try for names that nothing is known of, by a word in them or as their file has them."""

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

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
_UNKNOWN = "VALUE"


def options(option: str, names: Sequence[str], code: Callable[..., Any] | None) -> str:
    """`--arg a=@rank --arg b=25`: the option for each of `names`, with the values that their last
    parts let expect, or that the file of `code` gives them.
    """
    given = _defaults(code)
    return " ".join(f"{option} {name}={_value(name.rpartition('.')[2], given)}" for name in names)


def _value(name: str, given: dict[str, str]) -> str:
    if name in given:
        return given[name]
    words = [word for word in name.lower().split("_") if word in _BY_WORD]
    return _BY_WORD[words[-1]] if words else _UNKNOWN


def _defaults(code: Callable[..., Any] | None) -> dict[str, str]:
    """What the file says that names are by default: in `add_argument("--name", default=25)`, and in
    assignments of plain values.
    """
    try:
        tree = ast.parse(inspect.getsource(inspect.getmodule(code)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {t.id: node.value for t in node.targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            default = [k.value for k in node.keywords if k.arg == "default"]
            flags = [a.value for a in node.args if isinstance(a, ast.Constant)]
            for flag in map(str, flags):
                found |= {flag.lstrip("-").replace("-", "_"): value for value in default}
    plain = {name: node.value for name, node in found.items() if isinstance(node, ast.Constant)}
    return {name: repr(value) for name, value in plain.items() if _is_shown_as_it_is(value)}


def _is_shown_as_it_is(value: object) -> bool:
    """Whether a shell and `--arg` read what is printed as this very value."""
    if isinstance(value, str):
        return value.isidentifier()
    return isinstance(value, int | float | bool)
