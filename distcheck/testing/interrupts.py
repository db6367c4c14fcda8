"""What ranks were doing when Ctrl-C came: asked at once, shown at the end of the session."""

import contextlib
import time
from collections.abc import Collection

import pytest
from _pytest.terminal import TerminalReporter

from distcheck.errors import HelperError
from distcheck.testing.failures import name_of
from distcheck.worlds.local.children import Child
from distcheck.worlds.pool import Pool
from distcheck.worlds.world import World

_PATIENCE_S = 2.0  # of the person who pressed Ctrl-C; most answers come within milliseconds

_KEY = pytest.StashKey[tuple[str, str]]()


def note(item: pytest.Item, pool: Pool, world: World, ended: Collection[int]) -> None:
    """Asks the ranks, but for those that had `ended` the test, and notes what they answer in time.
    Another Ctrl-C cuts it short.
    """
    end = time.monotonic() + _PATIENCE_S
    world.interrupt()
    with contextlib.suppress(HelperError):  # it is gone, and the ranks with it
        while not world.over and time.monotonic() < end:
            pool.pump(0.05)
            world.tick()
    item.config.stash[_KEY] = (item.nodeid, describe(world.children, ended))


def describe(children: list[Child], ended: Collection[int]) -> str:
    """Every rank's stack and last collective, alike ones once; those in no collective first."""
    alike: dict[tuple[bool, str], list[int]] = {}
    for rank, child in enumerate(children):
        waits, text = False, " did not answer"
        if rank in ended:
            text = " had ended"
        elif child.stacks is not None:
            call = child.stacks.collective
            waits = child.stacks.waits_in_call
            last = f", last collective: {call.in_words()}" if call is not None else ""
            text = f"{last}\n{child.stacks.text.rstrip()}"
        alike.setdefault((waits, text), []).append(rank)
    return "\n".join(
        f"{name_of(ranks, len(children))}{text}"
        for (_, text), ranks in sorted(alike.items(), key=lambda group: group[0][0])
    )


def show(terminal: TerminalReporter) -> None:
    """Writes what was noted, if a test was interrupted, as a section of its own."""
    noted = terminal.config.stash.get(_KEY, None)
    if noted is not None:
        nodeid, text = noted
        terminal.section(f"interrupted: {nodeid}")
        terminal.write_line(text)
