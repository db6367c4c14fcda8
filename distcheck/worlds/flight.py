"""Reads torch's flight recorder, which records the collectives that this process has entered.

The recorder covers gloo on the CPU if TORCH_FR_BUFFER_SIZE is set. NCCL has a separate recorder,
which is read if the process has used a GPU. torch does not record backends written in Python; such
a backend may register its own `CallRecorder`. Without any recorder, there are no entries.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distcheck.records import Collective
from distcheck.worlds.callers import is_tested_code

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool",
}  # fmt: skip
_LATEST = 40  # of a rank's collectives: as many as a figure can show
_LOOKS = 500  # a starved gloo thread takes that long to mark its work as done
_LOOK_EVERY_S = 0.001


@dataclass(frozen=True)
class CallRecorder:
    """The recorder of a Python backend: a function that returns its entries in torch's format, one
    that clears them, and one that drives calls which make progress only when polled.
    """

    entries: Callable[[], list[dict[str, Any]]]
    forget: Callable[[], None]
    move_on: Callable[[], None]


_source: Callable[[], list[dict[str, Any]]] | None = None
_further: list[CallRecorder] = []


def record_from(source: Callable[[], list[dict[str, Any]]]) -> None:
    """Make `entries` read another recorder of the same format instead."""
    global _source
    _source = source


def record_further(recorder: CallRecorder) -> None:
    """Make `entries` read another recorder in addition."""
    if recorder not in _further:
        _further.append(recorder)


def entries(*, stacks: bool = True) -> list[dict[str, Any]]:
    """Return the recorded entries, oldest first. `stacks` adds their Python frames (slow)."""
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
        from distcheck.machine import compat  # imports torch, which the front end must not

        return compat.recorded_calls(nccl=nccl, stacks=stacks)
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return []


def forget() -> None:
    """Clear the record, if torch supports this (2.15). Measured: reading ten collectives takes 0.1
    ms; reading a full recorder takes 0.5 ms.
    """
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        from distcheck.machine import compat  # imports torch, which the front end must not

        compat.forget_recorded_calls()
    for recorder in _further:
        recorder.forget()


def name_of(entry: dict[str, Any]) -> str:
    """Return the collective's name, such as "all_reduce"."""
    name: str = entry["profiling_name"]
    return name.partition(":")[2] or name


def dtype_of(entry: dict[str, Any]) -> str:
    """Return the dtype of its tensors as torch's name without `torch.`; "" without tensors."""
    found = entry["input_dtypes"] or entry["output_dtypes"]
    return _DTYPES.get(found[0], found[0].lower()) if found else ""


def place_of(entry: dict[str, Any]) -> str:
    """Return the innermost line of the code under test as FILE:LINE; "" if there is none."""
    frames = (frame for frame in entry["frames"] if is_tested_code(frame["filename"]))
    return next((f"{frame['filename']}:{frame['line']}" for frame in frames), "")


def shapes_of(entry: dict[str, Any]) -> str:
    """Return the shapes of the collective's inputs, such as "64x3, scalar"."""
    return ", ".join("x".join(map(str, size)) or "scalar" for size in entry["input_sizes"])


def number_of(entry: dict[str, Any]) -> int:
    """Return the sequence number of the entry among the collectives, or the sends and receives, of
    its group.
    """
    number: int = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    return number


def latest(found: list[dict[str, Any]] | None = None) -> tuple[Collective, ...]:
    """Return the latest collectives that this process entered, oldest first."""
    found = entries(stacks=False) if found is None else found
    return tuple(
        Collective(
            number=number_of(entry),
            name=name_of(entry),
            shapes=shapes_of(entry),
            group=str((entry.get("process_group") or ("",))[0]),
            point_to_point=bool(entry["is_p2p"]),
            finished=not is_incomplete(entry),
        )
        for entry in found[-_LATEST:]
    )


def is_incomplete(entry: dict[str, Any]) -> bool:
    """Return True unless the collective is known to have completed."""
    return not entry.get("retired") and entry.get("state") != "completed"


def incomplete_collectives(patience_s: float = math.inf) -> list[str]:
    """Return the names of the collectives that have not completed. Waits at most `patience_s`,
    because a call that has returned is marked as complete a moment later.
    """
    end = time.monotonic() + patience_s
    for _ in range(_LOOKS):
        for recorder in _further:
            recorder.move_on()
        names = [name_of(entry) for entry in entries(stacks=False) if is_incomplete(entry)]
        if not names or time.monotonic() >= end:
            break
        time.sleep(_LOOK_EVERY_S)
    return names
