"""Reads the matrix that `distcheck verify` runs without `--strategy`: `[tool.distcheck]`, or a
file.

    [tool.distcheck]
    strategies = ["ddp", "sync.py:average"]
    worlds = [2, 4]

    [tool.distcheck.strategy."sync.py:average"]    # overrides the above for this strategy
    worlds = [3]
    arg = { average = true }

A key takes the same values as its option. It takes a list if the option may be repeated, or if a
matrix may have several values of a setting that has one value in a run.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from distcheck.errors import UsageError, did_you_mean, most_similar_name
from distcheck.plan.settings import SETTINGS, Setting, with_adaptation
from distcheck.private import has_trusted_owner
from distcheck.records.decoding import read_bounded
from distcheck.training import loading
from distcheck.training.adapters.options import check_adaptation
from distcheck.workloads import cells

SECTION = "tool.distcheck"
_MOST_BYTES = 1 << 20

BY_KEY: Mapping[str, str] = {setting.key: name for name, setting in SETTINGS.items()}
# Description of each key's values, for error messages.
TAKES = {
    **{setting.key: setting.takes for setting in SETTINGS.values()},
    "strategy": "a table for each strategy that differs from the rest; a list is strategies",
}


def _keys(name: str, settings: Mapping[str, Setting], **more: Any) -> type[msgspec.Struct]:
    """Return a table type with the keys of settings; all are optional, no other is accepted."""
    kinds = {**{setting.key: setting.kind for setting in settings.values()}, **more}
    return msgspec.defstruct(
        name,
        [(f"{key}_", kind | UnsetType, UNSET) for key, kind in kinds.items()],
        rename=lambda field: field.removesuffix("_"),  # `as` is a keyword of Python
        forbid_unknown_fields=True,
        kw_only=True,
    )


OfStrategy = _keys("OfStrategy", {n: s for n, s in SETTINGS.items() if not s.of_all})
OfAll = _keys("OfAll", SETTINGS, strategy=dict[str, Any])


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a configuration file.

    `file` is empty if no file was found. `section` is the prefix of its keys in messages.
    """

    file: str = ""
    section: str = SECTION
    strategies: tuple[str, ...] = ()
    keys: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}

    def key(self, name: str) -> str:
        return _join_key(self.section, name)

    def of(self, strategy: str) -> dict[str, Any]:
        """Return the keys from a strategy's table, however the path to its file is spelled."""
        wanted = _normal(strategy)
        return next((keys for name, keys in self.own.items() if _normal(name) == wanted), {})


def read_configuration(given: str | None) -> Configuration:
    """Return the contents of the `given` file, or of the nearest pyproject.toml upward with a
    section for distcheck. Raises UsageError, with the key, for an invalid value.
    """
    if given is not None:
        path = Path(given)
        content = _load(path)
        nested = _section_of(content, path)
        if nested is None and path.name == "pyproject.toml":
            raise UsageError(f"{path} has no [{SECTION}]; add the matrix there")
        return _check(path, content if nested is None else nested, nested is not None)
    for folder in (Path.cwd(), *Path.cwd().parents):
        path = folder / "pyproject.toml"
        # A folder above may be writable for every user, so its file may be another user's.
        if not path.is_file() or not has_trusted_owner(path, like=Path.cwd()):
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
    ) as error:  # not UTF-8; nested too deep
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
        place = _join_key(section, f'strategy."{name}"')
        _check_kinds(path, place, keys, OfStrategy)
        _check_values(path, place, keys)
    strategies = table.get("strategies", list(own))
    keys = {key: value for key, value in table.items() if key not in ("strategies", "strategy")}
    _check_values(path, section, {**keys, "strategies": strategies})
    for name in own:
        if name not in strategies:
            place = _join_key(section, f'strategy."{name}"')
            raise UsageError(
                f"{path}: {place} is not one of {_join_key(section, 'strategies')}, "
                f"{', '.join(strategies)}{_nearest(name, strategies)}"
            )
    folder = path.parent
    return Configuration(
        file=os.path.relpath(path),
        section=section,
        strategies=tuple(_relocate_spec(name, folder) for name in strategies),
        keys=_relocate_paths(keys, folder),
        own={
            _relocate_spec(name, folder): _relocate_paths(keys, folder)
            for name, keys in own.items()
        },
    )


def _check_kinds(path: Path, place: str, table: Any, kind: type[msgspec.Struct]) -> None:
    """Raise UsageError with the wrong key, its value, and the values that it takes."""
    try:
        msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {place} is {table!r}; it takes a table") from None
        known = list(kind.__struct_encode_fields__)
        unknown = [name for name in table if name not in known]
        if unknown:
            raise UsageError(
                f"{path}: unknown key {_join_key(place, unknown[0])}"
                f"{_nearest(unknown[0], known) or '; known are ' + ', '.join(known)}"
            ) from None
        where = re.search(r"`\$\.(\w+)((?:\[\d+\])*)", str(error))
        key, index = where.groups() if where else ("", "")
        value = table.get(key)
        for n in map(int, re.findall(r"\d+", index)):
            value = value[n] if isinstance(value, list) else value
        raise UsageError(
            f"{path}: {_join_key(place, key)}{index} is {value!r}; "
            f"{_join_key(place, key)} takes {TAKES[key] if key else 'a table'}"
        ) from None


def _check_values(path: Path, place: str, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        setting = SETTINGS[BY_KEY[key]]
        if setting.names is None:
            continue
        many = isinstance(value, list)
        for n, name in enumerate(value if many else [value]):
            at = f"{_join_key(place, key)}{f'[{n}]' * many}"
            _check_name(path, at, setting, name)
    try:
        said = {BY_KEY[key]: value for key, value in keys.items()}
        check_adaptation(with_adaptation(said)["adaptation"], "mean")
    except UsageError as error:
        raise UsageError(f"{path}: [{place}]: {error}") from None


def _check_name(path: Path, place: str, setting: Setting, name: str) -> None:
    assert setting.names is not None
    what, known = setting.parameter, tuple(setting.names())
    try:
        if setting.is_open:
            spec = _relocate_spec(name, path.parent)
            loading.check_spelling(what, cells.class_of_cell(spec), known)
        elif name not in known:
            raise UsageError(
                f"unknown {what} {name!r}{did_you_mean(name, known)}; known are {', '.join(known)}"
            )
    except UsageError as error:
        raise UsageError(f"{path}: {place}: {error}") from None


def _nearest(name: str, known: Any) -> str:
    found = most_similar_name(name, known)
    return f"; did you mean {found}?" if found else ""


def _join_key(section: str, key: str) -> str:
    return f"{section}.{key}" if section and key else section or key


def _relocate_paths(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    moved = dict(keys)
    if "workloads" in moved:
        moved["workloads"] = [_relocate_spec(name, folder) for name in moved["workloads"]]
    if "data_dir" in moved:
        moved["data_dir"] = _path_from_here(moved["data_dir"], folder)
    return moved


def _relocate_spec(spec: str, folder: Path) -> str:
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
