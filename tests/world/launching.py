"""Starting worlds of the jobs in jobs.py."""

import time
from typing import Any

from distcheck.records import Outcome
from distcheck.worlds import root_cause
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.launch import Ranks, run_until_over, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.world import World
from tests.world.jobs import Asked


def lone(name: str) -> Job[bytes, bytes]:
    """A job of one process, by its name."""
    return Job(f"tests.world.jobs:{name}", bytes, bytes)


def start(
    pool: Pool, job: str, world: int, *, backend: str = "gloo", deadline_s: float = 20.0,
    **about: Any,
) -> World:  # fmt: skip
    def request(rendezvous: Rendezvous) -> Asked:
        return Asked(rendezvous, about)

    ranks = Ranks(
        job=Job(job if ":" in job else f"tests.world.jobs:{job}", Asked, bytes, (STORE,)),
        backend=backend, size=world, request=request, deadline_s=deadline_s,
    )  # fmt: skip
    return start_world(pool, ranks)


def run_to_end(pool: Pool, ranks: World) -> tuple[list[Outcome], float]:
    """The outcomes, causes first, of ranks that all say how far they are; and how many seconds it
    took from there.
    """
    _until_all_have_said(pool, ranks)
    begun = time.monotonic()
    run_until_over(pool, ranks)
    spent_s = time.monotonic() - begun
    outcomes = root_cause.rank_outcomes(ranks.children, hung=ranks.hung)
    ranks.close()
    return outcomes, spent_s


def _until_all_have_said(pool: Pool, ranks: World) -> None:
    while not all(child.progress or child.gone for child in ranks.children):
        pool.pump(0.02)
        ranks.tick()


def hang(
    pool: Pool, job: str, world: int, *, backend: str = "gloo", **about: Any
) -> tuple[World, list[Outcome]]:
    """A world whose ranks all say how far they are and then hang, and the outcomes, causes first.

    The second that this takes counts from what the last of them said: on a crowded machine they
    may be that long in meeting each other.
    """
    ranks = start(pool, job, world, backend=backend, deadline_s=60.0, **about)
    _until_all_have_said(pool, ranks)
    ranks.begin_again(1.0)
    run_until_over(pool, ranks)
    outcomes = root_cause.rank_outcomes(ranks.children, hung=ranks.hung)
    ranks.close()
    return ranks, outcomes


def run(
    pool: Pool, job: str, world: int, *, backend: str = "gloo", deadline_s: float = 20.0,
    **about: Any,
) -> tuple[list[Outcome], list[bytes]]:  # fmt: skip
    """The outcomes, causes first, and what the ranks returned."""
    ranks = start(pool, job, world, backend=backend, deadline_s=deadline_s, **about)
    run_until_over(pool, ranks)
    outcomes = root_cause.rank_outcomes(ranks.children, hung=ranks.hung)
    results = ranks.results
    ranks.close()
    return outcomes, results
