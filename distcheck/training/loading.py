"""Resolves a name to an object: strategies and workloads, built in or from user code.

Three spellings are accepted everywhere:

 allreduce            a name: an entry point `distcheck.strategies`, or a built-in workload
 pkg.mod:object       anything importable
 path/to/file.py:object

This runs in the processes that train, never in the front end: code under test may hang, exit or
crash on import.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import stat
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from distcheck.errors import CannotRunError, UsageError, did_you_mean
from distcheck.records import Adaptation
from distcheck.records.run_facts import UsedFeature
from distcheck.training import scripts, sources_only
from distcheck.training.loaded import LoadedStrategy, LoadedWorkload, construct_object
from distcheck.workloads.cells import class_of_cell

STRATEGY_GROUP = "distcheck.strategies"
# Workloads whose names accept parameters after a colon.
DESCRIBED = ("generated", "exact", "composite", "mlp")
_AS_IT_IS = Adaptation()
# Libraries that provide engines: import name, and name on PyPI.
PACKAGES = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "fairscale": "fairscale",
    "lightning": "lightning",
    "megatron": "megatron-core",
    "transformers": "transformers",
}


@cache
def strategy_names() -> dict[str, EntryPoint]:
    """Return the entry points of installed strategies by name. Imports no strategy."""
    return {point.name: point for point in _registered()} | _built_in_strategies()


@cache
def _registered() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=STRATEGY_GROUP))


def check_single(spec: str) -> None:
    """Raise UsageError for a name that several installed packages register."""
    places = {point.value for point in _registered() if point.name == spec}
    if len(places) > 1:
        raise UsageError(
            f"strategy {spec!r} is registered by several installed packages; pass one of "
            f"{', '.join(sorted(places))}"
        )


@cache
def _built_in_strategies() -> dict[str, EntryPoint]:
    try:
        points = distribution("distcheck").entry_points
    except PackageNotFoundError:  # not installed, but importable
        return {}
    return {point.name: point for point in points.select(group=STRATEGY_GROUP)}


def _registered_for(spec: str) -> dict[str, EntryPoint]:
    """Return the entry points among which a strategy's name is resolved. Other installed packages
    are searched, which takes as long as a small step, only for a name that is not distcheck's own.
    """
    place, _, attribute = spec.partition(":")
    if attribute or is_path(place):
        return {}
    builtin = _built_in_strategies()
    return builtin if place in builtin else strategy_names()


def workload_names() -> dict[str, str]:
    """Return the modules of the built-in workloads by name."""
    package = "distcheck.workloads"
    folder = Path(__file__).parents[1] / "workloads"
    modules = (one for one in pkgutil.iter_modules([str(folder)]) if not one.ispkg)
    return {module.name: f"{package}.{module.name}" for module in modules}


def is_built_in(workload: str) -> bool:
    """Return True if a workload belongs to distcheck, possibly with parameters after its name.
    False for `mlp:other`, which names an object of a module `mlp`.
    """
    name, _, words = workload.partition(":")
    return name in workload_names() and (not words or name in DESCRIBED)


def check_spelling(what: str, spec: str, known: Iterable[str]) -> None:
    """Raise UsageError for a plain name that is not registered, or a file that does not exist.

    Needs neither torch nor an import, so that a misspelled name fails at once.
    """
    place, _, attribute = spec.partition(":")
    if is_path(place):
        if not Path(place).is_file():
            raise UsageError(f"{what} file {place} does not exist")
        if not attribute and not scripts.has_definitions(Path(place)):
            raise UsageError(
                f"{what} {place} defines no function and no class; to judge a script as it is, run "
                f"distcheck job -- torchrun --nproc-per-node 2 {place}"
            )
        if not attribute:
            raise UsageError(
                f"{what} {spec!r} names a file but no object in it; pass {place}:NAME, for "
                f"example {place}:{scripts.first_definition(Path(place))}"
            )
        _check_object(what, spec, Path(place))
    elif not place and attribute:
        raise UsageError(f"{what} {spec!r} names no file; pass path/to/file.py{spec}")
    elif attribute and Path(place).is_file():
        raise UsageError(f"{what} file {place} is not Python; pass a file whose name ends in .py")
    elif not attribute and place not in set(known):
        raise UsageError(
            f"unknown {what} {spec!r}{did_you_mean(spec, known)}; known are "
            f"{', '.join(sorted(known))}, or pass path/to/file.py:object or package.module:object"
        )
    elif attribute and (file := _file_of_module(place)) is not None:
        _check_object(what, spec, file)


def _check_object(what: str, spec: str, file: Path) -> None:
    """Raise UsageError for an object that nothing in a file binds, judged by its text. A file
    without definitions is not checked: its import gives a better error.
    """
    place, _, attribute = spec.partition(":")
    names = scripts.public_definitions(file)
    if names and scripts.never_binds(file, attribute.partition(".")[0]):
        raise _no_object(what, spec, place, names)


def _no_object(what: str, spec: str, place: str, names: Sequence[str]) -> UsageError:
    attribute = spec.partition(":")[2]
    return UsageError(
        f"{what} {spec!r}: {place} has no object {attribute!r}{did_you_mean(attribute, names)}; it "
        f"defines {', '.join(names[:8]) or 'nothing public'}"
    )


def _file_of_module(place: str) -> Path | None:
    """Return the source of a module of the current folder, or of an installed one, if it can be
    found without an import: not inside a package.
    """
    if "." in place:
        return None
    try:
        found = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return None
    file = Path(f"{place}.py" if found is None or found.origin is None else found.origin)
    return file if file.suffix == ".py" and file.is_file() else None


def load_strategy(spec: str, adaptation: Adaptation = _AS_IT_IS) -> LoadedStrategy:
    """Import and adapt a strategy. Raises UsageError with the problem and a fix."""
    from distcheck.training.adapters.adapting import adapt

    return adapt(_target_of(spec, adaptation), _find)


class CodeInspection(NamedTuple):
    """Facts about a strategy's code.

    guessed    True if its form is a guess
    exchanges  True if it names a collective
    marks      attributes that it looks up and that torch does not define
    uses       features that it uses
    """

    guessed: bool
    exchanges: bool
    marks: tuple[str, ...]
    uses: tuple[UsedFeature, ...]


def inspect_strategy(spec: str, adaptation: Adaptation) -> CodeInspection:
    """Inspect a strategy's code without calling it."""
    from distcheck.training.adapters import hypotheses, uses

    target = _target_of(spec, adaptation)
    sources, declared = target.everything, hypotheses.is_declared(target)
    exchanges, marks = uses.names_collectives(sources), uses.marker_attributes(sources)
    # A closure that is required is used.
    found = [
        u for u in uses.used_features(sources) if u.feature != "closure" or not target.takes_closure
    ]
    return CodeInspection(not declared, exchanges, marks, tuple(found))


def other_ways(spec: str, adaptation: Adaptation) -> tuple[tuple[Adaptation, ...], ...]:
    """Return the ways to call a strategy, except the first; see `adapters/hypotheses`."""
    from distcheck.training.adapters import adapting

    return adapting.other_ways(_target_of(spec, adaptation), _find)


def _target_of(spec: str, adaptation: Adaptation) -> Any:
    from distcheck.training.adapters.source import unwrap_function
    from distcheck.training.adapters.target import Target

    before = {name: text for name, text in adaptation.variables if not text.startswith("@")}
    target, owner, module = _resolve(
        "strategy",
        spec,
        _registered_for(spec),
        before={name: ast.literal_eval(text) for name, text in before.items() if "." not in name},
    )
    home = sys.modules.get(getattr(unwrap_function(target), "__module__", None) or "", module)
    return Target(spec, target, owner, home, adaptation)


def load_trained(spec: str, adaptation: Adaptation) -> LoadedWorkload:
    """Return the workload that trains a strategy's code. Raises UsageError."""
    from distcheck.training.adapters.forms import form_of
    from distcheck.training.adapters.scene import Scene

    target = _target_of(spec, adaptation)
    made = form_of(adaptation.form or "").own.workload(target, Scene(adaptation, _find))
    return LoadedWorkload(workload=made, own_samples=made.samples, sampler=None)


def _find(spec: str) -> Any:
    """Return the object that `@module:object` names."""
    return _resolve("value", spec, {})[0]


def load_workload(spec: str) -> LoadedWorkload:
    """Import a workload. Raises UsageError with the problem and a fix."""
    known, spec = workload_names(), class_of_cell(spec)
    name, _, words = spec.partition(":")
    if is_built_in(spec):
        module = importlib.import_module(known[name])
        target = module.described(words) if words else module.workload
    else:
        check_spelling("workload", spec, known)
        target, _, _ = _resolve("workload", spec, {})
    if inspect.isclass(target):
        target = construct_object(spec, target)
    missing = [m for m in ("model", "loss", "optimizer") if not callable(getattr(target, m, None))]
    if missing:
        raise UsageError(
            f"workload {spec!r} has no {', '.join(missing)}; expected model(sample_shape=, "
            "classes=), loss(model, batch) and optimizer(parameters)"
        )
    return LoadedWorkload(
        workload=target,
        own_samples=getattr(target, "samples", None),
        sampler=getattr(target, "sampler", None),
    )


def load_backend(spec: str) -> str:
    """Register a communication backend with torch, and return torch's name for it.

    `spec` is a name of `distcheck.backends`, one of torch's backends, or a function that registers
    a backend and returns its name. Raises UsageError.
    """
    from distcheck import backends

    if ":" not in spec and not is_path(spec):
        return backends.register(spec) if spec in backends.backend_names() else spec
    check_spelling("backend", spec, backends.backend_names())
    target, _, _ = _resolve("backend", spec, {})
    wanted = "expected a function without arguments that registers it and returns its name in torch"
    if not callable(target):
        raise UsageError(f"backend {spec!r} is a {type(target).__name__}; {wanted}")
    try:
        name = target()
    except Exception as error:
        raise UsageError(f"backend {spec!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(name, str) or not name:
        raise UsageError(f"backend {spec!r} returned {name!r}; {wanted}")
    return name


def is_path(place: str) -> bool:
    """Return True if the part before the colon is a file."""
    return place.endswith(".py") or "/" in place


def _resolve(
    what: str,
    spec: str,
    registered: dict[str, EntryPoint],
    *,
    before: Mapping[str, Any] | None = None,
) -> tuple[Any, type | None, ModuleType]:
    """Return an object, the class that it was reached through, and its module, whose namespace
    contains `before` when it runs.
    """
    place, _, attribute = spec.partition(":")
    if not attribute and place in registered:
        point = registered[place]
        place, attribute = point.module, point.attr
    else:
        # The user's modules; the folder comes last, where its random.py shadows nothing.
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
    check_spelling(what, f"{place}:{attribute}" if attribute else place, registered)
    module = _import(what, place, before or {})
    target: Any = module
    owner: type | None = None
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise _no_object(what, f"{place}:{attribute}", place, _public_names(module))
        owner = target if inspect.isclass(target) else None
        target = getattr(target, part)
    return target, owner, module


def _import(what: str, place: str, before: Mapping[str, Any]) -> ModuleType:
    sources_only.apply_source_only_setting()
    try:
        if is_path(place):
            return _import_file(Path(place), before)
        return importlib.import_module(place)
    except SyntaxError as error:
        raise UsageError(
            f"{what} file {error.filename or place} has a syntax error in line "
            f"{error.lineno or 1}: {error.msg}"
        ) from None
    except ModuleNotFoundError as error:
        if (missing := missing_package_error(error)) is not None:
            raise missing from None
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise UsageError(
                f"{what} module {place} was not found in the current folder or the installed "
                "packages"
            ) from None
        raise UsageError(_raised_on_import(what, place, error)) from None
    except (Exception, SystemExit) as error:
        raise UsageError(_raised_on_import(what, place, error)) from None


def missing_package_error(error: ModuleNotFoundError) -> CannotRunError | None:
    """Return the error for a missing package of PACKAGES; None for any other error."""
    name = (error.name or "").partition(".")[0]
    if name not in PACKAGES:
        return None
    return CannotRunError(f"{name} is not installed here; run pip install {PACKAGES[name]}")


def _raised_on_import(what: str, place: str, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    last = theirs[-1:]
    where = f" ({last[0].filename}, line {last[0].lineno})" if last else ""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if "default process group twice" in text:
        text += " distcheck has already initialized it; guard the call with dist.is_initialized()"
    return f"importing {what} {place} raised {text}{where}"


@cache
def _import_own() -> None:
    """Import what distcheck itself may import later, before a folder of the user comes first in
    `sys.path`: a module of the same name there would take its place.
    """
    for name in ("xxhash", *sources_only.OWN_PACKAGES):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def _import_file(path: Path, before: Mapping[str, Any]) -> ModuleType:
    _import_own()
    path = sources_only.resolved_link(path)
    name = path.stem if path.stem.isidentifier() else "strategy_file"
    folder = path.parent
    if scripts.levels_of_imports(path) and name == path.stem:
        folder = scripts.import_root(path)
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
    if str(folder) not in sys.path:  # so that it can import its neighbors
        # A world-writable folder comes last: another user's files must not shadow Python's modules.
        is_shared = bool(folder.stat().st_mode & stat.S_IWOTH)
        sys.path.insert(len(sys.path) if is_shared else 0, str(folder))
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None:  # another loaded module may have the file's name
        name = f"_distcheck_file_{name}"
    spec = importlib.util.spec_from_file_location(
        name, path, loader=sources_only.source_loader(name, path)
    )
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    vars(module).update(before)
    if not scripts.line_of_training(path):
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit):
            if not scripts.line_of_training(path, begins=True):
                raise
        else:
            return module
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    scripts.run_definitions(module, path, before)
    return module


def _public_names(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
