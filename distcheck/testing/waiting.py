"""Waiting for a world of tests: what its ranks say and print, and how it ends."""

import functools
import sys
from collections.abc import Callable
from typing import overload

import msgspec
import pytest

from distcheck.testing.failures import Ended
from distcheck.testing.messages import RankReport
from distcheck.worlds import blame
from distcheck.worlds.launch import end_now
from distcheck.worlds.pool import Pool
from distcheck.worlds.world import World


def listen(world: World, item: pytest.Function) -> dict[int, RankReport]:
    """Collects what each rank says; under `-s`, prints what it prints."""
    reports: dict[int, RankReport] = {}

    def take(number: int, payload: bytes) -> None:
        reports[number] = msgspec.msgpack.decode(payload, type=RankReport)

    live = item.config.getoption("capture") == "no"
    for number, child in enumerate(world.children):
        child.on_said = functools.partial(take, number)
        if live:
            child.on_output = functools.partial(_print_live, number)
    return reports


@overload
def wait(pool: Pool, world: World, reports: dict[int, RankReport]) -> Ended: ...
@overload
def wait(
    pool: Pool, world: World, reports: dict[int, RankReport], *, enough: Callable[[], bool]
) -> Ended | None: ...
def wait(
    pool: Pool,
    world: World,
    reports: dict[int, RankReport],
    *,
    enough: Callable[[], bool] = lambda: False,
) -> Ended | None:
    """Until the world is over, or there is `enough`: then None, and the world goes on.

    A timeout that strikes meanwhile is told with the ranks' stacks.
    """
    timeout = ""
    try:
        while not world.over:
            if enough():
                return None
            pool.pump(0.05)
            world.tick()
    except pytest.fail.Exception as struck:
        timeout = str(struck)
        world.interrupt()
        while not world.over:
            pool.pump(0.05)
            world.tick()
    except BaseException:
        end_now(pool, world)
        raise
    ended = Ended(
        size=len(world.children),
        outcomes=blame.outcomes(world.children, hung=world.hung),
        reports=reports,
        outputs=outputs_of(world),
        timeout=timeout,
    )
    world.close()
    return ended


def outputs_of(world: World) -> dict[int, str]:
    """What each rank has printed, unless it was shown already."""
    return {
        number: child.output.strip("\n") if child.on_output is None else ""
        for number, child in enumerate(world.children)
    }


def _print_live(number: int, data: bytes) -> None:
    for line in data.decode(errors="replace").splitlines():
        sys.stdout.write(f"[rank {number}] {line}\n")
    sys.stdout.flush()
