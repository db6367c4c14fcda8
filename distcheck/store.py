"""The run directory: cases before they run, traces and the report after.

    cases/CASE.json                 written before the case starts: `distcheck replay` takes it
    report.json                     the verdict, as `--json` writes it
    traces/CASE/about.json          what `distcheck recheck` needs besides the traces
    traces/CASE/run-1, run-2        one folder per world (run-2 is the rerun), see traces/files.py

With `--save DIR` everything is kept there. Without it, cases, reports and the traces of failed
cases (if they are small) go to `.distcheck/` in the current folder, for the last few runs.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from distcheck.errors import CannotRunError, UsageError
from distcheck.jobs import LOAD, SAVE, CaseFacts, TraceFilesJob
from distcheck.plan import PlannedCheck, check_case
from distcheck.records import Case, Outcome
from distcheck.traces.layout import TraceLayout
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool

DEFAULT_FOLDER = Path(".distcheck")
_KEPT_RUNS = 10
_SMALL_TRACE_BYTES = 64 << 20


class SavedCase(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a case but its tensors."""

    case: Case
    facts: CaseFacts
    planned: tuple[PlannedCheck, ...]
    layout: TraceLayout
    outcomes: tuple[Outcome, ...]
    rerun_outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]
    environment: dict[str, Any]


class Store:
    """Where one run is kept. Created empty; raises before anything runs if it cannot be."""

    def __init__(self, folder: Path, *, keep_everything: bool) -> None:
        self.folder = folder
        self.keep_everything = keep_everything
        self._made_folder = not folder.exists()

    @classmethod
    def at(cls, folder: Path) -> "Store":
        """A run directory that the person named: everything is kept.

        Raises UsageError for a folder that holds something else, CannotRunError where it
        cannot be written.
        """
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--save {folder} is a file; give a folder that is new or empty")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"--save {folder} is not empty; give a folder that is new or empty")
        store = cls(folder, keep_everything=True)
        store._make()
        return store

    @classmethod
    def by_default(cls) -> "Store | None":
        """A folder of this run's own in `.distcheck/`; None where that cannot be written."""
        runs = DEFAULT_FOLDER / "runs"
        name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
        store = cls(runs / name, keep_everything=False)
        try:
            store._make()
            (DEFAULT_FOLDER / ".gitignore").write_text("*\n")
            for old in sorted(runs.iterdir())[:-_KEPT_RUNS]:
                if old != store.folder and not _is_running(old.name):
                    shutil.rmtree(old, ignore_errors=True)
        except (OSError, CannotRunError):
            return None
        return store

    def case_file(self, case: Case) -> Path:
        """Where a case is, or will be."""
        return self.folder / "cases" / f"{case.id}.json"

    def write_case(self, case: Case) -> None:
        """Writes a case down; before it runs, so that what crashes can be replayed."""
        path = self.case_file(case)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(case)) + b"\n")

    def check_space(self, total_bytes: int) -> None:
        """Raises CannotRunError when traces of this size do not fit."""
        if not self.keep_everything:
            return
        free = shutil.disk_usage(self.folder).free
        if total_bytes > free:
            raise CannotRunError(
                f"--save {self.folder} needs about {total_bytes / 2**20:.0f} MiB and "
                f"{free / 2**20:.0f} MiB are free there; free some space or save elsewhere"
            )

    def wants_trace(self, stored_bytes: int, *, failed: bool) -> bool:
        """Whether a trace that takes up `stored_bytes` is to be kept."""
        return self.keep_everything or (failed and stored_bytes <= _SMALL_TRACE_BYTES)

    def write_trace(self, pool: Pool, saved: SavedCase, fds: list[int]) -> None:
        """Writes the traces of a case, the rerun's last. Removes them again on an error.

        Raises CannotRunError or OSError.
        """
        folder = self.folder / "traces" / saved.case.id
        try:
            folder.mkdir(parents=True)
            job = TraceFilesJob(folder=str(folder.absolute()), layout=saved.layout)
            run_job(pool, SAVE, msgspec.msgpack.encode(job), fds)
            (folder / "about.json").write_bytes(msgspec.json.encode(saved))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def discard_if_unused(self) -> None:
        """Removes what was made for a run that never began: its folder holds only cases."""
        if not (self.folder / "report.json").exists() and not (self.folder / "traces").exists():
            gone = self.folder if self._made_folder else self.folder / "cases"
            shutil.rmtree(gone, ignore_errors=True)

    def write_report(self, text: str) -> None:
        """Writes report.json."""
        (self.folder / "report.json").write_text(text)

    def _make(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".writable"
            probe.write_text("distcheck\n")
            probe.unlink()
        except OSError as error:
            raise CannotRunError(
                f"{self.folder} cannot be written: {error.strerror}; save elsewhere"
            ) from error


def _is_running(name: str) -> bool:
    """Whether the run whose folder has this name is still going: it ends in a process id."""
    _, _, pid = name.rpartition("-")
    return pid.isdecimal() and psutil.pid_exists(int(pid))


def stored_bytes(fd: int) -> int:
    """What a sparse trace really takes up."""
    return os.fstat(fd).st_blocks * 512


def saved_cases(folder: Path) -> list[Path]:
    """The folders of a run directory that hold traces. Raises UsageError where there are none."""
    found = sorted(about.parent for about in folder.glob("traces/*/about.json"))
    if not found:
        raise UsageError(
            f"{folder} holds no traces; record some with distcheck verify --save {folder}"
        )
    return found


def read_case(path: Path) -> Case:
    """A case that `write_case` wrote. Raises UsageError where the file is no case."""
    try:
        return check_case(msgspec.json.decode(path.read_bytes(), type=Case))
    except OSError as error:
        raise UsageError(f"case file {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not a case file: {error}") from error
    except UsageError as error:
        raise UsageError(f"{path} is not a case that can run: {error}") from error


def read_trace(pool: Pool, folder: Path) -> tuple[SavedCase, list[int]]:
    """A saved case and its traces, in shared memory again; the caller closes the descriptors.

    Raises UsageError where files are missing or damaged.
    """
    try:
        saved = msgspec.json.decode((folder / "about.json").read_bytes(), type=SavedCase)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"the trace in {folder} is damaged: {error}") from error
    case, layout = saved.case, saved.layout
    runs = sorted(folder.glob("run-*"))
    if not runs:
        raise UsageError(f"the trace in {folder} is damaged: there is no run-1")
    if (layout.world, layout.steps) != (case.world, case.steps):
        raise UsageError(
            f"the trace in {folder} is of {layout.world} ranks and {layout.steps} steps, its case "
            f"says {case.world} and {case.steps}"
        )
    fds = [os.memfd_create("distcheck-saved") for _ in runs]
    job = TraceFilesJob(folder=str(folder.absolute()), layout=saved.layout)
    try:
        run_job(pool, LOAD, msgspec.msgpack.encode(job), fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return saved, fds
