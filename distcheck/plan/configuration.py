"""The matrix that `distcheck verify` runs without `--strategy`: `[tool.distcheck]`, or a file.

    [tool.distcheck]
    strategies = ["ddp", "sync.py:average"]
    worlds = [2, 4]

    [tool.distcheck.strategy."sync.py:average"]    # holds for this one, in place of the above
    worlds = [3]
    arg = { average = true }

A key's value is what its option takes; a list where the option may be given several times, or where
one run has one value and a matrix several.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from distcheck import backends
from distcheck.errors import UsageError
from distcheck.errors.spelling import did_you_mean, nearest
from distcheck.plan.cases import DTYPES, check_workload
from distcheck.plan.owners import is_ones_own
from distcheck.plan.settings import SETTINGS
from distcheck.records.decoding import read_bounded
from distcheck.training import loading
from distcheck.training.adapters import form_names
from distcheck.training.adapters.asked import LOSSES, adaptation_of, check_adaptation
from distcheck.workloads import datasets

SECTION = "tool.distcheck"
_MOST_BYTES = 1 << 20

Words = Annotated[list[str], Meta(min_length=1)]
Counts = Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1)]
Seeds = Annotated[list[Annotated[int, Meta(ge=0, le=2**63 - 1)]], Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Ranks = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0)]

# What each key takes, for the sentence that says so.
TAKES = {
    "strategies": 'names or FILE.py:OBJECT, as in ["ddp", "sync.py:average"]',
    "strategy": "a table for each strategy that differs from the rest",
    "worlds": "numbers of ranks, each at least 1, as in [2, 4]",
    "workloads": 'names of workloads, as in ["lattice", "cnn"]',
    "backends": 'names of backends, as in ["gloo"]',
    "dtypes": 'names of dtypes, as in ["float32"]',
    "seeds": "whole numbers from 0, as in [0, 1]",
    "batch": "a number of samples per step over all ranks, at least 1",
    "deadline_s": "idle seconds after which a world has hung, more than 0",
    "data": "the name of a data set",
    "data_dir": "a folder",
    "device": "cpu or cuda",
    "as": "the name of a form",
    "arg": "a table of values by the name of a parameter, as in { average = true }",
    "set": "a table of values by the name in the module",
    "finish": "the name of a method",
    "reset": "the name of a method",
    "without_data": "numbers of ranks, from 0, as in [0]",
    "loss": "mean, mean/world, sum/global or tokens",
    "accept": 'an intended deviation, as --accept takes it: "low-precision:bf16"',
    "without": "names of cells of --thorough",
    **{name: setting.takes for name, setting in SETTINGS.items()},
}
# Keys, by the parameter that the option of the same purpose has in `distcheck.cli.commands.verify`.
PARAMETERS = {
    "strategies": "strategies", "worlds": "worlds", "workloads": "workloads", "dtypes": "dtype",
    "backends": "backend", "seeds": "seed", "batch": "batch",
    "deadline_s": "deadline_s", "data": "data", "data_dir": "data_dir", "device": "device",
    "as": "form", "arg": "arguments", "set": "variables", "finish": "finish", "reset": "reset",
    "without_data": "without_data", "loss": "loss", "accept": "accept",
    "without": "without", **{name: name for name in SETTINGS},
}  # fmt: skip


class _OfStrategy(msgspec.Struct, rename={"form": "as"}, kw_only=True):
    """The keys that may hold for one strategy alone, beside the settings."""

    worlds: Counts | UnsetType = UNSET
    workloads: Words | UnsetType = UNSET
    backends: Words | UnsetType = UNSET
    dtypes: Words | UnsetType = UNSET
    seeds: Seeds | UnsetType = UNSET
    batch: Count | UnsetType = UNSET
    deadline_s: Seconds | UnsetType = UNSET
    form: str | UnsetType = UNSET
    arg: dict[str, Any] | UnsetType = UNSET
    set: dict[str, Any] | UnsetType = UNSET
    finish: str | UnsetType = UNSET
    reset: str | UnsetType = UNSET
    without_data: Ranks | UnsetType = UNSET
    loss: str | UnsetType = UNSET
    accept: str | UnsetType = UNSET
    without: Words | UnsetType = UNSET


class _OfAll(_OfStrategy, rename={"form": "as"}, kw_only=True):
    """The keys of the section itself, beside the settings."""

    strategies: Words | UnsetType = UNSET
    strategy: dict[str, Any] | UnsetType = UNSET
    data: str | UnsetType = UNSET
    data_dir: str | UnsetType = UNSET
    device: str | UnsetType = UNSET


def _with_settings(name: str, keys: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Keys, with those of the settings; each may be left out, and no other is taken."""
    return msgspec.defstruct(
        name,
        [(one, setting.kind | UnsetType, UNSET) for one, setting in SETTINGS.items()],
        bases=(keys,),
        forbid_unknown_fields=True,
        rename={"form": "as"},
        kw_only=True,
    )


OfStrategy = _with_settings("OfStrategy", _OfStrategy)
OfAll = _with_settings("OfAll", _OfAll)


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says: its keys, and those of single strategies. `file` is empty where there is
    none; `section` is what its keys are called by.
    """

    file: str = ""
    section: str = SECTION
    strategies: tuple[str, ...] = ()
    keys: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}

    def key(self, name: str) -> str:
        """A key as it is written in the file."""
        return _joined(self.section, name)

    def of(self, strategy: str) -> dict[str, Any]:
        """The keys of a strategy's own table, however the path to its file is spelled."""
        wanted = _normal(strategy)
        return next((keys for name, keys in self.own.items() if _normal(name) == wanted), {})


def read_configuration(given: str | None) -> Configuration:
    """The file that was `given`, or the nearest pyproject.toml from here upwards that has a section
    for distcheck. Raises UsageError, naming the key, for what cannot be taken.
    """
    if given is not None:
        path = Path(given)
        content = _load(path)
        nested = _section_of(content, path)
        if nested is None and path.name == "pyproject.toml":
            raise UsageError(f"{path} has no [{SECTION}]; write the matrix there")
        return _check(path, content if nested is None else nested, nested is not None)
    for folder in (Path.cwd(), *Path.cwd().parents):
        path = folder / "pyproject.toml"
        # As a folder that every user may write to is above, another user's file may be.
        if not path.is_file() or not is_ones_own(path):
            continue
        if (nested := _section_of(_load(path), path)) is not None:
            return _check(path, nested, True)
    return Configuration()


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bounded(path, _MOST_BYTES).decode())
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (
        ValueError,
        RecursionError,
        msgspec.DecodeError,
    ) as error:  # bytes that are no text, very deep nesting
        raise UsageError(f"{path} is not TOML: {error}") from error


def _section_of(content: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    tool = content.get("tool", {})
    found = tool.get("distcheck") if isinstance(tool, dict) else None
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{path}: {SECTION} is {found!r}; it takes a table, [{SECTION}]")
    return found


def _check(path: Path, table: dict[str, Any], nested: bool) -> Configuration:
    section = SECTION if nested else ""
    _check_kinds(path, section, table, OfAll)
    own: dict[str, dict[str, Any]] = table.get("strategy", {})
    for name, keys in own.items():
        place = _joined(section, f'strategy."{name}"')
        _check_kinds(path, place, keys, OfStrategy)
        _check_values(path, place, keys)
    strategies = table.get("strategies", list(own))
    keys = {key: value for key, value in table.items() if key not in ("strategies", "strategy")}
    _check_values(path, section, keys)
    for n, name in enumerate(strategies):
        place = _joined(section, f"strategies[{n}]")
        _check_name(path, place, "strategy", name, loading.strategy_names(), folder=path.parent)
    for name in own:
        if name not in strategies:
            place = _joined(section, f'strategy."{name}"')
            raise UsageError(
                f"{path}: {place} is not one of {_joined(section, 'strategies')}, "
                f"{', '.join(strategies)}{_nearest(name, strategies)}"
            )
    folder = path.parent
    return Configuration(
        file=os.path.relpath(path),
        section=section,
        strategies=tuple(_from_here(name, folder) for name in strategies),
        keys=_relocated(keys, folder),
        own={_from_here(name, folder): _relocated(keys, folder) for name, keys in own.items()},
    )


def _check_kinds(path: Path, place: str, table: Any, kind: type[msgspec.Struct]) -> None:
    """Raises UsageError: which key is wrong, what it was, and what it takes."""
    try:
        msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {place} is {table!r}; it takes a table") from None
        known = list(kind.__struct_encode_fields__)
        unknown = [name for name in table if name not in known]
        if unknown:
            raise UsageError(
                f"{path}: unknown key {_joined(place, unknown[0])}"
                f"{_nearest(unknown[0], known) or '; known are ' + ', '.join(known)}"
            ) from None
        where = re.search(r"`\$\.(\w+)((?:\[\d+\])*)", str(error))
        key, index = where.groups() if where else ("", "")
        value = table.get(key)
        for n in map(int, re.findall(r"\d+", index)):
            value = value[n] if isinstance(value, list) else value
        raise UsageError(
            f"{path}: {_joined(place, key)}{index} is {value!r}; "
            f"{_joined(place, key)} takes {TAKES[key] if key else 'a table'}"
        ) from None


def _check_values(path: Path, place: str, keys: Mapping[str, Any]) -> None:
    """Raises UsageError for a name that nothing has."""
    for key, what, known in (
        ("workloads", "workload", loading.workload_names()),
        ("backends", "backend", backends.names_with_orders()),
        ("dtypes", "dtype", DTYPES),
    ):
        for n, name in enumerate(keys.get(key, ())):
            at = f"{_joined(place, key)}[{n}]"
            _check_name(path, at, what, name, known, folder=path.parent)
    for key, words in (
        ("as", form_names()),
        ("loss", LOSSES),
        ("data", datasets.dataset_names()),
        ("device", ("cpu", "cuda")),
    ):
        if key in keys and keys[key] not in words:
            raise UsageError(
                f"{path}: {_joined(place, key)} is {keys[key]!r}; known are {', '.join(words)}"
                f"{_nearest(keys[key], words)}"
            )
    try:
        said = {name: keys[key] for key, name in _ADAPTER.items() if key in keys}
        check_adaptation(adaptation_of(**said), "mean")
    except UsageError as error:
        raise UsageError(f"{path}: [{place}]: {error}") from None


_ADAPTER = {key: PARAMETERS[key] for key in ("as", "arg", "set", "finish", "reset", "without_data")}


def _check_name(path: Path, place: str, what: str, name: str, known: Any, *, folder: Path) -> None:
    try:
        if what == "strategy":
            loading.check_spelling(what, _from_here(name, folder), known)
        elif what == "workload":
            check_workload(_from_here(name, folder))
        elif name not in known:
            raise UsageError(
                f"unknown {what} {name!r}{did_you_mean(name, known)}; known are "
                f"{', '.join(sorted(known))}"
            )
    except UsageError as error:
        raise UsageError(f"{path}: {place}: {error}") from None


def _nearest(name: str, known: Any) -> str:
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def _joined(section: str, key: str) -> str:
    return f"{section}.{key}" if section and key else section or key


def _relocated(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Paths are those of the file's own folder, wherever the command was given."""
    moved = dict(keys)
    if "workloads" in moved:
        moved["workloads"] = [_from_here(name, folder) for name in moved["workloads"]]
    if "data_dir" in moved:
        moved["data_dir"] = _path_from_here(moved["data_dir"], folder)
    return moved


def _from_here(spec: str, folder: Path) -> str:
    place, colon, attribute = spec.partition(":")
    if not loading.is_path(place):
        return spec
    return f"{_path_from_here(place, folder)}{colon}{attribute}"


def _normal(spec: str) -> str:
    place, colon, attribute = spec.partition(":")
    return f"{os.path.abspath(place)}{colon}{attribute}" if loading.is_path(place) else spec


def _path_from_here(place: str, folder: Path) -> str:
    if Path(place).is_absolute() or folder.resolve() == Path.cwd():
        return place
    return os.path.relpath(folder / place)
