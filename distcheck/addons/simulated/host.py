"""Main program of the process that runs a simulated world: each rank's job runs in a thread.

Events of a rank are sent to the front end with the rank's number. If the world cannot proceed, this
process sends the reason and the stack of every rank, and the front end then ends the process.
"""

import importlib
import io
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch

from distcheck.addons.simulated import limits
from distcheck.addons.simulated import world as simulated
from distcheck.addons.simulated.calls import SimulatedCall
from distcheck.addons.simulated.groups import NOT_DESTROYED
from distcheck.addons.simulated.isolation import Isolation
from distcheck.addons.simulated.scheduler import RankThread, ThreadState
from distcheck.addons.simulated.share import TURN, TURN_FD, HostRequest
from distcheck.errors import NotSimulatedError
from distcheck.machine import compat
from distcheck.records.exit_status import MISUSES
from distcheck.records.schedules import Schedule, parse_schedule
from distcheck.worlds import flight, messages
from distcheck.worlds.callers import place_of_caller
from distcheck.worlds.jobs import Descriptors, Reporter, owned_by
from distcheck.worlds.local import child
from distcheck.worlds.local.helper_process import shuffled_variables

_NO_TURN = "waits for its turn, which rank {} does not yield"
_STOPPED = "was stopped because of rank {}"
_STACK_BYTES = 8 << 20  # of address space: unused stack takes no memory


def run(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    SimulatedHost(msgspec.msgpack.decode(payload, type=HostRequest), fds, reporter).run()
    return b""


class RankReporter(Reporter):
    """Connection of one rank to the front end. It adds the rank's number to each event, and uses
    the connection of the process. `begun` is called with the rank and the step whenever a step
    begins.
    """

    def __init__(self, reporter: Reporter, rank: int, begun: Callable[[int, int], None]) -> None:
        self._reporter, self._rank, self._begun = reporter, rank, begun

    def progress(self, step: int, phase: str) -> None:
        self._begun(self._rank, step)
        super().progress(step, phase)

    def send(self, event: messages.AnyEvent, *, patience_s: float = -1) -> None:
        assert isinstance(event, messages.ChildEvent)
        self._reporter.send(messages.RoutedEvent(self._rank, event), patience_s=patience_s)


class RankStream(io.TextIOBase):
    """Output stream of a rank. Output is sent line by line."""

    def __init__(self, reporter: RankReporter) -> None:
        self._reporter, self._begun = reporter, ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the descriptor of the process's stdout, for code that writes to it directly."""
        return 1

    def write(self, text: str) -> int:
        lines, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            self._send(lines + newline)
        return len(text)

    def flush(self) -> None:
        if self._begun:
            self._send(self._begun)
            self._begun = ""

    def _send(self, text: str) -> None:
        self._reporter.send(messages.Printed(text.encode(errors="backslashreplace")))


class SimulatedHost:
    """Runs the ranks of one world."""

    def __init__(
        self,
        asked: HostRequest,
        fds: Descriptors,
        reporter: Reporter,
        schedule: Schedule | None = None,
        *,
        keeps_choices: int = 0,
    ) -> None:
        self._asked, self._fds, self._reporter = asked, fds, reporter
        module, _, name = asked.target.partition(":")
        # Import it before any state is per rank: all ranks run the same job.
        self._target: child.Target = getattr(importlib.import_module(module), name)
        ranks = range(len(asked.starts))
        self._reporters = [RankReporter(reporter, rank, self._begin_step) for rank in ranks]
        self._streams: list[Any] = [RankStream(own) for own in self._reporters]
        environments = [
            shuffled_variables({**os.environ, **start.environment}, start.order_seed)
            for start in asked.starts
        ]
        streams = [(stream, stream) for stream in self._streams]
        self._isolation = Isolation(environments, streams, owned_by(self._target))
        self._world = simulated.SimulatedWorld(
            len(ranks),
            asked.order,
            deadline_s=asked.deadline_s,
            switch=self._switch,
            ended=self._report_end,
            schedule=parse_schedule(asked.schedule) if asked.schedule else schedule,
            keeps_choices=keeps_choices,
        )
        self._turn = mmap.mmap(fds.get(TURN_FD, -1), TURN.size)  # a private mapping in a search
        self._ending = threading.Lock()
        self._refused = False
        self._done = 0  # number of ranks whose job has returned

    @property
    def world(self) -> simulated.SimulatedWorld:
        return self._world

    def run(self) -> None:
        simulated.set_current_world(self._world)
        compat.isolate_groups_by_thread()
        flight.record_from(self._last_calls)
        self._reporter.tell_stacks = self.tell_stacks
        limits.install_limits()
        threading.stack_size(_STACK_BYTES)
        self._isolation.begin(0)
        self._world.scheduler.run(self._live)
        self._isolation.end()

    def _begin_step(self, rank: int, step: int) -> None:
        self._world.groups.steps[rank] = step

    def _switch(self, before: int, after: int) -> None:
        self._isolation.switch(before, after)
        TURN.pack_into(self._turn, 0, after)

    def _live(self, rank: int) -> None:
        reporter = self._reporters[rank]
        torch.get_num_threads()  # makes torch's settings of a rank its thread's only
        try:
            result = self._target(self._asked.starts[rank].payload, self._fds_of(rank), reporter)
            self._world.end_of_rank(rank)
            self._remark()
            self._flush(rank)
            reporter.send(messages.Done(result))
        except limits.RankLeftError as left:
            self._flush(rank)
            entries = self._entries_of(rank)
            text = child.displayed_stack(_where_left(left))
            said = messages.Stacks(text, child.last_collective(entries), flight.latest(entries))
            reporter.send(said)
            reporter.send(messages.Exited(left.status))
            self._world.lose(rank)
        except BaseException as error:
            if self._refused and isinstance(error, NotSimulatedError):
                self._world.scheduler.freeze()  # refused in a thread; the front end has the reason
            self._flush(rank)
            if place := limits.line_of_cuda_request(error):
                error = _refusal(f"{limits.USES_CUDA}{place.rstrip()}")
            reporter.send(child.message_of_exception(error))
            self._world.lose(rank)

    def _remark(self) -> None:
        """Send the warnings about the world before the last rank reports that it has finished."""
        self._done += 1
        if self._done == len(self._reporters):
            left = [(NOT_DESTROYED, text) for text in self._world.groups.not_destroyed()]
            for name, text in (*left, *self._world.odd.in_words()):
                self._reporter.send(messages.Remarked(name, messages.printable(text)))

    def _flush(self, rank: int) -> None:
        """Send the incomplete last line of a rank, even if the code has replaced the stream."""
        with suppress(Exception):
            sys.stdout.flush()
        self._streams[rank].flush()

    def _fds_of(self, rank: int) -> Descriptors:
        found: dict[str, int] = {}
        for name, fd in self._fds.items():
            owner, slash, own_name = name.partition("/")
            if name == TURN_FD:
                continue
            if not slash:
                found[name] = fd
            elif owner == str(rank):
                found[own_name] = fd
        return found

    def _last_calls(self) -> list[dict[str, Any]]:
        """Return the last calls of the current rank, in the format of torch's flight recorder."""
        rank = self._world.scheduler.rank
        return [] if rank is None else self._entries_of(rank)

    def _entries_of(self, rank: int) -> list[dict[str, Any]]:
        return [_flight_entry(call) for call in list(self._world.latest[rank])]

    def _report_end(self, how: simulated.End, what: str) -> None:
        """Report the end of the world, once. A thread that calls this method again is stopped."""
        if not self._ending.acquire(blocking=False):
            self._world.scheduler.freeze()
        if how == "refused":
            self._refused = True
            rank = self._world.scheduler.current
            place = place_of_caller()
            refusal = _refusal(f"{what}{f' at {place}' * bool(place)}")
            self._reporters[rank].send(child.message_of_exception(refusal))
        elif how in MISUSES:
            self._report_stacks(
                ThreadState.READY, ThreadState.WAITING, ThreadState.ASLEEP, why=_STOPPED
            )
        else:
            self._report_stacks(ThreadState.READY)
        self._reporter.send(messages.Proven(how, messages.printable(what)))

    def tell_stacks(self) -> None:
        """Report the stack of every rank after the world has hung."""
        if self._ending.acquire(blocking=False):
            self._report_stacks(ThreadState.READY, ThreadState.ASLEEP)

    def _report_stacks(self, *blameless: ThreadState, why: str = _NO_TURN) -> None:
        """Report the stack of every rank, with the reason `why`. Ranks in one of the states
        `blameless` did not cause the end.
        """
        frames = sys._current_frames()
        for runner in self._world.scheduler.runners:
            if runner.state is not ThreadState.OVER:
                self._reporters[runner.rank].send(self._stacks_of(runner, frames, blameless, why))

    def _stacks_of(
        self,
        runner: RankThread,
        frames: Mapping[int, Any],
        blameless: Sequence[ThreadState],
        why: str,
    ) -> messages.Stacks:
        thread, scheduler = runner.thread, self._world.scheduler
        frame = frames.get(thread.ident or 0) if thread is not None else None
        text = "" if frame is None else child.displayed_stack(frame)
        waits = runner.state in blameless and runner.rank != scheduler.current
        if waits:
            text = f"{why.format(scheduler.current)}\n{text}"
        entries = self._entries_of(runner.rank)
        together = [entry for entry in entries if not entry["is_p2p"]]
        return messages.Stacks(
            text=messages.printable(text),
            collective=child.last_collective(together),
            collectives=flight.latest(entries),
            waits_for_turn=waits,
        )


def _refusal(what: str) -> NotSimulatedError:
    device = " --device cuda" if what.startswith(limits.USES_CUDA) else ""
    return NotSimulatedError(
        f"backend simulated cannot run this code: {what}; pass --backend gloo{device}"
    )


def _flight_entry(call: SimulatedCall) -> dict[str, Any]:
    return {
        "profiling_name": f"simulated:{call.name}",
        "input_sizes": call.sizes,
        "is_p2p": call.is_message,
        "collective_seq_id": call.number,
        "p2p_seq_id": call.number,
        "frames": call.frames,
        "process_group": (call.group, ""),
        "retired": call.complete,
        "state": "completed" if call.complete else "started",
    }


def _where_left(error: BaseException) -> Any:
    """Return the frame in which a rank called os._exit."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None and found.tb_next.tb_next is not None:
        found = found.tb_next
    return None if found is None else found.tb_frame
