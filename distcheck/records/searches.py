"""What a search beside a verification is asked for, and what it comes to. No torch.

`distcheck verify --thorough` searches for the smallest failure of each strategy when its cases have
run (`distcheck/explore/thorough_search.py`). A case that is found is one of the report's cases,
like any other; what is here says how far the search went.
"""

from typing import Literal

import msgspec


class PlannedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search of the whole plan, and the part of it that is to run it."""

    strategy: str
    budget_s: float
    shard: int = 1


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """How far a search went. One that was not run plays no part in the report's verdict.

    cases, passed, insensitive  cases that ran; that passed; in which nothing differed, but not
                                every simple mistake could have shown
    found      ids of the report's cases that the search added: the least case that fails, or those
               that could not be judged
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
