"""Stand-ins for CUDA's clocks and streams on a machine without a GPU.

Code that is written for GPUs times itself by events, waits for the device, and has streams. On a
CPU all work is done in order when a call returns, so there is nothing to wait for.
"""

import contextlib
from typing import Any

import torch


class _Nothing:
    """An event or a stream: everything before it is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing

    def query(self) -> bool:
        """Whether it has been reached."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds; no time passes."""
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        """An event that has been reached."""
        return event or _Nothing()


def stand_in() -> None:
    """Puts them in torch's place, in this process, where torch finds no GPU."""
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = cuda.current_stream = cuda.default_stream = _Nothing
    cuda.synchronize = _Nothing()._nothing
    cuda.stream = contextlib.nullcontext
