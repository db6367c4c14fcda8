"""The operations that this process has started, in the format of torch's flight recorder: torch
records none of a backend written in Python.
"""

import functools
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
    """One operation: its number among all of its group, and among the group's messages or
    collectives. Shapes are recorded, tensors are not kept.
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


def record(
    what: str, group: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> MPICall:
    """Record an operation that is being started."""
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


def entries() -> list[dict[str, Any]]:
    """Return the latest operations, oldest first."""
    return [call.as_entry() for call in list(_latest)]


def count_of(group: str) -> int:
    """Return how many operations of a group this process has started, messages included."""
    return _counts[group, "all"]


def begin(group: str) -> None:
    """Reset the counters for a new group: a destroyed one may have had its name."""
    for what in ("all", "messages", "collectives"):
        _counts.pop((group, what), None)


def forget() -> None:
    _latest.clear()


def _frames() -> list[tuple[str, int, str]]:
    """Return the callers, up to the first one outside torch and distcheck: walking the whole stack
    would take as long as the call itself.
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
