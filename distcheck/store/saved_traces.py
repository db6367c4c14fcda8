"""The traces of a saved run, read again; and how much of a machine that may take."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from distcheck.errors import CannotRunError, UsageError
from distcheck.machine.resources import available_bytes
from distcheck.recordings.traces import seal
from distcheck.recordings.traces.seal import LOAD, TRACES, TraceFilesRequest
from distcheck.records.case_ids import is_file_name
from distcheck.records.decoding import decode_json
from distcheck.store.run_folder import SavedCase
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool


@dataclass(frozen=True)
class SavedTrace:
    """A saved case, where its traces are, and the digests of their indexes."""

    folder: Path
    saved: SavedCase
    indexes: tuple[str, ...]


def saved_traces(folder: Path) -> list[SavedTrace]:
    """What a run directory holds of its cases. Raises UsageError where that is nothing, or damaged.
    A caller that runs the code that they name asks `trust` first, and runs what was read here.
    """
    found = sorted(about.parent for about in folder.glob("traces/*/about.json"))
    if not found:
        raise UsageError(
            f"{folder} holds no traces; record some with distcheck verify --save {folder}"
        )
    return [_read_about(place) for place in found]


def _read_about(folder: Path) -> SavedTrace:
    about, indexes = seal.read_about(folder)
    try:
        saved = decode_json(about, SavedCase)
        saved.facts.contract.mesh(saved.case.world)
        name = saved.case.id
        if name != folder.name or not is_file_name(name):
            raise UsageError(
                f"the trace in {folder} is of case {name}; the name of its folder must be that "
                "of the case"
            )
        return SavedTrace(folder=folder, saved=saved, indexes=indexes)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"the trace in {folder} is damaged: {error}") from error


def _check_memory(folder: Path) -> None:
    """Raises CannotRunError where the files of a trace are larger than memory: they may have holes,
    which take no disk.
    """
    try:
        needed = sum(file.stat().st_size for file in folder.glob("run-*/*"))
    except OSError as error:
        where = f"{error.filename}: {error.strerror}"
        raise UsageError(f"the trace in {folder} cannot be read: {where}") from error
    if needed > (available := available_bytes()):
        raise CannotRunError(
            f"the trace in {folder} needs {needed / 2**30:.1f} GiB of memory and "
            f"{available / 2**30:.1f} are available"
        )


def require_tensors(trace: SavedTrace) -> None:
    """Raises UsageError for a trace that keeps digests alone."""
    if not trace.saved.tensors:
        raise UsageError(
            f"the trace in {trace.folder} has digests but no tensors, which judging needs; "
            "compare it with distcheck compare, or record the run again without --digests"
        )


def read_trace(pool: Pool, trace: SavedTrace, *, digests_suffice: bool = False) -> list[int]:
    """The traces of a saved case, in shared memory again; the caller closes the descriptors.

    Raises UsageError where files are missing or damaged, and for a trace that keeps digests alone
    unless `digests_suffice`.
    """
    folder, saved, indexes = trace.folder, trace.saved, trace.indexes
    if not digests_suffice:
        require_tensors(trace)
    case, layout = saved.case, saved.layout
    if (layout.world, layout.steps) != (case.world, case.steps):
        raise UsageError(
            f"the trace in {folder} has {layout.world} ranks and {layout.steps} steps; its case "
            f"has {case.world} and {case.steps}"
        )
    if not 1 <= len(indexes) <= len(TRACES):
        raise UsageError(
            f"the trace in {folder} is damaged: it has {len(indexes)} runs, but a case has 1 or 2"
        )
    _check_memory(folder)
    fds = [os.memfd_create("distcheck-saved") for _ in indexes]
    job = TraceFilesRequest(
        folder=str(folder.absolute()),
        layout=saved.layout,
        indexes=indexes,
        tensors=saved.tensors,
    )
    try:
        run_job(pool, LOAD, job, dict(zip(TRACES, fds, strict=False)))
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        cause = error.__cause__
        if isinstance(cause, OverflowError):  # JSON has numbers of any size, a message of 64 bits
            raise UsageError(f"the trace in {folder} is damaged: {cause}") from error
        raise
    return fds
