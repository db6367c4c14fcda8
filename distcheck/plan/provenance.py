"""Where a run was made: what its bits may depend on besides its case. No torch."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import xxhash

from distcheck.plan.source_files import digest_with_modules, modules_beside
from distcheck.records import Case, Change, ChangeKind
from distcheck.records.sources import read_source
from distcheck.training import loading
from distcheck.workloads.cells import place_of

# What arithmetic is done on; bits of two machines that differ in one of these need not be equal.
_MACHINE = ("cpu", "cpu_capability", "device", "gpu", "machine")
_SETTINGS = (
    "threads", "deterministic_algorithms", "mkldnn", "float32_matmul_precision", "omp_num_threads",
    "tf32", "cublas_workspace_config", "backend",
)  # fmt: skip
_SOFTWARE = ("distcheck", "torch", "python", "cuda", "cudnn", "nccl", "driver", "mpi", "libraries")
_KINDS: dict[str, ChangeKind] = {
    **dict.fromkeys(_MACHINE, "machine"),
    **dict.fromkeys(_SOFTWARE, "software"),
    **dict.fromkeys(_SETTINGS, "settings"),
}
_OF_CODE = ("strategy", "workload")  # fields of a case that name code
_MISSING = "none"


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """`environment` is a report's; `digests` are of the code of strategy and workload."""

    environment: dict[str, Any]
    digests: dict[str, str] = {}


def provenance_of(case: Case, environment: Mapping[str, Any]) -> Provenance:
    """What is known of a case that runs here and now."""
    digests = {
        "strategy": code_digest("strategy", case.strategy),
        "workload": code_digest("workload", case.workload),
    }
    return Provenance(environment=dict(environment), digests=digests)


def code_digest(what: str, spec: str) -> str:
    """A digest of the code behind a strategy or workload; "none" where there is none to read."""
    place = spec.rpartition(":")[0]
    if place.endswith(".py"):
        return digest_with_modules(Path(place))
    return file_digest(what, spec)


def file_digest(what: str, spec: str) -> str:
    """A digest of the file that a name leads to, found without importing it; "none" if it is not
    found. Two machines that load the same bytes have the same digest.
    """
    file = _file_behind(what, spec)
    try:
        return xxhash.xxh3_64_hexdigest(read_source(file)) if file is not None else "none"
    except OSError:
        return "none"


def code_files(what: str, spec: str) -> set[Path]:
    """The file behind a strategy or workload, and the modules beside it that it imports."""
    file = _file_behind(what, spec)
    if file is None:
        return set()
    try:
        return {file, *(file.parent / inside for inside in modules_beside(file))}
    except OSError:
        return {file}


def _file_behind(what: str, spec: str) -> Path | None:
    place = (place_of(spec) if what == "workload" else spec).partition(":")[0]
    registered = loading.strategy_names() if what == "strategy" else {}
    if place in registered:
        place = registered[place].module
    elif what == "workload" and place in loading.workload_names():
        place = loading.workload_names()[place]
    return Path(place) if loading.is_path(place) else file_of(place)


def file_of(module: str) -> Path | None:
    """Where a module's source is; only its top-level package is looked up, none is imported."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not rest:
        # A frozen or built-in module has a word there, which could be the name of a file.
        if spec is None or not spec.has_location or spec.origin is None:
            return None
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def changes(then: Provenance, now: Provenance, case: Case) -> list[Change]:
    """What differs, code first. What only one of the two knows of has changed as well; code that
    `then` knows nothing of has not.
    """
    found = [
        Change(kind="code", name=f"{what} {getattr(case, what)}", then=before, now=after)
        for what, before in then.digests.items()
        if what in _OF_CODE and (after := now.digests.get(what, _MISSING)) != before
    ]
    there, here = _flat(then.environment), _flat(now.environment)
    for name in dict.fromkeys([*here, *there]):
        before, after = there.get(name, _MISSING), here.get(name, _MISSING)
        if before != after:
            kind = _KINDS.get(name.partition(".")[0], "other")
            found.append(Change(kind=kind, name=name, then=before, now=after))
    order = get_args(ChangeKind)
    return sorted(found, key=lambda change: order.index(change.kind))


def changes_for_bits(then: Provenance, now: Provenance, case: Case) -> list[Change]:
    """Those among `changes` that bits may depend on: not where Python is, nor on which hosts."""
    return [change for change in changes(then, now, case) if change.kind != "other"]


def _flat(environment: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Values as text, with the names of what is within others put before theirs."""
    found: dict[str, str] = {}
    for name, value in environment.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        elif value is None or value == "":
            found[prefix + name] = _MISSING
        else:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            found[prefix + name] = text
    return found
