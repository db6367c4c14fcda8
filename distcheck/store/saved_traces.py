"""Reading of the traces of a saved run, and the limit on the memory that this may take."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from distcheck.errors import CannotRunError, UsageError
from distcheck.machine.resources import available_bytes
from distcheck.recordings.traces import seal
from distcheck.recordings.traces.seal import LOAD, TRACES, TraceFilesRequest
from distcheck.records.case import is_file_name
from distcheck.records.decoding import decode_json
from distcheck.store.run_folder import SavedCase
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool


@dataclass(frozen=True)
class SavedTrace:
    """A saved case, the folder of its traces, and the digests of their indexes."""

    folder: Path
    saved: SavedCase
    indexes: tuple[str, ...]


def saved_traces(folder: Path) -> list[SavedTrace]:
    """Return the saved cases of a run directory. Raises UsageError if there are none or one is
    damaged.

    A caller that runs the code that they name calls `trust` first and runs exactly what was read
    here.
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
        for outcomes in (saved.outcomes, saved.rerun_outcomes):
            ranks = {outcome.rank for outcome in outcomes}
            if len(ranks) < len(outcomes) or not ranks <= {*range(saved.case.world)}:
                raise ValueError("it has the end of a rank twice, or of one that is not there")
        return SavedTrace(folder=folder, saved=saved, indexes=indexes)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"the trace in {folder} is damaged: {error}") from error


def _check_memory(folder: Path) -> None:
    """Raise CannotRunError if the files of a trace exceed memory. Sparse files can exceed it
    without occupying disk space.
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
    if not trace.saved.tensors:
        raise UsageError(
            f"the trace in {trace.folder} has digests but no tensors, which judging needs; "
            "compare it with distcheck compare, or record the run again without --digests"
        )


def read_trace(pool: Pool, trace: SavedTrace, *, digests_suffice: bool = False) -> list[int]:
    """Return file descriptors of a saved case's traces in shared memory; the caller closes them.

    Raises UsageError if files are missing or damaged, and for a trace of digests without tensors
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
        if isinstance(cause, OverflowError):  # JSON has numbers of any size, a message 64 bits
            raise UsageError(f"the trace in {folder} is damaged: {cause}") from error
        raise
    return fds
