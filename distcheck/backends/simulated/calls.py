"""What a rank has called: the operation, its tensors, and the line of the code under test."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from distcheck.records.posted_calls import Posted

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_NOT_THEIRS = (
    _PACKAGE, str(Path(torch.__file__).parent) + os.sep, threading.__file__, "<frozen", "<string>",
)  # fmt: skip
_HERE = os.path.dirname(__file__)
_MOST_FRAMES = 64


@dataclass(eq=False, kw_only=True)
class Call(Posted):
    """One operation that one rank has posted, with its tensors.

    A list or one tensor may be given for the same kind of operation. `results` [per output] are
    what it leaves, in memory order, once `complete`; they are written to `outputs` when the rank
    waits for it. `sizes` are those of its tensors, which it does not keep after that.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    called_from: list[tuple[CodeType, int]] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    complete: bool = False
    delivered: bool = False
    source: int = -1
    sender: "Call | None" = None  # whose message a receive took
    work: Callable[[], Any] | None = None  # gives its Work while the code under test keeps it
    waits: int = 0  # how often its Work was waited for

    def __post_init__(self) -> None:
        tensors = self.inputs or self.outputs
        self.dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        self.sizes = tuple(tuple(tensor.shape) for tensor in tensors)

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The frames that it was called from, innermost first, as torch's recorder has them."""
        return [
            {"filename": code.co_filename, "line": line, "name": code.co_name}
            for code, line in self.called_from
        ]

    @property
    def where(self) -> str:
        """The line of the code under test that called it, as " at FILE:LINE"; or nothing."""
        for code, line in self.called_from:
            if is_theirs(code.co_filename):
                return f" at {code.co_filename}:{line}"
        return ""

    @property
    def by_index(self) -> bool:
        """Whether gloo takes its tensors' elements in the order of their indices: others it takes
        as they lie in memory, so that ranks with other layouts get another result (measured with
        torch 2.15).
        """
        return self.kind in ("all_gather", "gather", "all_to_all") or (
            self.name == "reduce_scatter_tensor"
        )


def is_theirs(filename: str) -> bool:
    """Whether a file is of the code under test: neither torch's nor distcheck's own."""
    return not filename.startswith(_NOT_THEIRS)


def place_of_caller() -> str:
    """The innermost line of the code under test, as FILE:LINE; or nothing."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_theirs(frame.f_code.co_filename) and os.sep in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def calling_frames() -> list[tuple[CodeType, int]]:
    """The frames of the caller outside of this folder, innermost first: code and line. They are
    few numbers of many calls, which are put into words where a call is shown.
    """
    return list(_frames())


def _frames() -> Iterator[tuple[CodeType, int]]:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            yield code, frame.f_lineno
        frame = frame.f_back
