"""What `verify` was asked for, before it becomes cases. No torch."""

import os

from distcheck.plan.settings import Settings
from distcheck.records import Adaptation, Delay


class Request(Settings, frozen=True, kw_only=True):
    """What `distcheck verify` was asked for; the options' own names."""

    adaptation: Adaptation = Adaptation()
    ranks_here: int | None = None  # of a launcher's world, on this machine
    cell_worlds: tuple[int, ...] = ()  # of `worlds`, those in which cells run; none: all
    delays: tuple[Delay, ...] = ()


def is_launched() -> bool:
    """Return True if a launcher has started this process as one of its ranks."""
    return any(name in os.environ for name in ("RANK", "WORLD_SIZE"))
