"""barrier: that no rank leaves before the last one has come, by evidence and not by the clock."""

import time
from typing import Any

from distcheck.backend_probe.scene import (
    Buffers,
    Operation,
    ProbedCall,
    ProbeScene,
    WrongAnswerError,
)

_LATE_S = 0.1  # gives a barrier that does not wait the time to show it; a right one passes at any


def _no_buffers(scene: ProbeScene) -> Buffers:
    return {}


def _barrier(dist: Any, t: dict[str, list[Any]], call: ProbedCall) -> Any:
    """The root comes late: after everybody else is at the barrier, as the store says.

    It leaves a note in the store before it enters. A rank that comes out and finds no such note has
    not been kept waiting; on a correct barrier the note is always there, however slow the machine.
    """
    store, turn, scene = call.store, call.turn, call.scene
    if call.is_root:
        store.wait(
            [f"{turn}/at barrier/{rank}" for rank in range(scene.world) if rank != scene.root]
        )
        time.sleep(_LATE_S)
        store.set(f"{turn}/last one", "has come")
    else:
        store.set(f"{turn}/at barrier/{scene.rank}", "")
    return dist.barrier(**call.options)


def _was_kept_waiting(call: ProbedCall) -> None:
    if not call.store.check([f"{call.turn}/last one"]):
        raise WrongAnswerError(f"left the barrier before rank {call.root} had entered it")


OPERATIONS = (
    Operation(
        name="barrier",
        rooted=True,
        buffers=_no_buffers,
        perform=_barrier,
        witness=_was_kept_waiting,
        dtypes=("",),
        forms=("plain", "async", "sub-group"),
    ),
)
