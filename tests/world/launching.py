"""Starting worlds of the jobs in jobs.py."""

from typing import Any

import msgspec

from distcheck.records import Outcome
from distcheck.worlds import blame
from distcheck.worlds.launch import run_until_over, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.world import World
from tests.world.jobs import Job


def start(
    pool: Pool,
    job: str,
    world: int,
    *,
    backend: str = "gloo",
    deadline_s: float = 20.0,
    **about: Any,
) -> World:
    def payload(rendezvous: Rendezvous) -> bytes:
        return msgspec.msgpack.encode(Job(rendezvous, about))

    return start_world(
        pool,
        target=job if ":" in job else f"tests.world.jobs:{job}",
        backend=backend,
        size=world,
        payload=payload,
        fds=[],
        deadline_s=deadline_s,
    )


def run(
    pool: Pool,
    job: str,
    world: int,
    *,
    backend: str = "gloo",
    deadline_s: float = 20.0,
    **about: Any,
) -> tuple[list[Outcome], list[bytes]]:
    """The outcomes, causes first, and what the ranks returned."""
    ranks = start(pool, job, world, backend=backend, deadline_s=deadline_s, **about)
    run_until_over(pool, ranks)
    outcomes = blame.outcomes(ranks.children, hung=ranks.hung)
    results = ranks.results
    ranks.close()
    return outcomes, results
