"""Layout and lifetime of a run directory: cases (stored before they run), traces, and the report.

  cases/CASE.json         written before the case starts; `distcheck replay` reads it
  report.json             the verdict, as `--json` writes it
  seal                    in `.distcheck`: proves that this user has made the run
  launch.json             identifies the run, under a launcher that restarts jobs
  finished/CASE.json      reports of cases that need not run again, under such a launcher
  traces/CASE/about.json  input of `distcheck recheck` in addition to the traces
  traces/CASE/checksums.json  of about.json and the indexes of the traces (traces/seal.py)
  traces/CASE/run-1, run-2  one folder per world (run-2: the rerun), in the format of
                          traces/files.py; `record --digests` writes only run-1, without tensors

`--save DIR` stores everything in DIR. Without it, distcheck stores cases, reports and small traces
of failed cases in `.distcheck/` in the current folder, and keeps only the latest runs. `distcheck
compare` stores all traces there.
"""

import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from distcheck import private
from distcheck.errors import CannotRunError, UsageError
from distcheck.errors.masking import masked_json
from distcheck.judge.rerun_bisection import BisectionResult
from distcheck.machine.resources import available_bytes
from distcheck.plan.cases import check_case
from distcheck.plan.provenance import (
    SOFTWARE,
    Provenance,
    case_hmac,
    content_hmac,
    hmacs_match,
)
from distcheck.recordings.traces import seal
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.recordings.traces.seal import LOAD, SAVE, TRACES, TraceFilesRequest
from distcheck.records import Case, CaseReport, Outcome, PlannedCheck
from distcheck.records.case import is_file_name
from distcheck.records.decoding import decode_json, read_bounded, read_or_none
from distcheck.records.exit_status import RankEnd
from distcheck.records.ledger import Ledger
from distcheck.training.jobs import CaseFacts
from distcheck.worlds.launch import run_job
from distcheck.worlds.launchers import Launch
from distcheck.worlds.pool import Pool
from distcheck.worlds.surroundings import TOGETHER, Surroundings

DEFAULT_FOLDER = Path(private.FOLDER)
_KEPT_RUNS = 10
_SEAL, _REPORT = "seal", "report.json"
_SMALL_TRACE_BYTES = 64 << 20
_MOST_CASE_BYTES = 16 << 20


class SavedCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case with everything that a judge needs, except its tensors."""

    case: Case
    facts: CaseFacts
    planned: tuple[PlannedCheck, ...]
    layout: TraceLayout
    outcomes: tuple[Outcome, ...]
    rerun_outcomes: tuple[Outcome, ...]
    rerun_in: str = ""
    surroundings: Surroundings = TOGETHER  # of the rerun
    separation: BisectionResult | None = None
    defect: tuple[str, str] = ("", "")  # of distcheck, if it ended a rank: kind, traceback
    notes: tuple[str, ...]
    ledger: Ledger | None = None
    environment: dict[str, Any]
    digests: dict[str, str] = {}
    seal: str = ""
    tensors: bool = True  # True if tensors are stored, False if only their digests are

    @property
    def made(self) -> Provenance:
        return Provenance(environment=self.environment, digests=self.digests, seal=self.seal)


class _Finished(msgspec.Struct, frozen=True):
    """A report as it was written, and its seal."""

    report: msgspec.Raw
    seal: str


class _Made(msgspec.Struct, frozen=True):
    made: Provenance | None = None


class RunStore:
    """Storage of one run, in an empty folder. Raises before anything runs if unusable."""

    def __init__(
        self, folder: Path, *, keep_everything: bool, run: str = "", tensors: bool = True
    ) -> None:
        self.folder = folder
        self._run, self._tensors = run, tensors
        self.keep_everything = keep_everything
        self._made_folder = not folder.exists()

    @classmethod
    def at(cls, folder: Path, launch: Launch | None = None, *, tensors: bool = True) -> "RunStore":
        """Return the storage in a folder that the user named. It stores everything; with `tensors`
        False, digests in place of tensors. If `launch` restarts the run that created the folder,
        that run continues in it.

        Raises UsageError for a folder with other contents, CannotRunError if it is not writable.
        """
        run = "" if launch is None else launch.run
        if launch is not None and _takes_up(folder, launch):
            return cls(folder, keep_everything=True, run=run, tensors=tensors)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; pass a new or an empty folder")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; pass a new or an empty folder")
        store = cls(folder, keep_everything=True, run=run, tensors=tensors)
        store._make()
        if run:
            private.write(folder / "launch.json", msgspec.json.encode({"run": run}))
        return store

    @classmethod
    def default_or_none(cls) -> "RunStore | None":
        """Return the storage for this run in `.distcheck/`; None if it is not writable."""
        try:
            return cls.of_own(keep_everything=False)
        except CannotRunError:
            return None

    @classmethod
    def of_own(cls, *, keep_everything: bool, spare: Path | None = None) -> "RunStore":
        """Return the storage for this run in `.distcheck/`, and remove old runs except `spare`.
        Raises CannotRunError if the folder is not writable.
        """
        runs, now = private_folder("runs"), time.time()
        # A clock that was set back, or a container, can yield a name twice.
        moments = (time.localtime(now + later) for later in itertools.count())
        names = (f"{time.strftime('%Y%m%d-%H%M%S', one)}-{os.getpid()}" for one in moments)
        store = cls(
            next(runs / name for name in names if not (runs / name).exists()),
            keep_everything=keep_everything,
        )
        store._make(sealed=True)
        for old in _runs_in(runs)[:-_KEPT_RUNS]:
            if old != store.folder and not _is_running(old.name) and not _is_within(spare, old):
                shutil.rmtree(old, ignore_errors=True)
        return store

    def case_file(self, case: Case) -> Path:
        return self.folder / "cases" / f"{case.id}.json"

    def write_case(self, case: Case, made: Provenance | None = None) -> None:
        """Write a case before it runs, for a replay after a crash, then with its provenance."""
        write_case(self.case_file(case), case, made)

    def finished(
        self, cases: Sequence[Case], made: Mapping[str, Provenance]
    ) -> dict[str, CaseReport]:
        """Return the reports, by case id, of cases that an earlier start of this run finished with
        the same code and software (`made`). Reports without this user's seal, which came with it,
        are ignored.
        """
        found = {}
        for case in cases if self._run else ():
            kept = read_or_none(self.folder / "finished" / f"{case.id}.json", _Finished)
            text = b"" if kept is None else bytes(kept.report)
            if kept is None or not hmacs_match(kept.seal, self._seal(text, made.get(case.id))):
                continue
            with contextlib.suppress(msgspec.MsgspecError):  # of another version
                report = decode_json(text, CaseReport)
                if report.case == case:
                    found[case.id] = report
        return found

    def _seal(self, report: bytes, made: Provenance | None) -> str:
        digests = sorted(made.digests.items()) if made is not None else []
        software = [made.environment.get(name) for name in SOFTWARE] if made is not None else []
        return content_hmac(
            "finished", msgspec.json.encode([self._run, digests, software]) + report
        )

    def write_finished(self, report: CaseReport, made: Provenance | None) -> None:
        """Store a case's report if this run may be restarted and need not repeat the case."""
        if not self._run or any(o.outcome == RankEnd.LOST for o in report.outcomes):
            return
        path = self.folder / "finished" / f"{report.case.id}.json"
        private.folder(path.parent)
        text = msgspec.json.encode(report)
        kept = _Finished(report=msgspec.Raw(text), seal=self._seal(text, made))
        private.write(path, msgspec.json.encode(kept))

    def check_space(self, total_bytes: int) -> None:
        if not self.keep_everything or not self._tensors:
            return
        free = shutil.disk_usage(self.folder).free
        if total_bytes > free:
            raise CannotRunError(
                f"{self.folder} needs about {total_bytes / 2**20:.0f} MiB; {free / 2**20:.0f} "
                "MiB are free there; free some space or save elsewhere"
            )

    def wants_trace(self, stored_bytes: int, *, failed: bool) -> bool:
        return self.keep_everything or (failed and stored_bytes <= _SMALL_TRACE_BYTES)

    def write_trace(self, pool: Pool, saved: SavedCase, fds: list[int]) -> None:
        """Write the traces of a case, first the first world's, then the rerun's. Remove them again
        on an error.

        Without tensors, the trace of the rerun is omitted: nothing reads its digests. Traces that
        an earlier start of this run left are replaced, because it did not finish the case. Raises
        CannotRunError or OSError.
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
        """Remove the folder of a run that never started, and therefore contains only cases."""
        if not any((self.folder / n).exists() for n in ("report.json", "traces", "finished")):
            gone = self.folder if self._made_folder else self.folder / "cases"
            shutil.rmtree(gone, ignore_errors=True)
            if self.folder.parent == DEFAULT_FOLDER / "runs":
                _discard_own_folder()

    def write_report(self, text: str) -> None:
        private.write(self.folder / _REPORT, masked_json(text))
        if (sealed := self.folder / _SEAL).exists():
            private.write(sealed, msgspec.json.encode(_seal_of_run(self.folder)))

    def _make(self, *, sealed: bool = False) -> None:
        try:
            seal = private.folder(self.folder) / _SEAL
            private.write(seal, msgspec.json.encode(_seal_of_run(self.folder)))
            if not sealed:  # the folder is writable
                seal.unlink()
        except OSError as error:
            raise CannotRunError(
                f"{self.folder} cannot be written: {error.strerror}; save elsewhere, or run in a "
                "writable folder"
            ) from error


def write_case(path: Path, case: Case, made: Provenance | None = None) -> None:
    """Write a case to a file in a private folder; with `made`, include its provenance and seal."""
    private.folder(path.parent)
    about = {}
    if made is not None:
        about["made"] = msgspec.structs.replace(made, seal=case_hmac(case, made.digests))
    text = msgspec.json.encode({**msgspec.structs.asdict(case), **about})
    private.write(path, msgspec.json.format(text) + b"\n")


def private_folder(name: str, root: Path = DEFAULT_FOLDER) -> Path:
    """Create `.distcheck/NAME`; `root` is by default `.distcheck` in the current folder.

    Raises CannotRunError if the folder cannot be created or is not private. In a shared folder,
    other users could replace unpacked code before it runs, or redirect the deletion of old runs.
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
            "work in a writable folder"
        ) from error
    return place


def _discard_own_folder() -> None:
    """Remove `.distcheck` if it is empty except for its .gitignore."""
    with contextlib.suppress(OSError):
        (DEFAULT_FOLDER / "runs").rmdir()
        if [path.name for path in DEFAULT_FOLDER.iterdir()] == [".gitignore"]:
            (DEFAULT_FOLDER / ".gitignore").unlink()
            DEFAULT_FOLDER.rmdir()


def _runs_in(folder: Path) -> list[Path]:
    """Return the folders that runs created, the latest last; only these are ever removed."""
    found = (path for path in folder.iterdir() if re.fullmatch(r"\d+-\d+-\d+", path.name))
    return sorted((run for run in found if run.is_dir() and not run.is_symlink()), key=age_key)


def age_key(run: Path) -> tuple[bool, str]:
    """Return a sort key: runs by date, after all runs that came with the folder, which do not have
    this user's seal.
    """
    seal = read_or_none(run / _SEAL, str) or ""
    return hmacs_match(seal, _seal_of_run(run)), run.name


def _seal_of_run(run: Path) -> str:
    """Return the seal of a run with its current report; "" if that cannot be read."""
    report = run / _REPORT
    try:
        content = read_bounded(report) if report.exists() else b""
    except (OSError, msgspec.MsgspecError):
        return ""
    return content_hmac("run", run.name.encode() + b"\0" + content)


def _takes_up(folder: Path, launch: Launch) -> bool:
    """Return True if a folder was created by an earlier start of the same run.

    torchrun calls every unnamed run "none": for those only its restart count identifies a restart.
    """
    made_by = read_or_none(folder / "launch.json", dict[str, Any])
    same = bool(launch.run) and made_by == {"run": launch.run}
    return same and (launch.restarts > 0 or launch.run != "none")


def _is_running(name: str) -> bool:
    """Return True if the process that ends the name of this run folder is still alive."""
    _, _, pid = name.rpartition("-")
    return pid.isdecimal() and psutil.pid_exists(int(pid))


def _is_within(path: Path | None, folder: Path) -> bool:
    return path is not None and path.resolve().is_relative_to(folder.resolve())


def stored_bytes(fd: int) -> int:
    """Return the bytes that a sparse trace occupies."""
    return os.fstat(fd).st_blocks * 512


KEPT_RUNS = f"run distcheck runs to list those in {DEFAULT_FOLDER} here"


def latest_run(*, with_report: bool = False) -> Path:
    """Return the latest run in `.distcheck/`. Raises UsageError if there is none."""
    runs = [run for run in stored_runs() if not with_report or (run / "report.json").is_file()]
    if not runs:
        which = " with a report" if with_report else ""
        raise UsageError(f"{DEFAULT_FOLDER} has no run{which}; pass the folder of a run")
    return runs[-1]


def stored_runs() -> list[Path]:
    """Return the runs in `.distcheck/`, oldest first."""
    runs = (path for path in DEFAULT_FOLDER.glob("runs/*") if (path / "cases").is_dir())
    return sorted(runs, key=age_key)


def read_case(path: Path, *, jobs: bool = False) -> Case:
    """Read a case that `write_case` wrote, or with `jobs` also a job, of which only the command is
    used. Raises UsageError if the file is not a case.
    """
    try:
        case = decode_json(read_bounded(path, _MOST_CASE_BYTES), Case)
        return _check_job(case, allowed=jobs) if case.job else check_case(case)
    except OSError as error:
        raise UsageError(f"case file {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        if path.name == "report.json":
            raise UsageError(f"{path} is a report; pass its folder, {path.parent}") from error
        raise UsageError(f"{path} is not a case file: {error}") from error
    except UsageError as error:
        raise UsageError(f"{path} is not a case that can run: {error}") from error


def _check_job(case: Case, *, allowed: bool) -> Case:
    if not allowed:
        raise UsageError("it belongs to a job; use distcheck replay or open")
    if any("\0" in word for word in case.job):
        raise UsageError("a word of its command contains a NUL character")
    return case


def read_provenance(path: Path) -> Provenance | None:
    """Return the provenance in a case file; None if the case had not run when it was saved."""
    found = read_or_none(path, _Made, _MOST_CASE_BYTES)
    return None if found is None else found.made


@dataclass(frozen=True)
class SavedTrace:
    """A saved case, the folder of its traces, and the digests of their indexes."""

    folder: Path
    saved: SavedCase
    indexes: tuple[str, ...]


def saved_traces(folder: Path) -> list[SavedTrace]:
    """Return the saved cases of a run directory. Raises UsageError if there are none, or if one is
    damaged.

    A caller that runs the code of these cases must call `trust` first, and run exactly the cases
    that are returned here.
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
    """Raise CannotRunError if a trace's files, which may be sparse, exceed memory."""
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
    """Load a saved case's traces to shared memory, and return file descriptors for the caller to
    close.

    Raises UsageError if files are missing or damaged. Unless `digests_suffice`, also raises
    UsageError for a trace without tensors.
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
