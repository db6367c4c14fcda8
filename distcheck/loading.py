"""From a name to the object: strategies and workloads, built in or a stranger's.

Three spellings are accepted everywhere:

    allreduce            a name: an entry point `distcheck.strategies`, or a built-in workload
    pkg.mod:object       anything importable
    path/to/file.py:object

This runs in the processes that train, never in the one that the person started: code under
test may hang, exit or crash on import.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distcheck.contract import Contract, Samples, Step, Workload, contract_of
from distcheck.errors import UsageError

if TYPE_CHECKING:
    import torch

STRATEGY_GROUP = "distcheck.strategies"
_STRATEGY_FORMS = "a function f(model) or f(model, step), or an object with wrap(model) or sync()"


@dataclass(frozen=True, kw_only=True)
class LoadedStrategy:
    """A strategy with every optional method filled in; `file` is where it was defined."""

    contract: Contract
    file: str
    wrap: "Callable[[torch.nn.Module], torch.nn.Module]"
    scale_loss: "Callable[[torch.Tensor, Step], torch.Tensor]"
    sync: "Callable[[torch.nn.Module, Step], None]"
    close: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class LoadedWorkload:
    """A workload; `own_samples` and `sampler` are None where it leaves them to distcheck."""

    workload: Workload
    own_samples: Callable[[], Samples] | None
    sampler: Callable[[int, int, int, int, int], Sequence[int]] | None


def strategy_names() -> dict[str, EntryPoint]:
    """The installed strategies by name. Imports none of them."""
    return {point.name: point for point in entry_points(group=STRATEGY_GROUP)}


def workload_names() -> dict[str, str]:
    """The built-in workloads: name to module."""
    package = "distcheck.workloads"
    folder = Path(__file__).parent / "workloads"
    return {found.name: f"{package}.{found.name}" for found in pkgutil.iter_modules([str(folder)])}


def summary_of(module: str) -> str:
    """The first line of a module's docstring, read from its source without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return "(cannot be found)"
    if spec is None or spec.origin is None:
        return "(cannot be found)"
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text()))
    return docstring.splitlines()[0] if docstring else ""


def check_spelling(what: str, spec: str, known: Iterable[str]) -> None:
    """Raises UsageError for a plain name that nobody registered or a file that is not there.

    Needs neither torch nor an import, so that a slip of the keyboard is answered at once.
    """
    place, _, attribute = spec.partition(":")
    if _is_path(place):
        if not Path(place).is_file():
            raise UsageError(f"{what} file {place} does not exist")
        if not attribute:
            raise UsageError(
                f"{what} {spec!r} names a file but no object in it; write {place}:NAME, "
                f"for instance {place}:{_first_definition(Path(place))}"
            )
    elif not attribute and place not in set(known):
        raise UsageError(
            f"unknown {what} {spec!r}; known are {', '.join(sorted(known))}, "
            "or give path/to/file.py:object or package.module:object"
        )


def load_strategy(spec: str) -> LoadedStrategy:
    """Imports and adapts a strategy. Raises UsageError with what is wrong and what to do."""
    target = _resolve("strategy", spec, strategy_names())
    contract = contract_of(target)
    file = _source_file(target)
    if inspect.isclass(target):
        target = _construct(spec, target)
    if callable(getattr(target, "wrap", None)) or callable(getattr(target, "sync", None)):
        sync = getattr(target, "sync", None)
        return LoadedStrategy(
            contract=contract,
            file=file,
            wrap=getattr(target, "wrap", None) or _same_module,
            scale_loss=getattr(target, "scale_loss", None) or _same_loss,
            sync=_adapt_sync(spec, sync) if sync is not None else _no_sync,
            close=getattr(target, "close", None) or _no_close,
        )
    if not callable(target):
        raise UsageError(
            f"strategy {spec!r} is a {type(target).__name__}; wanted is {_STRATEGY_FORMS}"
        )
    return LoadedStrategy(
        contract=contract,
        file=file,
        wrap=_same_module,
        scale_loss=_same_loss,
        sync=_adapt_sync(spec, target),
        close=_no_close,
    )


def load_workload(spec: str) -> LoadedWorkload:
    """Imports a workload. Raises UsageError with what is wrong and what to do."""
    known = workload_names()
    if spec in known:
        target = importlib.import_module(known[spec]).workload
    else:
        check_spelling("workload", spec, known)
        target = _resolve("workload", spec, {})
    if inspect.isclass(target):
        target = _construct(spec, target)
    missing = [m for m in ("model", "loss", "optimizer") if not callable(getattr(target, m, None))]
    if missing:
        raise UsageError(
            f"workload {spec!r} lacks {', '.join(missing)}; it needs model(sample_shape=, "
            "classes=), loss(model, batch) and optimizer(parameters)"
        )
    return LoadedWorkload(
        workload=target,
        own_samples=getattr(target, "samples", None),
        sampler=getattr(target, "sampler", None),
    )


def _is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _first_definition(path: Path) -> str:
    try:
        body = ast.parse(path.read_text()).body
    except (SyntaxError, UnicodeDecodeError, OSError):
        return "my_sync"
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return next((name for name in names if not name.startswith("_")), "my_sync")


def _resolve(what: str, spec: str, registered: dict[str, EntryPoint]) -> Any:
    place, _, attribute = spec.partition(":")
    if not attribute and place in registered:
        point = registered[place]
        place, attribute = point.module, point.attr
    check_spelling(what, f"{place}:{attribute}" if attribute else place, registered)
    module = _import(what, place)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise UsageError(
                f"{what} {spec!r}: {place} has no object {attribute!r}; it defines "
                f"{_public_names(module) or 'nothing public'}"
            )
        target = getattr(target, part)
    return target


def _import(what: str, place: str) -> ModuleType:
    try:
        return _import_file(Path(place)) if _is_path(place) else importlib.import_module(place)
    except SyntaxError as error:
        raise UsageError(
            f"{what} file {error.filename or place} has a syntax error in line "
            f"{error.lineno or 1}: {error.msg}"
        ) from None
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise UsageError(
                f"{what} module {place} cannot be found; it is looked for in the current folder "
                "and in the installed packages"
            ) from None
        raise UsageError(_raised_on_import(what, place, error)) from None
    except (Exception, SystemExit) as error:
        raise UsageError(_raised_on_import(what, place, error)) from None


def _raised_on_import(what: str, place: str, error: BaseException) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    last = [f for f in own if f.filename != __file__][-1:]
    where = f" ({last[0].filename}, line {last[0].lineno})" if last else ""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"importing {what} {place} raised {text}{where}"


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = path.stem if path.stem.isidentifier() else "strategy_file"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None:  # a stranger's file may be called like a module that is loaded
        name = f"_distcheck_file_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _public_names(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(own)


def _source_file(target: Any) -> str:
    try:
        inspectable = target if inspect.isroutine(target) or inspect.isclass(target) else None
        return inspect.getsourcefile(inspectable or type(target)) or ""
    except TypeError:
        return ""


def _construct(spec: str, target: type) -> Any:
    try:
        return target()
    except Exception as error:
        raise UsageError(
            f"{spec!r} is a class, and {target.__name__}() raised {type(error).__name__}: {error}"
        ) from error


def _adapt_sync(spec: str, sync: Callable[..., Any]) -> "Callable[[torch.nn.Module, Step], None]":
    """Accepts f(model, step) and f(model)."""
    try:
        parameters = inspect.signature(sync).parameters.values()
    except (TypeError, ValueError):
        return sync
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    takes_two = len(required) == 2 or variadic or [p.name for p in positional[1:2]] == ["step"]
    if keyword or len(required) > 2 or (not positional and not variadic):
        raise UsageError(
            f"strategy {spec!r} has the signature {sync.__name__}{inspect.signature(sync)}; "
            f"wanted is {_STRATEGY_FORMS}"
        )
    if takes_two:
        return sync

    def with_model_only(model: "torch.nn.Module", step: Step) -> None:
        sync(model)

    return with_model_only


def _same_module(model: "torch.nn.Module") -> "torch.nn.Module":
    return model


def _same_loss(loss: "torch.Tensor", step: Step) -> "torch.Tensor":
    return loss


def _no_sync(model: "torch.nn.Module", step: Step) -> None:
    return None


def _no_close() -> None:
    return None
