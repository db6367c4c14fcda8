"""The run directory: cases before they run, traces and the report after.

    cases/CASE.json                 written before the case starts: `distcheck replay` takes it
    report.json                     the verdict, as `--json` writes it
    launch.json, finished/CASE.json under a launcher that may start everything anew: which run this
                                    is, and the reports of cases that need not be run again
    traces/CASE/about.json          what `distcheck recheck` needs besides the traces
    traces/CASE/checksums.json      of about.json and the traces' indexes, see traces/seal.py
    traces/CASE/run-1, run-2        one folder per world (run-2 is the rerun), see traces/files.py;
                                    with `record --digests` run-1 alone, without tensors

With `--save DIR` everything is kept there. Without it, cases, reports and the traces of failed
cases (if they are small) go to `.distcheck/` in the current folder, for the last few runs; with all
traces where it is `distcheck compare` that runs.
"""

import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from distcheck import private
from distcheck.errors import CannotRunError, UsageError
from distcheck.errors.masking import masked_json
from distcheck.judge.rerun_bisection import Separation
from distcheck.plan.cases import check_case
from distcheck.plan.coverage import PlannedCheck
from distcheck.plan.provenance import Provenance, seal_of
from distcheck.recordings.traces import seal
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.recordings.traces.seal import SAVE, TRACES, TraceFilesRequest
from distcheck.records import Case, CaseReport, Outcome
from distcheck.records.decoding import decode_json, read_bounded, read_if_whole
from distcheck.records.exit_status import RankEnd
from distcheck.training.jobs import CaseFacts
from distcheck.worlds.launch import run_job
from distcheck.worlds.launchers import Launch
from distcheck.worlds.pool import Pool
from distcheck.worlds.surroundings import TOGETHER, Surroundings

DEFAULT_FOLDER = Path(private.FOLDER)
_KEPT_RUNS = 10
_SMALL_TRACE_BYTES = 64 << 20
_MOST_CASE_BYTES = 16 << 20


class SavedCase(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a case but its tensors."""

    case: Case
    facts: CaseFacts
    planned: tuple[PlannedCheck, ...]
    layout: TraceLayout
    outcomes: tuple[Outcome, ...]
    rerun_outcomes: tuple[Outcome, ...]
    rerun_in: str = ""
    surroundings: Surroundings = TOGETHER  # of the rerun
    separation: Separation | None = None
    defect: tuple[str, str] = ("", "")  # of distcheck's own that ended a rank, its traceback
    notes: tuple[str, ...]
    environment: dict[str, Any]
    digests: dict[str, str] = {}
    seal: str = ""
    tensors: bool = True  # whether tensors are kept, or their digests alone

    @property
    def made(self) -> Provenance:
        return Provenance(environment=self.environment, digests=self.digests, seal=self.seal)


class _Made(msgspec.Struct, frozen=True):
    made: Provenance | None = None


class Store:
    """Where one run is kept. Created empty; raises before anything runs if it cannot be."""

    def __init__(
        self, folder: Path, *, keep_everything: bool, run: str = "", tensors: bool = True
    ) -> None:
        self.folder = folder
        self._run, self._tensors = run, tensors
        self.keep_everything = keep_everything
        self._made_folder = not folder.exists()

    @classmethod
    def at(cls, folder: Path, launch: Launch | None = None, *, tensors: bool = True) -> "Store":
        """A run directory that the person named: everything is kept, or without `tensors` their
        digests alone. Where `launch` is a restart of the run that made it, that run is taken up.

        Raises UsageError for a folder that holds something else, CannotRunError where it
        cannot be written.
        """
        run = "" if launch is None else launch.run
        if launch is not None and _takes_up(folder, launch):
            return cls(folder, keep_everything=True, run=run, tensors=tensors)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; give a new or an empty folder")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; give a new or an empty folder")
        store = cls(folder, keep_everything=True, run=run, tensors=tensors)
        store._make()
        if run:
            private.write(folder / "launch.json", msgspec.json.encode({"run": run}))
        return store

    @classmethod
    def by_default(cls) -> "Store | None":
        """A folder of this run's own in `.distcheck/`; None where that cannot be written."""
        try:
            return cls.of_own(keep_everything=False)
        except CannotRunError:
            return None

    @classmethod
    def of_own(cls, *, keep_everything: bool, spare: Path | None = None) -> "Store":
        """A folder of this run's own in `.distcheck/`, where only the last few runs stay, and
        `spare`. Raises CannotRunError where that cannot be written.
        """
        runs, now = own_folder("runs"), time.time()
        # A clock that was set back, or a container, may give a name for the second time.
        moments = (time.localtime(now + later) for later in itertools.count())
        names = (f"{time.strftime('%Y%m%d-%H%M%S', one)}-{os.getpid()}" for one in moments)
        store = cls(
            next(runs / name for name in names if not (runs / name).exists()),
            keep_everything=keep_everything,
        )
        store._make()
        for old in _runs_in(runs)[:-_KEPT_RUNS]:
            if old != store.folder and not _is_running(old.name) and not _is_within(spare, old):
                shutil.rmtree(old, ignore_errors=True)
        return store

    def case_file(self, case: Case) -> Path:
        """Where a case is, or will be."""
        return self.folder / "cases" / f"{case.id}.json"

    def write_case(self, case: Case, made: Provenance | None = None) -> None:
        """Writes a case down; before it runs, so that what crashes can be replayed, and again
        with where it is run once that is known.
        """
        write_case(self.case_file(case), case, made)

    def finished(self, cases: Sequence[Case]) -> dict[str, CaseReport]:
        """The reports, by case, of what an earlier start of this run has finished."""
        found = {}
        for case in cases if self._run else ():
            file = self.folder / "finished" / f"{case.id}.json"
            report = read_if_whole(file, CaseReport)
            if report is not None and report.case == case:
                found[case.id] = report
        return found

    def write_finished(self, report: CaseReport) -> None:
        """Notes a case that need not be run again, if this run may be started again."""
        if not self._run or any(o.outcome == RankEnd.LOST for o in report.outcomes):
            return
        path = self.folder / "finished" / f"{report.case.id}.json"
        private.folder(path.parent)
        private.write(path, msgspec.json.encode(report))

    def check_space(self, total_bytes: int) -> None:
        """Raises CannotRunError when traces of this size do not fit."""
        if not self.keep_everything or not self._tensors:
            return
        free = shutil.disk_usage(self.folder).free
        if total_bytes > free:
            raise CannotRunError(
                f"{self.folder} needs about {total_bytes / 2**20:.0f} MiB; {free / 2**20:.0f} "
                "MiB are free there; free some space or save elsewhere"
            )

    def wants_trace(self, stored_bytes: int, *, failed: bool) -> bool:
        """Whether a trace that takes up `stored_bytes` is to be kept."""
        return self.keep_everything or (failed and stored_bytes <= _SMALL_TRACE_BYTES)

    def write_trace(self, pool: Pool, saved: SavedCase, fds: list[int]) -> None:
        """Writes the traces of a case, the rerun's last. Removes them again on an error.

        Without tensors the rerun's trace is left out: nothing reads its digests.
        Those that an earlier start of this run has left make room: it did not finish the case.
        Raises CannotRunError or OSError.
        """
        folder = self.folder / "traces" / saved.case.id
        if self._run:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            private.folder(folder, is_new=True)
            job = TraceFilesRequest(
                folder=str(folder.absolute()), layout=saved.layout, tensors=self._tensors
            )
            fds = fds if self._tensors else fds[:1]
            saved = msgspec.structs.replace(saved, tensors=self._tensors)
            indexes = run_job(pool, SAVE, job, dict(zip(TRACES, fds, strict=False)))
            seal.write_about(folder, msgspec.json.encode(saved), indexes)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def discard_if_unused(self) -> None:
        """Removes what was made for a run that never began: its folder holds only cases."""
        if not any((self.folder / n).exists() for n in ("report.json", "traces", "finished")):
            gone = self.folder if self._made_folder else self.folder / "cases"
            shutil.rmtree(gone, ignore_errors=True)
            if self.folder.parent == DEFAULT_FOLDER / "runs":
                _discard_own_folder()

    def write_report(self, text: str) -> None:
        """Writes report.json."""
        private.write(self.folder / "report.json", masked_json(text))

    def _make(self) -> None:
        try:
            probe = private.folder(self.folder) / ".writable"
            private.write(probe, "distcheck\n")
            probe.unlink()
        except OSError as error:
            raise CannotRunError(
                f"{self.folder} cannot be written: {error.strerror}; save elsewhere, or run in a "
                "writable folder"
            ) from error


def write_case(path: Path, case: Case, made: Provenance | None = None) -> None:
    """Write a case to a file in a private folder, with a seal if `made` says where it is run."""
    private.folder(path.parent)
    about = {}
    if made is not None:
        about["made"] = msgspec.structs.replace(made, seal=seal_of(case, made.digests))
    text = msgspec.json.encode({**msgspec.structs.asdict(case), **about})
    private.write(path, msgspec.json.format(text) + b"\n")


def own_folder(name: str, root: Path = DEFAULT_FOLDER) -> Path:
    """Make `.distcheck/NAME`; `root` is the `.distcheck` of another folder than the current one.
    Raises CannotRunError if that cannot be, and if one of the two is not private: what is kept and
    unpacked there could be replaced before it runs, and old runs are removed there.
    """
    place = root / name
    try:
        private.folder(place)
        with (
            contextlib.suppress(FileExistsError),
            private.new_file(root / ".gitignore") as file,
        ):
            file.write(b"*\n")
    except OSError as error:
        raise CannotRunError(
            f"{error.filename or place} cannot be written: {error.strerror}; save elsewhere, or "
            "work in a writable folder of your own"
        ) from error
    return place


def _discard_own_folder() -> None:
    """Removes `.distcheck` where it holds nothing, as before the first run."""
    with contextlib.suppress(OSError):
        (DEFAULT_FOLDER / "runs").rmdir()
        if [path.name for path in DEFAULT_FOLDER.iterdir()] == [".gitignore"]:
            (DEFAULT_FOLDER / ".gitignore").unlink()
            DEFAULT_FOLDER.rmdir()


def _runs_in(folder: Path) -> list[Path]:
    """The folders that runs have made there, by their date: nothing else is removed."""
    found = (path for path in folder.iterdir() if re.fullmatch(r"\d+-\d+-\d+", path.name))
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def _takes_up(folder: Path, launch: Launch) -> bool:
    """Whether a folder was made by an earlier start of the same run. torchrun calls every run
    "none" that was given no name, so that only its count of restarts can tell.
    """
    made_by = read_if_whole(folder / "launch.json", dict[str, Any])
    same = bool(launch.run) and made_by == {"run": launch.run}
    return same and (launch.restarts > 0 or launch.run != "none")


def _is_running(name: str) -> bool:
    """Whether the run whose folder has this name is still going: it ends in a process id."""
    _, _, pid = name.rpartition("-")
    return pid.isdecimal() and psutil.pid_exists(int(pid))


def _is_within(path: Path | None, folder: Path) -> bool:
    return path is not None and path.resolve().is_relative_to(folder.resolve())


def stored_bytes(fd: int) -> int:
    """What a sparse trace really takes up."""
    return os.fstat(fd).st_blocks * 512


KEPT_RUNS = f"distcheck runs lists those that are kept in {DEFAULT_FOLDER} here"


def latest_run() -> Path:
    """The last run that was kept in `.distcheck/`. Raises UsageError where there is none."""
    runs = kept_runs()
    if not runs:
        raise UsageError(f"{DEFAULT_FOLDER} holds no run; give the folder of a run")
    return runs[-1]


def kept_runs() -> list[Path]:
    """The runs that are kept in `.distcheck/`, the latest last."""
    return sorted(path for path in DEFAULT_FOLDER.glob("runs/*") if (path / "cases").is_dir())


def read_case(path: Path, *, jobs: bool = False) -> Case:
    """A case that `write_case` wrote; with `jobs` a whole job's as well, of which its words alone
    mean something. Raises UsageError where the file is not a case.
    """
    try:
        case = decode_json(read_bounded(path, _MOST_CASE_BYTES), Case)
        return _check_job(case, allowed=jobs) if case.job else check_case(case)
    except OSError as error:
        raise UsageError(f"case file {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        if path.name == "report.json":
            raise UsageError(f"{path} is a report; give its folder, {path.parent}") from error
        raise UsageError(f"{path} is not a case file: {error}") from error
    except UsageError as error:
        raise UsageError(f"{path} is not a case that can run: {error}") from error


def _check_job(case: Case, *, allowed: bool) -> Case:
    if not allowed:
        raise UsageError("it is a whole job's, which distcheck replay and open take")
    if any("\0" in word for word in case.job):
        raise UsageError("a word of its command holds a NUL character")
    return case


def read_provenance(path: Path) -> Provenance | None:
    """Where the case of a file was run when it was saved; None where it did not come to that."""
    found = read_if_whole(path, _Made, _MOST_CASE_BYTES)
    return None if found is None else found.made
