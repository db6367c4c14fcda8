"""Which code a saved run makes distcheck run, and whether the person has to say yes first.

All who run what a file or folder names (replay, recheck, compare) go through `require_trust`.

A case names code: strategy, workload, backend, and values that are objects (`--arg x=@mod:name`).
Code is known where distcheck or an installed strategy's name stands for it, or where its file lies
in this checkout: the folder of the current git repository, or else the current folder. A file that
came with a bundle is known where the same file of this checkout holds the same bytes. In a known
file, an object is known that the file defines, and none that it imports from elsewhere
(`sync.py:os.system`). Files of other users of this machine are not known. A text that a case gives
to a function of the checkout may be a command. All other code, and such texts, run only with
`--trust`, or after a yes on a terminal. Cases that `.distcheck` holds were run
in this folder before, and are not asked about; the command of a whole job always is.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from distcheck import backends
from distcheck.errors import UsageError
from distcheck.errors.shown_text import one_line, shown
from distcheck.plan import provenance
from distcheck.plan.owners import is_ones_own, is_private_folder
from distcheck.plan.source_files import modules_beside
from distcheck.records import Case
from distcheck.records.sources import read_source
from distcheck.store import own_objects
from distcheck.store import run_folder as store
from distcheck.store.unpacking import contents
from distcheck.training import loading
from distcheck.workloads.cells import place_of

# Ours that is meant to be run as a case: other functions of distcheck write and remove files.
_OWN = ("distcheck_strategies", "distcheck_mutants")
_OWN_WORKLOADS = "distcheck.workloads"
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARY = f"python{sys.version_info.major}.{sys.version_info.minor}"
NOTHING: Mapping[str, str] = {}
_DIGITS = 32  # of SHA-256: 128 bits, which no second file can be made to share


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of code that a case runs: `what` it is for, the file that it is in ("" where none
    is found), how many files belong to it, and their digest.
    """

    what: str
    spec: str
    file: str
    files: int
    digest: str

    def __str__(self) -> str:
        more = "" if self.files < 2 else f" and {self.files - 1} more"
        where = f"{self.file}{more}, SHA-256 {self.digest}" if self.file else "not found here"
        return f"{self.what} {self.spec} ({where})"


def unknown_code(cases: Iterable[Case], unpacked: Mapping[str, str] = NOTHING) -> list[Code]:
    """The code of cases that is not known here. `unpacked` has the files of a bundle: where each
    lies now, and where it was when the bundle was made.
    """
    root = _checkout()
    asked = dict.fromkeys(one for case in cases for one in named(case))
    return [
        _described(what, spec, unpacked)
        for what, spec in asked
        if not _is_known(what, spec, root, unpacked)
    ]


def require_trust(
    given: str,
    cases: Sequence[Case],
    *,
    doing: str,
    trusted: bool,
    may_ask: bool = True,
    unpacked: Mapping[str, str] = NOTHING,
) -> None:
    """Returns where the code of these cases, which were read from `given`, may run: the caller runs
    them and reads none again. `doing` says what for, `unpacked` is as for `unknown_code`. Raises
    UsageError otherwise.
    """
    commands = [case.command_line for case in cases if case.job]
    if trusted or (is_own_run(given) and not commands):
        return
    found = commands or [*map(str, unknown_code(cases, unpacked)), *texts_given(cases)]
    listed = [one_line(shown(text)) for text in found]
    if not listed:
        return
    what = "a command" if commands else "code from outside this checkout"
    runs = f"{doing} {one_line(shown(given))} runs {what}"
    if not (may_ask and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{runs}: {'; '.join(listed)}; read it, then add --trust to run it")
    click.echo(f"{runs[0].upper()}{runs[1:]}:", err=True)
    for line in listed:
        click.echo(f"  {line}", err=True)
    if not click.confirm("Run it?", default=False, err=True):
        raise UsageError(f"{given} was not run; add --trust to run its code without asking")


def texts_given(cases: Iterable[Case]) -> list[str]:
    """The texts that cases give to code that is not distcheck's, in words: numbers are no commands,
    and distcheck's own strategies run none.
    """
    found: dict[str, None] = {}
    for case in cases:
        said = case.adaptation
        for name, text in (*said.arguments, *said.variables):
            if not text.startswith("@") and _has_text(text) and not _is_ours(case.strategy):
                found[f"{name}={text} for {case.strategy}"] = None
    return list(found)


def _has_text(literal: str) -> bool:
    """Whether there is a text in a literal, or it is not a literal."""
    try:
        values = [ast.literal_eval(literal)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return True
    for value in values:
        if isinstance(value, str | bytes):
            return True
        if isinstance(value, list | tuple | set | dict):
            values += [*value, *(value.values() if isinstance(value, dict) else ())]
    return False


def _is_ours(strategy: str) -> bool:
    point = loading.strategy_names().get(strategy)
    place = strategy if point is None else point.module
    return place.partition(":")[0].partition(".")[0] in _OWN


def is_own_run(given: str) -> bool:
    """Whether a case or a run is where distcheck keeps what it ran in this folder."""
    path, kept = Path(given).resolve(), store.DEFAULT_FOLDER.resolve()
    if not is_private_folder(store.DEFAULT_FOLDER) or not is_ones_own(Path(given)):
        return False
    return path.is_relative_to(kept) and not path.is_relative_to(kept / "bundles")


def named(case: Case) -> Iterator[tuple[str, str]]:
    """The code that a case names, and what for."""
    yield "strategy", case.strategy
    yield "workload", case.workload
    yield "backend", case.backend
    said = case.adaptation
    for name, text in (*said.arguments, *said.variables):
        if text.startswith("@") and ":" in text:
            yield f"value of {name}", text[1:]


def _is_known(what: str, spec: str, root: Path | None, unpacked: Mapping[str, str]) -> bool:
    place, _, attribute = (place_of(spec) if what == "workload" else spec).partition(":")
    if place in unpacked:
        here = Path(unpacked[place])
        return _is_same(Path(place), here, root) and _defines(here, attribute, root)
    if loading.is_path(place):
        return _is_within(Path(place), root) and _defines(Path(place), attribute, root)
    if what == "workload" and _is_built_in(place, attribute):
        return True
    if what == "backend" and backends.is_known(spec):
        return True
    if what == "strategy" and not attribute and place in loading.strategy_names():
        return True
    found = provenance.file_of(place)
    if found is None:
        return False
    if place.partition(".")[0] in _OWN or (what == "workload" and _is_below(place, _OWN_WORKLOADS)):
        return own_objects.is_defined(found, attribute, lambda other: other.parent == found.parent)
    return _is_within(found, root) and _defines(found, attribute, root)


def _is_built_in(workload: str, words: str) -> bool:
    """`mlp:other` is not: it is in another module `mlp`, wherever that is found."""
    return workload in loading.workload_names() and (not words or workload in loading.DESCRIBED)


def _is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _defines(file: Path, attribute: str, root: Path | None) -> bool:
    """Whether an object is defined in a file of this checkout, or in another one of it."""
    return own_objects.is_defined(file, attribute, lambda other: _is_within(other, root))


def _is_same(unpacked: Path, place: Path, root: Path | None) -> bool:
    """Whether every file of a bundle's source is in this checkout as it is in the bundle."""
    if not _is_within(place, root) or unpacked.name != place.name:
        return False
    try:
        return all(
            digest == hashlib.sha256(read_source(place.parent / name)).digest()
            for name, digest in contents(unpacked.parent).items()
        )
    except OSError:
        return False


def _is_within(path: Path, root: Path | None) -> bool:
    """Whether a file is this checkout's own: not another user's, installed into it, or unpacked
    there.
    """
    if not is_ones_own(path):
        return False
    path = path.resolve()
    if root is None or not path.is_relative_to(root) or set(_INSTALLED) & set(path.parts):
        return False
    return not path.is_relative_to((store.DEFAULT_FOLDER / "bundles").resolve())


def _checkout() -> Path | None:
    """The folder whose code is taken to be read; None in a home folder and at the root, which hold
    downloads as well.
    """
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if (folder / ".git").exists() and is_ones_own(folder / ".git"):
            return folder
    return None if here in (Path.home().resolve(), Path(here.anchor)) else here


def _described(what: str, spec: str, unpacked: Mapping[str, str]) -> Code:
    place = (place_of(spec) if what == "workload" else spec).rpartition(":")[0] or spec
    file = Path(place) if loading.is_path(place) else provenance.file_of(place)
    if file is None or not file.is_file():
        return Code(what=what, spec=spec, file="", files=0, digest="")
    try:
        if str(file) in unpacked:
            files = contents(file.parent)
        else:
            # An installed module's neighbours are the whole library.
            alone = not loading.is_path(place) or bool({*_INSTALLED, _LIBRARY} & {*file.parts})
            whole = {file.name: read_source(file), **({} if alone else modules_beside(file))}
            files = {name: hashlib.sha256(data).digest() for name, data in whole.items()}
    except OSError as error:
        raise UsageError(
            f"the code of {what} {spec} cannot be read: {error.filename}: {error.strerror}"
        ) from error
    text = "\n".join(f"{digest.hex()} {name}" for name, digest in sorted(files.items()))
    return Code(
        what=what,
        spec=spec,
        file=str(file),
        files=len(files),
        digest=hashlib.sha256(text.encode()).hexdigest()[:_DIGITS],
    )
