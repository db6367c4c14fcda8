"""Comparison of the modules of two runs, for a report. No torch."""

from typing import Literal

import msgspec

# `wrong`: inputs are right, outputs are not; `follows`: neither are; `near`: both are within their
# bounds, with other bits; `unseen`: in one run only.
ModuleState = Literal["same", "near", "wrong", "follows", "unseen"]


class ModuleSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A module over its calls in one step of one rank; `error` is the largest distance of an
    output, or of its gradient, relative to its norm, and `bound` its rounding bound.
    """

    name: str
    kind: str
    state: ModuleState
    calls: int = 1
    error: float = 0.0
    bound: float = 0.0


class ByModule(msgspec.Struct, frozen=True, kw_only=True):
    """All modules at a step: the first step with a wrong one, or else the last.

    first      the sentence on the first wrong module
    name       of that module; "" for the whole model, or if none is wrong
    is_found   True if one is wrong
    compared   compared calls, over all steps and ranks
    left_out   omitted calls beyond the limit
    compiled   modules whose inside is not recorded
    """

    first: str
    name: str = ""
    is_found: bool = False
    step: int = 0
    rank: int = 0
    compared: int = 0
    left_out: int = 0
    compiled: tuple[str, ...] = ()
    modules: tuple[ModuleSeen, ...] = ()
