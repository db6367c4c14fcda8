"""A run as one zip file that a different user can replay: `distcheck bundle`, `distcheck replay
RUN.zip`.

 bundle.json     the contents, the version, and the variables of `VARIABLES` that were set
 cases/          as in the run directory
 sources/        the files of strategies and workloads, and the modules that they import from
     their project; files of an installed package are included for reading only: a replay runs
     the installed ones
 report.json, traces/    as in the run directory; traces only on request
 README.txt      instructions for a replay

It contains no other environment variables, and no path of an interpreter.
"""

import hashlib
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from distcheck import __version__, private
from distcheck.errors import CannotRunError, UsageError
from distcheck.errors.shown_text import without_secrets
from distcheck.plan import provenance
from distcheck.plan.provenance import Provenance, code_digest, is_sealed_by_user
from distcheck.plan.source_files import (
    NO_DIGEST,
    SourceFile,
    paths_in_common_folder,
    python_sources_of,
)
from distcheck.records import Case, CaseReport
from distcheck.records.case import is_file_name
from distcheck.records.decoding import decode_json, read_bounded, read_or_none, read_source
from distcheck.reports.json_report import check_shape, read_document
from distcheck.store import run_folder as store
from distcheck.store import unpacking
from distcheck.store.trust import Checkout
from distcheck.training import loading

SCHEMA = "distcheck.bundle/1"
# Variables that change how ranks compute or communicate. None of them holds a secret.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "DNNL_MAX_CPU_ISA", "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_MAX_CTAS",
    "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO", "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_NCCL_BLOCKING_WAIT",
)  # fmt: skip
_NOT_FOR_OTHERS = ("executable",)
_MOST_MANIFEST_BYTES = 1 << 20

_README = """\
A run of distcheck {version}, with the code that it judged.

    distcheck replay {name}

reruns its {count}, which executes the files in sources/. The report lists all differences on your
machine (versions, settings, files).
"""


class BundledSource(msgspec.Struct, frozen=True, kw_only=True):
    """The file behind a strategy or workload, in the zip; `runs`: a replay runs it."""

    spec: str
    file: str
    digest: str
    runs: bool


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of bundle.json."""

    schema: str
    distcheck: str
    cases: tuple[str, ...]
    sources: tuple[BundledSource, ...]
    variables: dict[str, str]


def make_bundle(run: Path, target: Path, *, traces: bool) -> tuple[Manifest, list[str]]:
    """Write the zip; return its contents and notes for the user.

    Raises UsageError for a folder that is not a run, CannotRunError if the zip cannot be written.
    """
    if target.exists() and not zipfile.is_zipfile(target):
        raise UsageError(f"{target} exists and is not a zip; pass a different name for the bundle")
    files = sorted(run.glob("cases/*.json"))
    if not files:
        raise UsageError(f"{run} holds no cases; {store.KEPT_RUNS}")
    cases = [store.read_case(path) for path in files]
    place = run / "report.json"
    report = read_document(place) if place.exists() else None
    seen = () if report is None else check_shape(report, place).cases
    remarks: list[str] = []
    members: dict[str, bytes] = {}
    sources = list(_sources(run, cases, files, seen, members, remarks))
    manifest = Manifest(
        schema=SCHEMA,
        distcheck=__version__,
        cases=tuple(case.id for case in cases),
        sources=tuple(sources),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )
    members["bundle.json"] = _json(msgspec.to_builtins(manifest))
    for path in files:
        members[f"cases/{path.name}"] = _json(without_secrets(_anonymize(_read(path))))
    if report is not None:
        members["report.json"] = _json(without_secrets(_anonymize(report)))
    count = "case" if len(cases) == 1 else f"{len(cases)} cases"
    text = _README.format(version=__version__, name=target.name, count=count)
    members["README.txt"] = text.encode()
    kept = _traces(run) if traces else []
    if traces and not kept:
        raise UsageError(f"{run} holds no traces; remove --traces, or verify with --save")
    if kept and not any(path.suffix == ".safetensors" for path in kept):
        remarks.append(f"{run} has digests but no tensors, so recheck cannot judge its traces")
    _write(target, members, run, kept)
    return manifest, remarks


def _traces(run: Path) -> list[Path]:
    """Return the files of the run's traces. Raises UsageError for a link: its target does not
    belong to the run, and a bundle is meant to be shared.
    """
    found = sorted(path for path in run.glob("traces/*/**/*") if not path.is_dir())
    inside = run.resolve()
    for path in found:
        if path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(inside):
            raise UsageError(
                f"{path} is a link or a special file, which a run never contains; remove it, or "
                "remove --traces"
            )
    return found


class CasesToReplay(msgspec.Struct, frozen=True, kw_only=True):
    """Cases to replay.

    made      provenance of each case where it ran before
    folder    the folder of an unpacked bundle
    unpacked  original path of each file of the bundle that is run, to its path here
    """

    cases: list[Case]
    made: dict[str, Provenance]
    folder: Path | None = None
    unpacked: dict[str, str] = {}


def read_cases_to_replay(given: str) -> CasesToReplay:
    """Return the cases of a case file, a run or a bundle. Raises UsageError."""
    path = Path(given)
    if path.is_file() and zipfile.is_zipfile(path):
        return open_bundle(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist; {store.KEPT_RUNS}")
    files = sorted(path.glob("cases/*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path} holds no cases; {store.KEPT_RUNS}")
    cases = [store.read_case(file, jobs=True) for file in files]
    if len(cases) > 1 and any(case.job for case in cases):
        raise UsageError(f"{path} has a whole job in addition to other cases; pass one case file")
    found = {case.id: store.read_provenance(file) for case, file in zip(cases, files, strict=True)}
    order = _order_of(path / "report.json")
    return CasesToReplay(
        cases=sorted(cases, key=lambda case: order.get(case.id, len(order))),
        made={n: before for n, before in found.items() if before is not None},
    )


class _CaseId(msgspec.Struct):
    id: str


class _Listed(msgspec.Struct):
    case: _CaseId


class _Order(msgspec.Struct):
    """The fields of a report that give the order of its cases."""

    cases: list[_Listed]


def _order_of(report: Path) -> dict[str, int]:
    """Return the position of each case in a run's report; empty if it cannot be read."""
    found = read_or_none(report, _Order)
    return {} if found is None else {one.case.id: place for place, one in enumerate(found.cases)}


def open_bundle(path: Path) -> CasesToReplay:
    """Unpack a zip to `.distcheck/bundles/`. Raises UsageError for a file that is not a bundle."""
    folder = store.private_folder("bundles") / f"{path.stem[:80]}-{_digest_of(path)}"
    made: dict[str, Provenance] = {}
    with unpacking.open_archive(path) as archive:
        manifest = _manifest(path, archive)
        runs = [source for source in manifest.sources if source.runs]
        moved = {source.spec: str(folder / source.file) for source in runs}
        with unpacking.unpack_archive(path, archive, folder) as draft:
            for name in manifest.cases:
                file = draft / "cases" / f"{name}.json"
                case, before = _relocate_case(_case(path, file), moved), store.read_provenance(file)
                private.write(file, _json({**msgspec.to_builtins(case), "made": before}))
                if before is not None:
                    made[name] = before
    cases = [store.read_case(folder / "cases" / f"{name}.json") for name in manifest.cases]
    for name, case in zip(manifest.cases, cases, strict=True):
        if case.id != name:
            raise UsageError(f"{path} is damaged: the file of case {name!r} holds case {case.id!r}")
    unpacked = {file: spec.rpartition(":")[0] for spec, file in moved.items()}
    return CasesToReplay(cases=cases, made=made, folder=folder, unpacked=unpacked)


def _case(path: Path, file: Path) -> Case:
    try:
        return decode_json(read_bounded(file), Case)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is damaged: {file.name} is not a case: {error}") from error


def _digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _manifest(path: Path, archive: zipfile.ZipFile) -> Manifest:
    """Return the manifest; every name in it is that of a bundled file. Raises UsageError."""
    try:
        data = unpacking.read_member(path, archive, "bundle.json", most=_MOST_MANIFEST_BYTES)
        manifest = decode_json(data, Manifest)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not a bundle of distcheck: {error}") from error
    if manifest.schema != SCHEMA:
        raise UsageError(
            f"{path} has the schema {manifest.schema!r}; this version reads {SCHEMA!r}; bundle "
            "the run with this version"
        )
    files = {member.filename for member in archive.infolist() if not member.is_dir()}
    for name in manifest.cases:
        if not is_file_name(name) or f"cases/{name}.json" not in files:
            raise UsageError(f"{path} is damaged: it has no file of case {name!r}")
    if not manifest.cases:
        raise UsageError(f"{path} holds no cases; bundle a run that has cases")
    for source in manifest.sources:
        inside = source.file.startswith("sources/") and source.file in files
        if not inside or (source.runs and not source.spec.rpartition(":")[0].endswith(".py")):
            raise UsageError(
                f"{path} is damaged: the file of {source.spec!r} is {source.file!r}, which is not "
                "one of its sources"
            )
    return manifest


def _relocate_case(case: Case, moved: dict[str, str]) -> Case:
    """Return the case with the bundle's files in place of the original ones."""

    def follow(spec: str) -> str:
        if spec not in moved:
            return spec
        return f"{moved[spec]}:{spec.rpartition(':')[2]}"

    return msgspec.structs.replace(
        case, strategy=follow(case.strategy), workload=follow(case.workload)
    )


def _sources(
    run: Path,
    cases: list[Case],
    files: list[Path],
    seen: Iterable[CaseReport],
    members: dict[str, bytes],
    remarks: list[str],
) -> Iterator[BundledSource]:
    checkout, has_run = Checkout(), True
    where = {report.case.strategy: report.strategy_file for report in seen}
    asked: dict[tuple[str, str], str] = {}
    for case, file in zip(cases, files, strict=True):
        made = store.read_provenance(file)
        digests = {} if made is None else made.digests
        has_run &= is_sealed_by_user(case, made)
        for what, spec in (("strategy", case.strategy), ("workload", case.workload)):
            asked.setdefault((what, spec), digests.get(what, ""))
    for (what, spec), digest in asked.items():
        place = spec.rpartition(":")[0]
        runs = place.endswith(".py")
        path = Path(place if runs else "")
        if what == "strategy" and not path.is_file() and _is_behind(spec, where.get(spec, "")):
            path = Path(where[spec])
        if not path.is_file():
            if runs:
                raise UsageError(
                    f"the file of {what} {spec} is missing; bundle the run in its original folder"
                )
            continue
        now = code_digest(what, spec)
        if digest and now != digest:
            remarks.append(
                f"the code of {what} {spec} has changed since the run; the bundle contains the "
                "current version"
            )
        folder = f"sources/{re.sub(r'[^A-Za-z0-9_.-]', '_', place or spec)}"
        try:
            code = (
                python_sources_of(path)
                if runs
                else {path.name: SourceFile(path, read_source(path))}
            )
        except OSError as error:
            how = f"{error.filename or path}: {error.strerror}"
            raise UsageError(f"the code of {what} {spec} cannot be read: {how}") from error
        # The author of this run may have listed a file whose content only this user may know.
        is_known = has_run or now == digest != NO_DIGEST
        places = [one.path for one in code.values()] if runs else []
        are_ours = all(checkout.holds(place) and not place.is_symlink() for place in places)
        if runs and not (is_known and are_ours):
            raise UsageError(
                f"the code of {what} {spec} is not packed: it is a link, outside this checkout, or "
                "not the code that the run recorded; bundle a run of this checkout"
            )
        for name, one in paths_in_common_folder(code):
            members.setdefault(f"{folder}/{name}", one.data)
        yield BundledSource(spec=spec, file=f"{folder}/{next(iter(code))}", digest=now, runs=runs)


def _is_behind(spec: str, file: str) -> bool:
    """Return True if a file listed by a report may define an installed strategy: a source file of
    the same package. A report from elsewhere may list any file.
    """
    points = loading.strategy_names()
    place = spec.partition(":")[0]
    found = provenance.source_file_of_module(points[place].module) if place in points else None
    if found is None or not file.endswith(".py"):
        return False
    return Path(file).resolve().is_relative_to(found.resolve().parent)


def _read(path: Path) -> dict[str, Any]:
    try:
        return decode_json(read_bounded(path), dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not a case file: {error}") from error


def _anonymize(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without values that are useless elsewhere and identify its author."""
    cleaned = dict(document)
    for key in ("environment", "made"):
        if isinstance(cleaned.get(key), dict):
            cleaned[key] = _anonymize(cleaned[key])
    return {key: value for key, value in cleaned.items() if key not in _NOT_FOR_OTHERS}


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"


def _write(target: Path, members: dict[str, bytes], run: Path, traces: list[Path]) -> None:
    """Write the zip atomically: an existing zip is complete, and an interrupted write leaves
    nothing behind. Raises CannotRunError.
    """
    try:
        # No other user can create a file of this name first.
        with private.held(str(target.with_name(private.unique(".part-")))) as draft:
            try:
                with _draft_file(draft) as file:
                    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                        for name, content in members.items():
                            archive.writestr(name, content)
                        for path in traces:  # deflate shrinks floats by 7 %, at 10 MB/s
                            name = path.relative_to(run).as_posix()
                            archive.write(path, name, zipfile.ZIP_STORED)
                    if not draft.exists():
                        # Only with a directory descriptor does Python follow the link to the file.
                        source = f"/proc/self/fd/{file.fileno()}"
                        os.link(source, draft, src_dir_fd=file.fileno(), follow_symlinks=True)
                draft.replace(draft.with_name(target.name))
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise CannotRunError(f"{target} cannot be written: {error.strerror}") from error


def _draft_file(draft: Path) -> IO[bytes]:
    """Return an unnamed file in the folder of `draft`; `draft` if that is unsupported."""
    try:
        return open(os.open(draft.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    except OSError:
        return draft.open("w+b")
