"""Waits for a job's command, and ends it where it has hung: it neither went on nor used a core.

Ranks are asked where they are. Where each waits in a collective, and these do not match, none can
go on, and that is the end; anything else is a hang when the deadline is over.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from distcheck.job.settings import Answer
from distcheck.judge.diagnosis import outcomes
from distcheck.records import Outcome
from distcheck.records.decoding import decode_json, read_bounded
from distcheck.records.ends import RankEnd

_LOOK_S = 0.25
_FIRST_S = 5.0  # without progress, before ranks are asked
_ANSWER_S = 2.0
_BUSY_SHARE = 0.02  # of a core, by all processes: more is work
_BUSY_DEADLINES = 10.0  # a job that works and never goes on may take that many deadlines


class Watch:
    """Of one command, whose ranks write into a folder."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path, deadline_s: float) -> None:
        self._process, self._folder, self._deadline_s = process, folder, deadline_s
        self._beats: tuple[bytes, ...] = ()
        self._worked_s = 0.0
        self._idle_s = self._busy_s = 0.0
        self._asked_at = _FIRST_S

    def wait(self) -> tuple[Outcome, ...]:
        """Waits until the command has ended: how ranks hang, where they do."""
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
                found = self._ask()
                if _is_proven(found):
                    return found
            if (
                self._idle_s >= self._deadline_s
                or self._busy_s >= _BUSY_DEADLINES * self._deadline_s
            ):
                return self._ask()

    def _look(self, elapsed_s: float) -> None:
        files = sorted(self._folder.glob("beat-*"))
        beats = tuple(file.read_bytes() for file in files)
        worked_s, before_s = _seconds_of(self._process.pid), self._worked_s
        self._worked_s = worked_s
        if beats != self._beats:
            self._beats, self._asked_at = beats, _FIRST_S
            self._idle_s = self._busy_s = 0.0
        elif worked_s - before_s > _BUSY_SHARE * elapsed_s:
            self._busy_s += elapsed_s
        else:
            self._idle_s += elapsed_s

    def _ask(self) -> tuple[Outcome, ...]:
        """Where ranks are; those of which nothing is known have given no answer."""
        pipes = sorted(self._folder.glob("ask-*"))
        for pipe in pipes:
            (self._folder / f"answer-{pipe.name.removeprefix('ask-')}").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # nothing reads there any more
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(_ANSWER_S)
        answers = {}
        for file in sorted(self._folder.glob("answer-*[0-9]")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                one = decode_json(read_bounded(file), Answer)
                answers[one.rank] = one
        world = max((one.world for one in answers.values()), default=1)
        return tuple(_outcome(rank, answers.get(rank)) for rank in range(world))


def _seconds_of(process: int) -> float:
    """What a process and those below it have used of cores."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(process)
        for one in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def _outcome(rank: int, answer: Answer | None) -> Outcome:
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
    """Whether each rank waits in a collective, and these do not match."""
    waits = all(one.call is not None and not one.call.finished for one in found)
    if len(found) < 2 or not waits:
        return False
    return outcomes.explain(found)[0].cause == "collective-mismatch"
