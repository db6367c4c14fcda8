"""torch's flight recorder: the collectives that this process has entered.

It works for gloo on CPU as well, where TORCH_FR_BUFFER_SIZE is set; empty where torch has none.
NCCL's are in a recorder of their own, which is asked where the process has used a GPU. It records
nothing of backends that are written in Python: such a one may have a recorder of its own.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distcheck.records import Collective

_LATEST = 40  # of a rank's collectives: what a picture has room for
_LOOKS = 500  # a starved thread of gloo's takes that long to note that its work is done
_LOOK_EVERY_S = 0.001


@dataclass(frozen=True)
class CallRecorder:
    """What a backend of its own has recorded, in the same form; how to drop that; and what lets
    calls complete that only move on when they are asked.
    """

    entries: Callable[[], list[dict[str, Any]]]
    forget: Callable[[], None]
    move_on: Callable[[], None]


_source: Callable[[], list[dict[str, Any]]] | None = None
_further: list[CallRecorder] = []


def record_from(source: Callable[[], list[dict[str, Any]]]) -> None:
    """Makes `entries` ask another recorder, whose entries look the same."""
    global _source
    _source = source


def record_further(recorder: CallRecorder) -> None:
    """Makes `entries` ask another recorder as well."""
    if recorder not in _further:
        _further.append(recorder)


def entries(*, stacks: bool = True) -> list[dict[str, Any]]:
    """What was recorded, oldest first; with the Python frames of each call, which take longer."""
    if _source is not None:
        return _source()
    found = _recorded(nccl=False, stacks=stacks)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found += _recorded(nccl=True, stacks=stacks)
    for recorder in _further:
        found += recorder.entries()
    found.sort(key=lambda entry: entry.get("time_created_ns", 0))
    return found


def _recorded(*, nccl: bool, stacks: bool) -> list[dict[str, Any]]:
    try:
        from distcheck.machine import compat  # imports torch, which the front must not

        return compat.recorded_calls(nccl=nccl, stacks=stacks)
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return []


def forget() -> None:
    """Drops what was recorded, where torch can (2.15): reading ten collectives out takes a tenth
    of a millisecond, and a full recorder half a one.
    """
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        from distcheck.machine import compat  # imports torch, which the front must not

        compat.forget_recorded_calls()
    for recorder in _further:
        recorder.forget()


def name_of(entry: dict[str, Any]) -> str:
    """The collective's name: "all_reduce"."""
    name: str = entry["profiling_name"]
    return name.partition(":")[2] or name


def shapes_of(entry: dict[str, Any]) -> str:
    """The shapes that it was called with: "64x3, scalar"."""
    return ", ".join("x".join(map(str, size)) or "scalar" for size in entry["input_sizes"])


def number_of(entry: dict[str, Any]) -> int:
    """Its number among the collectives, or the sends and receives, of its group."""
    number: int = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    return number


def latest(found: list[dict[str, Any]] | None = None) -> tuple[Collective, ...]:
    """The last collectives that this process entered, oldest first; or those of entries `found`."""
    found = entries(stacks=False) if found is None else found
    return tuple(
        Collective(
            number=number_of(entry),
            name=name_of(entry),
            shapes=shapes_of(entry),
            group=str((entry.get("process_group") or ("",))[0]),
            point_to_point=bool(entry["is_p2p"]),
            finished=not is_open(entry),
        )
        for entry in found[-_LATEST:]
    )


def is_open(entry: dict[str, Any]) -> bool:
    """Whether a collective has not been seen to complete."""
    return not entry.get("retired") and entry.get("state") != "completed"


def still_open(patience_s: float = math.inf) -> list[str]:
    """The names of the collectives that have not completed, once there was time to say so, of
    `patience_s` at most: a call that has returned is entered as complete a moment later.
    """
    end = time.monotonic() + patience_s
    for _ in range(_LOOKS):
        for recorder in _further:
            recorder.move_on()
        names = [name_of(entry) for entry in entries(stacks=False) if is_open(entry)]
        if not names or time.monotonic() >= end:
            break
        time.sleep(_LOOK_EVERY_S)
    return names
