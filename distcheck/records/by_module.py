"""What modules of two runs have in common, for a report. No torch."""

from typing import Literal

import msgspec

# `wrong`: what it was given is right, and what it has made of that is not; `follows`: both are not;
# `near`: both are right within their bounds, and have other bits; `unseen`: in one run alone.
ModuleState = Literal["same", "near", "wrong", "follows", "unseen"]


class ModuleSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A module of the model, over its calls in one step of one rank; `error` is the largest
    distance of what it has returned, or of a gradient of that, over its norm, and `bound` what
    rounding may do to that one.
    """

    name: str
    kind: str
    state: ModuleState
    calls: int = 1
    error: float = 0.0
    bound: float = 0.0


class ByModule(msgspec.Struct, frozen=True, kw_only=True):
    """All modules at a step: the first at which one is wrong, or else the last.

    first      the sentence on the first wrong one; or on what comes after all of them
    name       of that module; empty for the whole model, or where none is wrong
    is_found   whether one is wrong
    compared   calls that were compared, over all steps and ranks
    left_out   calls beyond the most that are kept
    compiled   modules within which nothing is seen
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
