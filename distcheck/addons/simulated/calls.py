"""A posted call: its operation, its tensors, and the line of the code under test that made it."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from distcheck.records.posted_calls import PostedCall
from distcheck.worlds.callers import ON_THE_WAY, is_installed, is_standard_library, is_tested_code

_HERE = os.path.dirname(__file__) + os.sep


@dataclass(eq=False, kw_only=True)
class SimulatedCall(PostedCall):
    """One operation that one rank has posted, with its tensors.

    The same operation may take a list or a single tensor. `results` holds one tensor per output,
    with elements in memory order; it is set when the call is `complete`. When the rank waits for
    the call, the results are written to `outputs` and all tensors are released; `sizes` keeps their
    shapes.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    stack: list[tuple[CodeType, int]] = field(default_factory=list)  # as of `calling_stack`
    results: list[torch.Tensor] = field(default_factory=list)
    complete: bool = False
    delivered: bool = False
    source: int = -1
    sender: "SimulatedCall | None" = None  # the send whose message a receive took
    work: Callable[[], Any] | None = None  # returns its Work while the code under test keeps it
    waits: int = 0  # number of waits for its Work
    limit_s: float = math.inf  # timeout set by the code
    timed_out: bool = False  # nothing can complete it before its timeout

    def __post_init__(self) -> None:
        tensors = self.inputs or self.outputs
        self.dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        self.sizes = tuple(tuple(tensor.shape) for tensor in tensors)

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The frames of `stack` outside this package, in the format of torch's flight recorder."""
        return [
            {"filename": code.co_filename, "line": _line_at(code, at), "name": code.co_name}
            for code, at in self.stack
            if not code.co_filename.startswith(_HERE)
        ]

    @property
    def where(self) -> str:
        """The line of the code under test that made the call, as " at FILE:LINE"; empty if there is
        none.
        """
        for code, at in self.stack:
            if is_tested_code(code.co_filename):
                return f" at {code.co_filename}:{_line_at(code, at)}"
        return ""

    @property
    def by_index(self) -> bool:
        """True if gloo reads the tensors of this call in logical index order. For other calls gloo
        reads memory order, so ranks with different memory layouts get different results (measured
        with torch 2.15).
        """
        return self.kind in ("all_gather", "gather", "all_to_all") or (
            self.name == "reduce_scatter_tensor"
        )


def is_called_by_theirs(stack: Sequence[tuple[CodeType, int]]) -> bool:
    """Return True if the code under test made the call directly. Return False if torch's own code
    made it.
    """
    for code, _ in stack:
        file = code.co_filename
        if (
            not file.startswith(_HERE)
            and not file.endswith(ON_THE_WAY)
            and not is_standard_library(file)
        ):
            return is_tested_code(file)
    return False


def is_repr_by_library() -> bool:
    """Return True if an installed package requests a string representation. pytest does so for the
    variables of a failed test. The code under test does not access the tensor in this case.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and not is_tested_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_installed(frame.f_code.co_filename)


def calling_stack() -> list[tuple[CodeType, int]]:
    """Return the frames from the caller to the code under test, innermost first, each as a code
    object and an instruction offset. Line numbers are computed only when they are reported.
    """
    found = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append((code, frame.f_lasti))
        if is_tested_code(code.co_filename):
            break
        frame = frame.f_back
    return found


def _line_at(code: CodeType, at: int) -> int:
    lines = (line for begin, end, line in code.co_lines() if begin <= at < end)
    return next(lines, None) or code.co_firstlineno
