"""Request and result of a search in addition to a verification. No torch.

`distcheck verify --thorough` searches for the smallest failure of each strategy after its cases
(`distcheck/addons/explore`). A case that is found is one of the report's cases; this module
describes the extent of the search.
"""

from typing import Literal

import msgspec


class PlannedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search of the complete plan, and the part that runs it."""

    strategy: str
    budget_s: float
    shard: int = 1


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """The extent of a search. One that was not run does not affect the report's verdict.

    cases, passed, insensitive  cases that ran; that passed; that passed but could not have
                                revealed every simple mistake
    found      ids of the report's cases that the search added: the smallest failing case, or
               those that could not be judged
    left_out   words that were not drawn, each with the reason
    reason     why it was not run, or is unknown
    """

    strategy: str
    verdict: Literal["pass", "unknown", "fail", "not run"]
    budget_s: float
    spent_s: float = 0.0
    seed: int = 0
    most_world: int = 0
    most_steps: int = 0
    cases: int = 0
    passed: int = 0
    insensitive: int = 0
    found: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    reason: str = ""
