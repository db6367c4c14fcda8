"""Started MPI operations: c10d's Work over MPI requests, and a record of each operation.

The record has the format of torch's flight recorder, which does not cover backends written in
Python.
"""

import functools
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distcheck.addons.mpi.runtime import mpi
from distcheck.backends._python_group import PythonWork

_KEPT = 64  # as many as torch's recorder keeps
_MOST_FRAMES = 32
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
# The recorder's names of operations that have another name here.
_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "gather_single": "gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_MESSAGES = ("send", "recv")


@dataclass(slots=True, eq=False)
class MPICall:
    """One operation. It has two numbers: its position among all operations of its group, and its
    position among the group's collectives or messages. The record holds shapes and no tensors.
    """

    what: str
    group: str
    of_all: int
    number: int
    inputs: list[tuple[torch.Size, torch.dtype]]
    outputs: list[tuple[torch.Size, torch.dtype]]
    frames: list[tuple[str, int, str]]  # file, line, function; innermost first
    created_ns: int
    complete: bool = False

    def as_entry(self) -> dict[str, Any]:
        """Return the call in the flight recorder's format."""
        return {
            "op_id": self.of_all,
            "collective_seq_id": self.number,
            "p2p_seq_id": self.number,
            "is_p2p": self.what in _MESSAGES,
            "process_group": (self.group, ""),
            "profiling_name": f"mpi:{_NAMES.get(self.what, self.what)}",
            "input_sizes": [tuple(size) for size, _ in self.inputs],
            "output_sizes": [tuple(size) for size, _ in self.outputs],
            "input_dtypes": [str(dtype).removeprefix("torch.") for _, dtype in self.inputs],
            "output_dtypes": [str(dtype).removeprefix("torch.") for _, dtype in self.outputs],
            "frames": [
                {"filename": file, "line": line, "name": name} for file, line, name in self.frames
            ],
            "state": "completed" if self.complete else "started",
            "time_created_ns": self.created_ns,
        }


_latest: deque[MPICall] = deque(maxlen=_KEPT)
_counts: defaultdict[tuple[str, str], int] = defaultdict(int)  # by group and kind of operation


def record_call(
    what: str, group: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> MPICall:
    among = (group, "messages" if what in _MESSAGES else "collectives")
    _counts[group, "all"] += 1
    _counts[among] += 1
    call = MPICall(
        what=what,
        group=group,
        of_all=_counts[group, "all"],
        number=_counts[among],
        inputs=[(tensor.shape, tensor.dtype) for tensor in inputs],
        outputs=[(tensor.shape, tensor.dtype) for tensor in outputs],
        frames=_frames(),
        created_ns=time.time_ns(),
    )
    _latest.append(call)
    return call


def recorded_entries() -> list[dict[str, Any]]:
    """Return the latest operations in the flight recorder's format, oldest first."""
    return [call.as_entry() for call in list(_latest)]


def count_of(group: str) -> int:
    """Return how many operations of a group this process has started, including messages."""
    return _counts[group, "all"]


def reset_counters(group: str) -> None:
    """Reset the counters of a new group. A destroyed group may have had the same name."""
    for what in ("all", "messages", "collectives"):
        _counts.pop((group, what), None)


def clear_record() -> None:
    _latest.clear()


def _frames() -> list[tuple[str, int, str]]:
    """Return the stack frames of the caller, up to the first frame outside torch and distcheck.
    Walking the whole stack would take as long as the call itself.
    """
    frame: Any = sys._getframe(3)
    found: list[tuple[str, int, str]] = []
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno, code.co_name))
        if _is_theirs(code.co_filename):
            break
        frame = frame.f_back
    return found


@functools.cache
def _is_theirs(file: str) -> bool:
    return "/torch/" not in file and not file.startswith((_PACKAGE, "<"))


# Heuristic: waiting must not occupy a core, because there may be fewer cores than ranks, and a
# spinning rank appears to compute. Poll a few times, then yield between polls; from 10 ms on, sleep
# for 2 % of the time waited so far, at most 20 ms.
_LOOKS_AT_ONCE = 20
_YIELD_FOR_S = 0.01
_SLEEP_SHARE = 0.02
_LONGEST_SLEEP_S = 0.02

# Operations whose Work may have been dropped: MPI still reads and writes their memory.
_under_way: "dict[int, MPIWork]" = {}
_one_at_a_time = threading.RLock()  # two threads must not test the same request


class MPIWork(PythonWork):
    """A started operation, recorded as `call`.

    The work completes when all of its MPI `requests` have completed; `finish` then copies the
    results to their tensors. MPI makes progress only within an MPI call: `wait`, `is_completed`, or
    another operation. `get_future` therefore waits first, because nothing else would complete the
    future. Chained callbacks get correct results, but nothing overlaps.
    """

    def __init__(
        self,
        call: MPICall,
        requests: list[Any],
        *,
        results: list[torch.Tensor],
        keep: tuple[Any, ...],
        finish: Callable[[Any], None] | None,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._call, self._requests, self._results = call, requests, results
        self._keep, self._finish, self.timeout_s = keep, finish, timeout_s
        self._done = False
        self._error: BaseException | None = None
        self._status, self._source = mpi().Status(), -1
        with _one_at_a_time:
            if _under_way:
                drive_mpi_progress()
            if not self._poll():
                _under_way[id(self)] = self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation is complete. Raises RuntimeError after `timeout`, or after the
        group's timeout.
        """
        self._wait_until_done(timeout.total_seconds() or self.timeout_s)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the operation is complete; otherwise let MPI make progress and return
        False.
        """
        return self._poll()

    def is_success(self) -> bool:
        return self._poll() and self._error is None

    def exception(self) -> Any:
        return self._error

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def _wait_until_done(self, timeout_s: float) -> None:
        for _ in range(_LOOKS_AT_ONCE):
            if self._poll():
                return
        begun = time.perf_counter()
        while not self._poll():
            waited = time.perf_counter() - begun
            if waited < _YIELD_FOR_S:
                os.sched_yield()
            elif waited < timeout_s:
                time.sleep(min(waited * _SLEEP_SHARE, _LONGEST_SLEEP_S))
            else:
                raise RuntimeError(f"{self._call.what} timed out after {timeout_s:g} s")

    def _poll(self) -> bool:
        """Let MPI make progress, and call `finish` once when the operation completes."""
        if self._done:
            return True
        with _one_at_a_time:
            return self._done or self._test_requests()

    def _test_requests(self) -> bool:
        try:
            if len(self._requests) == 1:
                complete = self._requests[0].Test(self._status)
            else:
                complete = mpi().Request.Testall(self._requests)
            if complete:
                self._source = self._status.Get_source()
                if self._finish is not None:
                    self._finish(self._status)
        except (mpi().Exception, RuntimeError, ValueError) as error:
            self._error = RuntimeError(f"{self._call.what}: {error}")
            complete = True
        if complete:
            self._done = self._call.complete = True
            self._keep = ()
            _under_way.pop(id(self), None)
        return bool(complete)


def drive_mpi_progress() -> None:
    with _one_at_a_time:
        for work in list(_under_way.values()):
            work._poll()


class CombinedMPIWork(PythonWork):
    """Several operations with a common `wait`."""

    def __init__(self, works: list[MPIWork], results: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._results = works, results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
