"""Requires consent before executing code that a saved run names. Every caller uses `require_trust`.

A case names code: strategy, workload, backend, and values that are objects (`--arg x=@mod:name`).
Code is trusted

- under the name of a built-in or of an installed strategy;
- in a case of this user (`provenance.is_sealed_by_user`), if its digest is the recorded one;
- in a file of this checkout (`Checkout`) that is not at or below the given folder or file. A file
  of a bundle is equivalent to a checkout file with the same bytes.

In a trusted file, an object is trusted if the file defines it, and not if the file imports it
(`sync.py:os.system`). A text argument that a case passes to a function of the checkout may be a
command. Untrusted code, and such texts, run only with `--trust` or after confirmation on a
terminal. The command of a job always needs confirmation.
"""

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec

from distcheck import backends
from distcheck.errors import UsageError
from distcheck.errors.shown_text import MOST_CHARACTERS, displayable, escaped, one_line
from distcheck.plan import provenance
from distcheck.plan.provenance import Provenance, code_digest, is_sealed_by_user, named_code
from distcheck.plan.source_files import (
    NO_DIGEST,
    combined_digest,
    paths_in_common_folder,
    project_files_of,
)
from distcheck.private import has_trusted_owner
from distcheck.records import Case
from distcheck.records.decoding import parse_source
from distcheck.store import run_folder as store
from distcheck.store.origin import run_git
from distcheck.store.unpacking import digests_of_files
from distcheck.training import loading, sources_only
from distcheck.training.scripts import import_root
from distcheck.workloads.cells import class_of_cell

# Packages whose objects may run as cases (other functions of distcheck write and remove files), and
# the folders of a checkout that they stand for.
_OWN = {"distcheck_strategies": "strategies", "distcheck_mutants": "tests/mutants"}
_HOME = Path(__file__).resolve().parents[2]
_OWN_WORKLOADS = "distcheck.workloads."
NOTHING: Mapping[str, str] = {}
UNRECORDED: Mapping[str, Provenance] = {}


class CodeOfCase(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of code that a case runs.

    what    its purpose
    file    its path; "" if none is found
    root    folder that it is imported from
    files   digests of its files by absolute path; `digest` combines them
    why     reason that it is not trusted
    """

    what: str
    spec: str
    file: str
    root: str
    files: dict[str, str]
    digest: str
    why: str = ""

    def __str__(self) -> str:
        more = "" if len(self.files) < 2 else f" and {len(self.files) - 1} more"
        where = f"{self.file}{more}, SHA-256 {self.digest}" if self.file else "not found here"
        return f"{self.what} {self.spec} ({where}{self.why and f'; {self.why}'})"


class Checkout:
    """The folder whose code the user is responsible for: the git repository around the current
    folder, or else the current folder. The home folder and the root never qualify: they also
    contain downloads.

    `given` is the folder or file that was handed over, if any. In a git repository, a checkout file
    is tracked, has the bytes of its index entry, and is not at or below `given`. Without git, a
    downloaded file cannot be distinguished from the user's. A checkout file must then be outside
    the folder that contains `given`, and unchanged since it was recorded. Files that belong to a
    different user, are installed, or were unpacked from a bundle never qualify.
    """

    def __init__(self, given: str = "") -> None:
        here = Path.cwd().resolve()
        folders = (here, *here.parents)
        owned = (f for f in folders if (f / ".git").exists() and has_trusted_owner(f / ".git"))
        git = next(owned, None)
        self.is_git = git is not None
        home = (Path.home().resolve(), Path(here.anchor))
        self._root = git or (None if here in home else here)
        self._not_ours = [(store.DEFAULT_FOLDER / "bundles").resolve()]
        self._entries: dict[Path, dict[Path, str]] = {}
        self.beside: tuple[Path, ...] = ()  # files loaded together with the one in question
        self.pins: dict[str, str] = {}  # the bytes that were found to be trusted, by absolute path
        if given:
            path = Path(given).resolve()
            run = path if self.is_git else _run_of(path)
            if not self.is_git and self._root is not None and run.parent != self._root:
                run = run.parent if run.parent.is_relative_to(self._root) else run
            is_around = self._root is not None and not run.is_relative_to(self._root)
            self._not_ours.append(path if is_around else run)

    def holds(self, path: Path) -> bool:
        """Return True if a file of this user is in the checkout, and was not handed over."""
        if not has_trusted_owner(path):
            return False
        path = path.resolve()
        if self._root is None or not path.is_relative_to(self._root):
            return False
        return not sources_only.looks_installed(path) and not any(
            map(path.is_relative_to, self._not_ours)
        )

    def has(self, path: Path) -> bool:
        """Return True if a file, and its imports from its folder, belong to the checkout."""
        if not self.holds(path):  # the folder of an installed file is the whole library
            return False
        try:
            files = [*project_files_of(path, self.beside).values()]
        except OSError:
            return False
        if not all(self._is_ours(file.path, file.data) for file in files):
            return False
        for place, file in ((path, files[0]), *((one.path, one) for one in files)):
            self.pins[os.path.abspath(place)] = hashlib.sha256(file.data).hexdigest()
        return True

    def _is_ours(self, path: Path, data: bytes) -> bool:
        return self.holds(path) and (not self.is_git or self._is_unmodified(path.resolve(), data))

    def _is_unmodified(self, path: Path, data: bytes) -> bool:
        """Return True if the content of a file is that of its entry in the git index. Only the
        index is read: running a content filter would execute a program.
        """
        assert self._root is not None
        if path.parent not in self._entries:
            self._entries[path.parent] = self._tracked_digests(path.parent)
        entry = self._entries[path.parent].get(path, "")
        algorithm = "sha1" if len(entry) == 40 else "sha256"
        return entry == hashlib.new(algorithm, b"blob %d\0" % len(data) + data).hexdigest()

    def _tracked_digests(self, folder: Path) -> dict[Path, str]:
        """Return the digests that the git index has for the files below a folder."""
        listed = run_git(
            "-c", f"safe.directory={self._root}", "--literal-pathspecs", "-C", str(self._root),
            "ls-files", "--stage", "-z", "--full-name", "--", str(folder),
        )  # fmt: skip
        found: dict[Path, str] = {}
        for entry in filter(None, (listed or "").split("\0")):
            about, _, name = entry.partition("\t")
            _, digest, stage = about.split()
            if stage == "0" and self._root is not None:
                found[self._root / name] = digest
        return found


@dataclass
class TrustedCode:
    """Digests of trusted files by path, and folders outside the checkout they import from."""

    pins: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)


def untrusted_code(
    cases: Iterable[Case],
    unpacked: Mapping[str, str] = NOTHING,
    *,
    given: str = "",
    made: Mapping[str, Provenance] = UNRECORDED,
    trusted: "TrustedCode | None" = None,
) -> list[CodeOfCase]:
    """Return the code of cases that is not trusted.

    `given` is the source of the cases, `made` has their provenances by id, and `unpacked` maps the
    original path of each file of a bundle to its current path. The function adds trusted code to
    `trusted`.
    """
    checkout = Checkout(given)
    trusted = TrustedCode() if trusted is None else trusted
    trusted.pins = checkout.pins
    found: dict[tuple[str, str], CodeOfCase] = {}
    for case in cases:
        digests = made[case.id].digests if case.id in made else {}
        has_run = is_sealed_by_user(case, made.get(case.id))
        places = [class_of_cell(spec).partition(":")[0] for _, spec in named_code(case)]
        files = [Path(one) for one in places if loading.is_path(one) and one not in unpacked]
        checkout.beside = tuple(filter(Path.is_file, files))
        for what, spec in named_code(case):
            recorded = digests.get(what, NO_DIGEST)
            if (what, spec) in found or _is_known(what, spec, checkout, unpacked, recorded):
                continue
            code = _describe_code(what, spec, unpacked, checkout.beside)
            if has_run and code.digest == recorded != NO_DIGEST:
                checkout.pins.update(code.files)
                trusted.roots.append(code.root)
                continue
            why = "changed since it was recorded" if NO_DIGEST != recorded != code.digest else ""
            if code.file and not has_trusted_owner(Path(code.file)):
                why = "it belongs to another user"
            found[what, spec] = msgspec.structs.replace(code, why=why)
    return list(found.values())


def require_trust(
    given: str,
    cases: Sequence[Case],
    made: Mapping[str, Provenance],
    *,
    doing: str,
    trusted: bool,
    may_ask: bool = True,
    folder: Path | None = None,
    unpacked: Mapping[str, str] = NOTHING,
) -> None:
    """Return if the code of these cases, which were read from `given`, may run. The caller must run
    exactly these objects.

    `doing` names the action in the question. `made` and `unpacked` are as in `unknown_code`.
    `folder` is the folder of an unpacked bundle. Raises UsageError if untrusted code is not
    confirmed, and for a case that reads a file outside its run.
    """
    handed_over = given if folder is None else ""  # the files of a bundle are not below it
    sources_only.require_sources(around=() if trusted else (handed_over,))
    foreign = [case for case in cases if not is_sealed_by_user(case, made.get(case.id))]
    for case in foreign:
        if case.initial:
            _check_within(case.initial, folder or Path(given))
    if trusted:
        return
    commands = [case.command_line for case in cases if case.job]
    texts = text_arguments_of(foreign)
    known = TrustedCode()
    code = (
        []
        if commands
        else untrusted_code(cases, unpacked, given=handed_over, made=made, trusted=known)
    )
    listed = commands or [*map(str, code), *texts]
    if not listed:
        # Exactly the bytes that were found to be trusted run: their folder may be another user's.
        sources_only.require_sources(known.pins, around=(handed_over, *known.roots))
        return
    what = "a command" if commands else "untrusted code"
    runs = f"{doing} {one_line(displayable(given))} runs {what}"
    masked = [one_line(displayable(text)) for text in listed]
    # A mask or a cut would hide what runs; a command of one's own (`foreign` is empty) is known.
    whole = [one_line(escaped(text)) for text in listed] if foreign else masked
    fits = all(len(line) <= MOST_CHARACTERS for line in whole)
    if not (may_ask and fits and sys.stdin.isatty() and sys.stderr.isatty()):
        more = "" if whole == masked else " (the case file has it without masks and cuts)"
        said = f"{runs}: {'; '.join(masked)}{more}"
        raise UsageError(f"{said}; review it, then pass --trust to run it")
    click.echo(f"{runs[0].upper()}{runs[1:]}:", err=True)
    for line in whole:
        click.echo(f"  {line}", err=True)
    if not click.confirm("Run it?", default=False, err=True):
        raise UsageError(f"{given} was not run; pass --trust to run its code without asking")
    # Trusted files may be in the same folders as those that were listed.
    agreed = {**known.pins, **{name: one.files[name] for one in code for name in one.files}}
    around = (handed_over, os.getcwd(), *(one.root for one in code), *known.roots)
    sources_only.require_sources(
        agreed, around=(*around, *map(sources_only.folder_of_top_package, agreed))
    )


def _run_of(given: Path) -> Path:
    """Return the given run folder, or the run folder of the given case file."""
    if given.is_dir():
        return given
    return given.parents[1] if given.parent.name == "cases" else given.parent


def _check_within(file: str, given: Path) -> None:
    if not Path(file).resolve().is_relative_to(_run_of(given.resolve())):
        places = one_line(displayable(f"{given} starts from {file}"))
        raise UsageError(f"a case of {places}, which is not a file of its run; record it again")


def text_arguments_of(cases: Iterable[Case]) -> list[str]:
    """Return the text arguments that cases pass to code outside distcheck, for the question to the
    user. Numbers cannot be commands, and built-in strategies execute no text.
    """
    found: dict[str, None] = {}
    for case in cases:
        said = case.adaptation
        objects = [spec for what, spec in named_code(case) if what.startswith("value of ")]
        if _is_ours(case.strategy) and all(map(_is_ours, objects)):
            continue
        for name, text in (*said.arguments, *said.variables):
            if not text.startswith("@") and _has_text(text):
                found[f"{name}={text} for {case.strategy}"] = None
    return list(found)


def _has_text(literal: str) -> bool:
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
    place = strategy.partition(":")[0] if point is None else point.module
    return not loading.is_path(place) and _is_packaged(place)


def _is_packaged(place: str) -> bool:
    """Return True if a module is of a package of ours, found where we put it: a package of that
    name in the current folder is not ours.
    """
    top = place.partition(".")[0]
    spec = importlib.util.find_spec(top) if top in _OWN else None
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin).resolve()
    return sources_only.is_installed(file) or file.is_relative_to(_HOME / _OWN[top])


def _is_known(
    what: str, spec: str, checkout: Checkout, unpacked: Mapping[str, str], recorded: str
) -> bool:
    place, _, attribute = (class_of_cell(spec) if what == "workload" else spec).partition(":")
    if place in unpacked:
        here = Path(unpacked[place])
        return _is_same(Path(place), here, checkout) and _defines(here, attribute, checkout)
    if loading.is_path(place):
        return _is_of(checkout, Path(place), attribute, code_digest(what, spec), recorded)
    if what == "workload" and loading.is_built_in(class_of_cell(spec)):
        return True
    if what == "backend" and backends.is_known(spec):
        return True
    if what == "strategy" and not attribute and place in loading.strategy_names():
        return True
    found = provenance.source_file_of_module(place)
    if found is None:
        return False
    is_workload = what == "workload" and f"{place}.".startswith(_OWN_WORKLOADS)
    if _is_packaged(place) or is_workload:
        return is_defined_in(found, attribute, lambda other: other.parent == found.parent)
    return _is_of(checkout, found, attribute, code_digest(what, spec), recorded)


def _is_of(checkout: Checkout, file: Path, attribute: str, digest: str, recorded: str) -> bool:
    """Return True if an object belongs to this checkout. Without git, only the run's record shows
    that the code is still the code that ran.
    """
    is_current = checkout.is_git or recorded == digest != NO_DIGEST
    return is_current and checkout.has(file) and _defines(file, attribute, checkout)


def _defines(file: Path, attribute: str, checkout: Checkout) -> bool:
    """Return True if an object is defined in this file of the checkout or in another file of it."""
    return is_defined_in(file, attribute, checkout.has)


def _is_same(unpacked: Path, place: Path, checkout: Checkout) -> bool:
    """Return True if a bundle has exactly the sources of a file of this checkout."""
    if not checkout.has(place):
        return False
    try:
        root = import_root(unpacked)
        there: dict[str, bytes] = {}
        for name, one in paths_in_common_folder(project_files_of(place)):
            there.setdefault(name, hashlib.sha256(one.data).digest())
        here = digests_of_files(root)
    except OSError:
        return False
    sources = {name: digest for name, digest in there.items() if name.endswith(".py")}
    checkout.pins.update((os.path.join(root, name), one.hex()) for name, one in here.items())
    return next(iter(there)) == unpacked.relative_to(root).as_posix() and here == sources


def _describe_code(
    what: str, spec: str, unpacked: Mapping[str, str], others: Iterable[Path] = ()
) -> CodeOfCase:
    try:
        file, files = provenance.file_and_sources(what, spec, others)
        digests = {name: hashlib.sha256(one.data).digest() for name, one in files.items()}
        places = {name: str(one.path) for name, one in files.items()}
        root = "" if file is None else str(import_root(file.resolve()))
        if file is not None and str(file) in unpacked:
            digests = digests_of_files(Path(root))
            places = {name: os.path.join(root, name) for name in digests}
    except OSError as error:
        raise UsageError(
            f"the code of {what} {spec} cannot be read: {error.filename}: {error.strerror}"
        ) from error
    return CodeOfCase(
        what=what,
        spec=spec,
        file=str(file or ""),
        root=root,
        files={os.path.abspath(places[name]): one.hex() for name, one in digests.items()},
        digest=combined_digest(digests) if digests else NO_DIGEST,
    )


_MOST_IMPORTS = 8  # from one file or name to the next
_SPECIAL = "__"


def is_defined_in(
    file: Path, attribute: str, is_trusted: Callable[[Path], bool], most: int = _MOST_IMPORTS
) -> bool:
    """Return True if `file` defines `attribute` (a dotted name), or imports it, through at most
    `most` statements, from a file that defines it and that `is_trusted`. Files are only read.

    A file of this checkout imports other modules, so `sync.py:os.system` names code outside this
    checkout. A file defines an object if a top-level `def` or `class` has its name (also below `if`
    or `try`), if it creates the object by calling such a function or class, or if it imports the
    name from a file that defines it in this sense. For a dotted name such as `Sync.reduce`, the
    rest must be a `def` in the body of that class: `HERE.unlink` names a library method, whatever
    `HERE` is.
    """
    name, *rest = attribute.split(".")
    if any(part.startswith(_SPECIAL) for part in (name, *rest)):
        return False
    for left in range(most, 0, -1):
        try:
            body = parse_source(file).body
        except (OSError, SyntaxError):
            return False
        found = _made_by(body, name)
        if isinstance(found, ast.ImportFrom):
            source = _file_of(file, found.module or "", found.level)
            if source is None or not is_trusted(source):
                return False
            file, name = source, _original_name(found, name)
            continue
        if isinstance(found, ast.Assign | ast.AnnAssign):
            maker = _maker(found.value)
            return bool(maker) and not rest and is_defined_in(file, maker, is_trusted, left - 1)
        return _is_within(found, rest)
    return False


def _made_by(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """Return the last statement that binds a name; None if there is none."""
    found = None
    for node in _top_level(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            makes = node.name == name
        elif isinstance(node, ast.Import):
            makes = any((one.asname or one.name.partition(".")[0]) == name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            makes = any((one.asname or one.name) == name for one in node.names)
        else:
            makes = name in _assigned_names(node)
        found = node if makes else found
    return found


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those below `if`, `try` and `with`."""
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _top_level(getattr(node, part, []))


def _original_name(node: ast.ImportFrom, name: str) -> str:
    return next(one.name for one in node.names if (one.asname or one.name) == name)


def _is_within(node: ast.stmt | None, rest: Sequence[str]) -> bool:
    """Return True if a definition contains the rest of a dotted name in its own body."""
    for part in rest:
        if not isinstance(node, ast.ClassDef):
            return False
        inner = [n for n in node.body if getattr(n, "name", None) == part]
        node = inner[-1] if inner else None
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _maker(value: ast.expr | None) -> str:
    """Return the name whose call creates a value: `Sync` in `sync = Sync()`; else empty."""
    called = value.func if isinstance(value, ast.Call) else None
    return called.id if isinstance(called, ast.Name) else ""


def _assigned_names(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _file_of(file: Path, module: str, level: int) -> Path | None:
    if level == 0:
        beside = file.parent.joinpath(*module.split("."))
        return _source(beside) or provenance.source_file_of_module(module)
    folder = file.parents[level - 1] if level <= len(file.parents) else None
    return None if folder is None else _source(folder.joinpath(*filter(None, module.split("."))))


def _source(base: Path) -> Path | None:
    places = (base.with_name(f"{base.name}.py"), base / "__init__.py")
    return next((place for place in places if place.is_file()), None)
