"""Records the code, software and hardware that bits may depend on. Does not import torch."""

import hmac
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from distcheck.errors import CannotRunError
from distcheck.plan.source_files import (
    NO_DIGEST,
    SourceFile,
    digest_of_sources,
    project_files_of,
)
from distcheck.records import Case, Change, ChangeKind
from distcheck.records.decoding import read_source
from distcheck.training import loading
from distcheck.workloads.cells import class_of_cell
from distcheck.worlds.remote.secret import shared_secret

# Hardware that does the arithmetic: bits of two machines may differ if one of these differs.
_MACHINE = ("cpu", "cpu_capability", "device", "gpu", "machine")
_SETTINGS = (
    "threads", "deterministic_algorithms", "mkldnn", "float32_matmul_precision", "omp_num_threads",
    "tf32", "cublas_workspace_config", "backend",
)  # fmt: skip
SOFTWARE = ("distcheck", "torch", "python", "cuda", "cudnn", "nccl", "driver", "mpi", "libraries")
_KINDS: dict[str, ChangeKind] = {
    **dict.fromkeys(_MACHINE, "machine"),
    **dict.fromkeys(SOFTWARE, "software"),
    **dict.fromkeys(_SETTINGS, "settings"),
}
_MISSING = NO_DIGEST


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a result: the `environment` of its report, `digests` of all code that the case
    names (`named_code`), and the `seal` (`case_hmac`), if this user ran the case.
    """

    environment: dict[str, Any]
    digests: dict[str, str] = {}
    seal: str = ""


def provenance_of(case: Case, environment: Mapping[str, Any]) -> Provenance:
    found = {what: code_digest(what, spec) for what, spec in named_code(case)}
    digests = {
        what: digest
        for what, digest in found.items()
        if what in ("strategy", "workload") or digest != NO_DIGEST
    }
    return Provenance(environment=dict(environment), digests=digests)


def case_hmac(case: Case, digests: Mapping[str, str]) -> str:
    """Return the HMAC of a case and of the digests of its code, with this user's secret. Return ""
    if no secret can be stored.
    """
    return content_hmac("case", msgspec.json.encode([case, sorted(digests.items())]))


def content_hmac(kind: str, content: bytes) -> str:
    """Return the HMAC of `content`, with this user's secret, or "" if no secret can be stored.
    Seals of different kinds are different.
    """
    try:
        secret = shared_secret()
    except CannotRunError:
        return ""
    return hmac.new(secret, kind.encode() + b"\0" + content, "sha256").hexdigest()


def is_sealed_by_user(case: Case, made: Provenance | None) -> bool:
    """Return True if this user ran the case, and case and digests are unchanged since."""
    if made is None or not made.seal:
        return False
    return hmacs_match(made.seal, case_hmac(case, made.digests))


def hmacs_match(seal: str, wanted: str) -> bool:
    """Compare in constant time, and return True if `seal` equals a nonempty `wanted`."""
    return bool(wanted) and hmac.compare_digest(seal.encode(), wanted.encode())


def named_code(case: Case) -> Iterator[tuple[str, str]]:
    yield "strategy", case.strategy
    yield "workload", case.workload
    yield "backend", case.backend
    said = case.adaptation
    for name, text in (*said.arguments, *said.variables):
        if text.startswith("@") and ":" in text:
            yield f"value of {name}", text[1:]


def code_digest(what: str, spec: str) -> str:
    """Return a digest of the code behind a name; "none" if it cannot be read."""
    try:
        files = file_and_sources(what, spec)[1]
        return digest_of_sources({name: file.data for name, file in files.items()})
    except OSError:
        return NO_DIGEST


def file_and_sources(
    what: str, spec: str, others: Iterable[Path] = ()
) -> tuple[Path | None, dict[str, SourceFile]]:
    """Return the file behind a name, and the sources that belong to it by relative path
    (`files_of`, with `others`). A built-in strategy or an installed module has only one: its folder
    is the whole library. Raises OSError.
    """
    file = source_file_of_name(what, spec)
    if file is None or not file.is_file():
        return None, {}
    is_strategy = what == "strategy" and ":" not in spec and not loading.is_path(spec)
    if is_strategy or (what == "workload" and loading.is_built_in(class_of_cell(spec))):
        return file, {file.name: SourceFile(file, read_source(file))}
    return file, project_files_of(file, others)


def code_files(what: str, spec: str) -> set[Path]:
    """Return the file behind a strategy or workload, and the project files that it imports."""
    try:
        return {one.path for one in file_and_sources(what, spec)[1].values()}
    except OSError:
        return {file} if (file := source_file_of_name(what, spec)) is not None else set()


def source_file_of_name(what: str, spec: str) -> Path | None:
    """Return the source file behind a name. Nothing is imported."""
    place = (class_of_cell(spec) if what == "workload" else spec).partition(":")[0]
    registered = loading.strategy_names() if what == "strategy" else {}
    if place in registered:
        place = registered[place].module
    elif what == "workload" and place in loading.workload_names():
        place = loading.workload_names()[place]
    return Path(place) if loading.is_path(place) else source_file_of_module(place)


def source_file_of_module(module: str) -> Path | None:
    """Return a module's source file. Nothing is imported."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is not None and not rest:
        # The origin of a frozen or built-in module is a word that could be the name of a file.
        return Path(spec.origin) if spec.has_location and spec.origin is not None else None
    # A rank searches the current folder last.
    folders = [Path.cwd() / top] if spec is None else spec.submodule_search_locations or ()
    for folder in folders:
        base = Path(folder, *rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def provenance_changes(then: Provenance, now: Provenance, case: Case) -> list[Change]:
    """Return the differences between two origins, code first. An entry in only one of them counts
    as changed, except code that `then` lacks.
    """
    found = [
        Change(kind="code", name=f"{what} {spec}", then=before, now=after)
        for what, spec in dict(named_code(case)).items()
        if (before := then.digests.get(what)) is not None
        and (after := now.digests.get(what, _MISSING)) != before
    ]
    there, here = _flatten(then.environment), _flatten(now.environment)
    for name in dict.fromkeys([*here, *there]):
        before, after = there.get(name, _MISSING), here.get(name, _MISSING)
        if before != after:
            kind = _KINDS.get(name.partition(".")[0], "other")
            found.append(Change(kind=kind, name=name, then=before, now=after))
    order = get_args(ChangeKind)
    return sorted(found, key=lambda change: order.index(change.kind))


def changes_affecting_bits(then: Provenance, now: Provenance, case: Case) -> list[Change]:
    """Return the `changes` that can affect bits, without host names and Python's location."""
    return [change for change in provenance_changes(then, now, case) if change.kind != "other"]


def _flatten(environment: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return values as text, with names of nested ones joined by dots."""
    found: dict[str, str] = {}
    for name, value in environment.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{name}.")
        elif value is None or value == "":
            found[prefix + name] = _MISSING
        else:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            found[prefix + name] = text
    return found
