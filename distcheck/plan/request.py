"""The request of `verify`, before it becomes cases. No torch."""

import os

from distcheck.plan.settings import Settings
from distcheck.records import Adaptation, Delay


class Request(Settings, frozen=True, kw_only=True):
    """The options of one `distcheck verify`, under their own names."""

    adaptation: Adaptation = Adaptation()
    ranks_here: int | None = None  # ranks of a launcher's world on this machine
    cell_worlds: tuple[int, ...] = ()  # those of `worlds` in which cells run; empty: all
    delays: tuple[Delay, ...] = ()


def is_launched() -> bool:
    """Return True if a launcher has started this process as one of its ranks."""
    return any(name in os.environ for name in ("RANK", "WORLD_SIZE"))
