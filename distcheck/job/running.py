"""Starts the command of a job with recording enabled, and reports why nothing was recorded."""

import contextlib
import math
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
import psutil

from distcheck import private
from distcheck.errors import CannotRunError, DistcheckError, ExitCode, UsageError
from distcheck.job.inside.marking import SHARED_RANK
from distcheck.job.settings import VARIABLE, RankPosition
from distcheck.judge.diagnosis import outcomes
from distcheck.records import Outcome
from distcheck.records.decoding import decode_json, read_bounded
from distcheck.records.exit_status import RankEnd
from distcheck.worlds.keeper import start_kept
from distcheck.worlds.root_cause import is_lost_peer
from distcheck.worlds.stalls import BUSY_DEADLINES, BUSY_SHARE

_LOOK_S = 0.25
_FIRST_S = 5.0  # without progress, before ranks are asked
_ANSWER_S = 2.0


class Watch:
    """Watches a command whose ranks write to a folder."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path, deadline_s: float) -> None:
        self._process, self._folder, self._deadline_s = process, folder, deadline_s
        self._beats: tuple[bytes, ...] = ()
        self._worked_s = 0.0
        self._idle_s = self._busy_s = 0.0
        self._asked_at = _FIRST_S

    def wait(self) -> tuple[Outcome, ...]:
        """Wait until the command ends. If its ranks hang, return the state of each rank."""
        last = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)
                return ()
            now = time.monotonic()
            self._look(now - last)
            last = now
            if self._idle_s >= self._asked_at:
                self._asked_at = 2 * self._idle_s
                found = self._request_positions()
                if _is_proven(found):
                    return found
            if (
                self._idle_s >= self._deadline_s
                or self._busy_s >= BUSY_DEADLINES * self._deadline_s
            ):
                return self._request_positions()

    def _look(self, elapsed_s: float) -> None:
        files = sorted(self._folder.glob("heartbeat-*"))
        beats = tuple(file.read_bytes() for file in files)
        worked_s, before_s = _cpu_seconds_of(self._process.pid), self._worked_s
        self._worked_s = worked_s
        if beats != self._beats:
            self._beats, self._asked_at = beats, _FIRST_S
            self._idle_s = self._busy_s = 0.0
        elif worked_s - before_s > BUSY_SHARE * elapsed_s:
            self._busy_s += elapsed_s
        else:
            self._idle_s += elapsed_s

    def _request_positions(self) -> tuple[Outcome, ...]:
        """Ask all ranks for their position. The position of ranks that do not reply is unknown."""
        pipes = sorted(self._folder.glob("ask-*"))
        for pipe in pipes:
            (self._folder / f"answer-{pipe.name.removeprefix('ask-')}").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # no reader is left
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(_ANSWER_S)
        answers = {}
        for file in sorted(self._folder.glob("answer-*[0-9]")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                one = decode_json(read_bounded(file), RankPosition)
                answers[one.rank] = one
        world = max((one.world for one in answers.values()), default=1)
        return tuple(_outcome(rank, answers.get(rank)) for rank in range(world))


def _cpu_seconds_of(process: int) -> float:
    total = 0.0
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(process)
        for one in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def _outcome(rank: int, answer: RankPosition | None) -> Outcome:
    if answer is None:
        return Outcome(
            rank=rank, outcome=RankEnd.HUNG, phase="before its first step", ended_by="no answer"
        )
    return Outcome(
        rank=rank, outcome=RankEnd.HUNG, step=answer.step, text=answer.stack,
        call=answer.collectives[-1] if answer.collectives else None,
        collectives=answer.collectives,
    )  # fmt: skip


def _is_proven(found: Sequence[Outcome]) -> bool:
    """Return True if every rank is blocked in a collective, and these collectives do not match."""
    waits = all(one.call is not None and not one.call.finished for one in found)
    if len(found) < 2 or not waits:
        return False
    return outcomes.explain(found)[0].cause == "collective-mismatch"


_LAST_S = 5.0  # to drain a pipe after the job ended; other processes may hold it open


@contextlib.contextmanager
def relay_output() -> Iterator[dict[str, int]]:
    """Yield Popen arguments that forward the job's output. Streams that share a pipe keep their
    order.
    """
    places: dict[tuple[int, int], int] = {}
    given: dict[str, int] = {}
    pumps = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        about = os.fstat(number)
        if not stat.S_ISFIFO(about.st_mode):
            continue
        place = (about.st_dev, about.st_ino)
        if place not in places:
            reader, places[place] = os.pipe()
            pumps.append(threading.Thread(target=_pump, args=(reader, number), daemon=True))
        given[name] = places[place]
    for pump in pumps:
        pump.start()
    try:
        yield given
    finally:
        for writer in places.values():
            os.close(writer)
        for pump in pumps:
            pump.join(_LAST_S)


def _pump(reader: int, number: int) -> None:
    """Forward data until all writers have closed the pipe. Data is dropped if no reader is left."""
    is_read = True
    with os.fdopen(reader, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            try:
                while is_read and data:
                    data = data[os.write(number, data) :]
            except OSError:
                is_read = False


_HOOK = Path(__file__).parent / "hook"
_PATIENCE_S = 40.0  # for a job to exit after an interruption; torchrun gives its ranks 30
_MOST_NOTES = 4096  # bytes read of a note


class JobEndedError(DistcheckError):
    """Raised if a rank of the job failed before anything could be judged."""

    exit_code = ExitCode.RANK_FAILED


@dataclass(frozen=True)
class CommandResult:
    """Exit status of the command, the processes that raised or hung, and the ranks that ran their
    exit handlers.
    """

    code: int
    raised: tuple[Outcome, ...]
    hung: tuple[Outcome, ...] = ()
    exited: frozenset[int] = frozenset()

    def outcomes(self, world: int) -> tuple[Outcome, ...]:
        found = [Outcome(rank=rank, outcome=RankEnd.FINISHED) for rank in range(world)]
        for one in self.raised:
            if one.rank < world:
                found[one.rank] = one
        if self.code and not self.raised:
            detail = f"the command ended with exit code {self.code}"
            found[0] = Outcome(rank=0, outcome=RankEnd.EXITED, ended_by=detail)
        return tuple(found)

    def early_exits(self, world: int) -> list[int]:
        """Return the ranks that exited without an exception, if all other ranks lost a peer."""
        others = sorted({*range(world)} - {one.rank for one in self.raised})
        lost = bool(self.raised) and all(is_lost_peer(one.text) for one in self.raised)
        return others if lost and self.exited.issuperset(others) else []


def command_of(words: Sequence[str], nproc: int | None) -> tuple[str, ...]:
    """Return the command to start: the given command, or torchrun with `nproc` ranks. Raises
    UsageError if the command cannot be found.
    """
    if not words:
        raise UsageError(
            "no command was given; pass it after --: distcheck job -- torchrun --nproc-per-node 4 "
            "train.py"
        )
    program = words[0]
    if nproc is not None:
        if nproc < 1:
            raise UsageError("--world must be at least 1")
        if not Path(program).name.startswith("python"):
            raise UsageError(
                f"--world starts a Python script with torchrun, but the command is {program!r}; "
                "pass --world N -- python train.py, or a command that starts its ranks itself"
            )
        # A launcher that imports files of the current folder differs from its ranks.
        torchrun = [program, "-P", "-m", "torch.distributed.run"]
        words = [*torchrun, "--nproc-per-node", str(nproc), *words[1:]]
    if shutil.which(program) is None:
        raise UsageError(
            f"the command {program!r} was not found; pass the command that you use for training"
        )
    return tuple(words)


def run(
    command: Sequence[str],
    settings: Path,
    *,
    deadline_s: float = math.inf,
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> CommandResult:
    """Run the command of a job, and forward its output, until it ends or is killed because it
    hangs. `defaults` are environment variables to set if they are not set.
    """
    with relay_output() as streams:
        try:
            process = subprocess.Popen(
                command,
                env=_surroundings({**defaults, **os.environ}, settings),
                stdout=streams.get("stdout"),
                stderr=streams.get("stderr"),
            )
        except OSError as error:
            raise UsageError(f"the command {command[0]!r} cannot be started: {error}") from error
        try:
            hung = Watch(process, settings.parent, deadline_s).wait()
        except BaseException:
            _end_command(process)
            raise
        if hung:
            _end_command(process)
        code = process.wait()
    _remove_logs(settings.parent)
    return _result(settings.parent, code, hung)


def run_silently(
    command: Sequence[str],
    settings: Path,
    *,
    folder: Path,
    variables: Mapping[str, str],
    without: tuple[str, ...],
    deadline_s: float,
) -> CommandResult:
    """Run a command in `folder` without output, and kill all its processes at the end. Environment
    variables with one of the prefixes `without` are removed.
    """
    given = {**os.environ, **variables}
    left = {name: value for name, value in given.items() if not name.startswith(without)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keeper = start_kept(
            command, theirs, env=_surroundings(left, settings), output=subprocess.DEVNULL,
            cwd=folder,
        )  # fmt: skip
        theirs.close()
        try:
            hung = Watch(keeper, settings.parent, deadline_s).wait()
        finally:
            ours.close()  # ends it
            code = keeper.wait(_PATIENCE_S)
    _remove_logs(settings.parent)
    return _result(settings.parent, code, hung)


def _surroundings(given: Mapping[str, str], settings: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_HOOK), given.get("PYTHONPATH", "")]))
    started = {**given, VARIABLE: str(settings), "PYTHONPATH": path}
    return {"TORCH_FR_BUFFER_SIZE": "512", **started}  # for the ledger, and for blocked ranks


def _end_command(process: "subprocess.Popen[bytes]") -> None:
    """Make a launcher end its ranks, as Ctrl-C does. Then kill everything that the launcher has
    started.
    """
    below = _started_by(process.pid)
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                continue
    for left in below:  # a shell exits without its children
        with contextlib.suppress(psutil.Error):
            left.terminate()
    for left in psutil.wait_procs(below, timeout=_PATIENCE_S)[1]:
        with contextlib.suppress(psutil.Error):
            left.kill()


def _remove_logs(folder: Path) -> None:
    """Remove torchrun's folder for the errors of recorded ranks, which it does not delete."""
    for file in folder.glob("rank-*/rank.json"):
        from distcheck.recordings.jobs.records import RankRecord, read_record  # imports torch

        with contextlib.suppress(UsageError, OSError, LookupError):
            errors = read_record(file, RankRecord).variables["TORCHELASTIC_ERROR_FILE"]
            made = Path(errors).parents[3]
            if errors == os.environ.get("TORCHELASTIC_ERROR_FILE"):  # of a job around this one
                continue
            if made.name.startswith("torchelastic_") and private.is_private_folder(made):
                shutil.rmtree(made, ignore_errors=True)


def _started_by(process: int) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(process).children(recursive=True)
    except psutil.Error:
        return []
    return found


def _result(folder: Path, code: int, hung: tuple[Outcome, ...]) -> CommandResult:
    """Return the result of a command that has ended, with the notes of its processes."""
    exited = {int(file.parent.name[-4:]) for file in folder.glob("rank-[0-9][0-9][0-9][0-9]/ended")}
    return CommandResult(code, () if hung else noted_exceptions(folder), hung, frozenset(exited))


def noted_exceptions(folder: Path) -> tuple[Outcome, ...]:
    """Return the processes that noted an exception, each with the first line of the exception."""
    found = []
    for file in sorted(folder.glob("raised-*")):
        with file.open(errors="backslashreplace") as note:
            rank, _, said = note.read(_MOST_NOTES).partition("\n")
        first, number = said.strip().partition("\n")[0], int(rank) if rank.isdecimal() else 0
        found.append(Outcome(rank=number, outcome=RankEnd.RAISED, text=first))
    return tuple(found)


def check_recorded(
    folder: Path, ran: CommandResult, command: Sequence[str], *, on_cpu: bool = False
) -> None:
    """Raise an error that explains why nothing can be judged, if that is the case."""
    if (folder / "defect").exists():
        trace = (folder / "defect").read_text(errors="backslashreplace")
        last = trace.strip().rpartition("\n")[2]
        from distcheck.errors.defects import save_traceback

        raise DistcheckError(
            f"the recorder failed in a rank ({last[:300]}), which is a bug in distcheck: the job "
            "continued without it and is not judged; please report it with the traceback"
            f"{' in ' * bool(saved := save_traceback(trace))}{saved}"
        )
    if (note := folder / SHARED_RANK).exists():
        raise DistcheckError(
            f"several processes of the command train as {note.read_text()}, so distcheck cannot "
            "distinguish their gradients, and nothing is judged: a process without a process group "
            "and without RANK is rank 0, such as a parameter server of torch.distributed.rpc, or "
            "the second of two trainings"
        )
    if any(folder.glob("rank-*/step-*.json")):
        return
    for one in ran.raised:
        if _needs_gpu(one.text):
            do = "pass --on-cpu to run it on CPUs"
            if on_cpu:
                do = "it calls a function of CUDA that --on-cpu does not replace"
            raise CannotRunError(
                f"the job needs a GPU, but this machine has none ({one.text[:200]}); {do}"
            )
    if (note := folder / "no-distcheck").exists():
        program = note.read_text(errors="backslashreplace").partition("\n")[0]
        raise CannotRunError(
            f"distcheck is not installed for {program}, which the command started; install it there"
        )
    if ran.code:
        why = f": {ran.raised[0].text}" if ran.raised else ""
        raise JobEndedError(
            f"the command ended with exit code {ran.code} before its first optimizer step"
            f"{why or '; see its output above'}"
        )
    if not any(folder.glob("python-*")):
        raise DistcheckError(
            f"nothing was recorded: {command[0]} started no Python process that reads "
            "PYTHONPATH; start Python without -S, -E and -I"
        )
    if any(folder.glob("missed-*")):
        raise DistcheckError(
            "nothing was recorded: a process imported torch undetected, because the script "
            "replaced sys.meta_path; import torch before that"
        )
    if not any(folder.glob("torch-*")):
        raise DistcheckError("nothing was recorded: no process of the command imported torch")
    raise DistcheckError(
        "nothing was recorded: the command made no optimizer step (of a torch.optim.Optimizer, "
        "after a forward pass of a module in training mode)"
    )


def _needs_gpu(said: str) -> bool:
    words = ("NVIDIA driver", "CUDA", "nccl", "NCCL")
    if not any(word in said for word in words):
        return False
    import torch

    return not torch.cuda.is_available()
