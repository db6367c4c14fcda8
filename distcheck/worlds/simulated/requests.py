"""What the process of a simulated world is asked: to run it, or to try its schedules. No torch."""

import msgspec

from distcheck.records.schedules import Searched
from distcheck.worlds.jobs import Job


class HostRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Run `target` with each of `payloads`, one per rank, in `environments`, one per rank.

    Descriptors are every rank's, or, where their name begins with `RANK/`, that rank's alone.
    """

    target: str
    order: str
    deadline_s: float
    payloads: list[bytes]
    environments: list[dict[str, str]]
    order_seeds: list[int | None]
    schedule: str = ""


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Run a world under the usual schedule twice, and under those of seeds 1 to `schedules`; or,
    with `switches`, under those with at most so many switches, at most `schedules` of them.
    """

    host: HostRequest
    schedules: int
    deadline_s: float
    switches: int = 0


SEARCH = Job("distcheck.worlds.simulated.search:run", SearchRequest, Searched, ("data", "turn"))
