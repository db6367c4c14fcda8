"""Methods of tensors that read memory without an operation that torch dispatches.

They are put around torch's own for good, in a process that holds simulated worlds. A rank that
reads in this way what a call still writes is accused, as of any operation.
"""

import copy
import functools
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from distcheck.worlds.simulated.calls import is_shown_by_a_library
from distcheck.worlds.simulated.world import here

_COPY = copy.copy.__code__  # which shares the memory, and reads none of it


@cache
def watch() -> None:
    """Puts them in place in this process."""
    shown = lambda: not is_shown_by_a_library()  # noqa: E731
    kept = lambda: sys._getframe(2).f_code is not _COPY  # noqa: E731
    _watch("tolist", "tolist", lambda: True)
    _watch("__repr__", "repr", shown)
    _watch("__reduce_ex__", "pickle", kept)


def _watch(name: str, shown_as: str, counts: Callable[[], bool]) -> None:
    reads: Any = getattr(torch.Tensor, name)

    @functools.wraps(reads)
    def watched(self: torch.Tensor, *given: Any, **named: Any) -> Any:
        rank = here().baton.rank
        if rank is not None and counts():
            here().read(rank, self, shown_as)
        return reads(self, *given, **named)

    setattr(torch.Tensor, name, watched)
