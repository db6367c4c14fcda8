"""Waits for a world of a test: collects messages and output of its ranks, and determines how it
ends. After Ctrl-C, collects the stacks of the ranks for the end of the session.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec
import pytest

from distcheck.errors import HelperError
from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.testing import timeouts
from distcheck.testing.failures import WorldEnd, ranks_phrase
from distcheck.testing.marker import WorldOptions
from distcheck.testing.messages import RankReport, Subtest
from distcheck.worlds import root_cause
from distcheck.worlds.jobs import Job
from distcheck.worlds.launch import Ranks, kill_worlds, not_simulated, run_until_over
from distcheck.worlds.local.children import Child
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.surroundings import Surroundings
from distcheck.worlds.world import World

_PATIENCE_S = 2.0  # of the user who pressed Ctrl-C; most answers take milliseconds

_KEY = pytest.StashKey[tuple[str, str]]()


def ranks_of(options: WorldOptions, job: Job[Rendezvous, Any]) -> Ranks[Rendezvous]:
    """Return the ranks that a marker requests. The request of each rank is its rendezvous."""
    return Ranks(
        job=job,
        backend=options.backend,
        size=options.size,
        request=lambda rendezvous: rendezvous,
        deadline_s=options.deadline_s,
        surroundings=Surroundings(schedule=options.schedule),
    )


@dataclass
class RankMessages:
    """Messages of ranks so far.

    It has the report of each rank, the ranks that reported before they were asked for their stacks,
    and subtests as (rank, subtest). `item` is the test.
    """

    item: pytest.Item | None = None
    reports: dict[int, RankReport] = field(default_factory=dict)
    in_time: set[int] = field(default_factory=set)
    subtests: list[tuple[int, Subtest]] = field(default_factory=list)

    def as_end(self, world: World, outcomes: Sequence[Outcome], *, timeout: str = "") -> WorldEnd:
        return WorldEnd(
            size=len(world.children),
            outcomes=outcomes,
            reports=self.reports,
            outputs=outputs_of(world),
            subtests=self.subtests,
            timeout=timeout,
        )


def collect_rank_messages(world: World, item: pytest.Function) -> RankMessages:
    """Collect each rank's messages; print the ranks' output if pytest's capture is off."""
    heard = RankMessages(item=item)

    def take(number: int, payload: bytes) -> None:
        said = msgspec.msgpack.decode(payload, type=RankReport | Subtest)
        if isinstance(said, Subtest):
            heard.subtests.append((number, said))
        else:
            heard.reports[number] = said
            if not world.hung:
                heard.in_time.add(number)

    live = item.config.getoption("capture", "no") == "no"  # -p no:capture also removes the option
    for number, child in enumerate(world.children):
        child.on_said = functools.partial(take, number)
        if live:
            child.on_output = functools.partial(_print_live, number)
    return heard


@overload
def wait(pool: Pool, world: World, heard: RankMessages) -> WorldEnd: ...
@overload
def wait(
    pool: Pool, world: World, heard: RankMessages, *, enough: Callable[[], bool]
) -> WorldEnd | None: ...
def wait(
    pool: Pool,
    world: World,
    heard: RankMessages,
    *,
    enough: Callable[[], bool] = lambda: False,
) -> WorldEnd | None:
    """Wait until the world ends. If `enough` returns True earlier, return None; the world then
    continues. Raises NotSimulatedError for code that a simulated world cannot run.

    A timeout or Ctrl-C during the wait is reported with the stacks of the ranks.
    """
    timeout = ""
    try:
        while not world.over:
            if not world.hung and enough():
                return None
            if heard.item is not None and not world.hung:
                timeouts.fail_if_time_is_up(heard.item)
            pool.pump(0.05)
            world.tick()
    except pytest.fail.Exception as struck:
        timeout = str(struck)
        world.interrupt()
        run_until_over(pool, world)
    except BaseException as struck:
        try:
            if isinstance(struck, KeyboardInterrupt) and heard.item is not None:
                note_interrupt(heard.item, pool, world, heard.in_time)
        finally:
            kill_worlds(pool, world)
        raise
    if (refused := not_simulated(world)) is not None:
        world.close()
        raise refused
    outcomes = _outcomes_of_test(root_cause.rank_outcomes(world.children, hung=world.hung), heard)
    ended = heard.as_end(world, outcomes, timeout=timeout)
    world.close()
    return ended


def _outcomes_of_test(outcomes: list[Outcome], heard: RankMessages) -> list[Outcome]:
    """Replace the outcomes of persistent ranks that wait for their next test: they have finished
    this one, unless they only continued after being asked for their stacks.
    """
    waiting = {number for number in heard.in_time if heard.reports[number].end != "failed"}
    still = [
        o
        for o in outcomes
        if o.rank not in waiting or o.outcome not in (RankEnd.HUNG, RankEnd.ENDED)
    ]
    done = [Outcome(rank=o.rank, outcome=RankEnd.FINISHED) for o in outcomes if o not in still]
    return still + done


def outputs_of(world: World) -> dict[int, str]:
    """Return the output of each rank, unless printed already, and the dropped amount."""
    found = {}
    for number, child in enumerate(world.children):
        text = child.output.strip("\n") if child.on_output is None else ""
        if text and child.output_left_out:
            text = f"(the first {child.output_left_out} bytes are left out)\n{text}"
        found[number] = text
    return found


def _print_live(number: int, data: bytes) -> None:
    for line in data.decode(errors="replace").splitlines():
        sys.stdout.write(f"[rank {number}] {line}\n")
    sys.stdout.flush()


def note_interrupt(item: pytest.Item, pool: Pool, world: World, ended: Collection[int]) -> None:
    """Ask the ranks for their stacks, except ranks that have `ended` the test, and record replies
    that arrive in time. A second Ctrl-C stops the wait.
    """
    end = time.monotonic() + _PATIENCE_S
    world.interrupt()
    with contextlib.suppress(HelperError):  # it is gone, and the ranks with it
        while not world.over and time.monotonic() < end:
            pool.pump(0.05)
            world.tick()
    item.config.stash[_KEY] = (item.nodeid, describe_ranks(world.children, ended))


def describe_ranks(children: list[Child], ended: Collection[int]) -> str:
    """Return the stack and last collective of every rank; identical ones are shown once."""
    alike: dict[tuple[bool, str], list[int]] = {}
    for rank, child in enumerate(children):
        waits, text = False, " did not respond"
        if rank in ended:
            text = " had ended"
        elif child.stacks is not None:
            call = child.stacks.collective
            waits = child.stacks.waits_in_call
            last = f", last collective: {call.in_words()}" if call is not None else ""
            text = f"{last}\n{child.stacks.text.rstrip()}"
        alike.setdefault((waits, text), []).append(rank)
    return "\n".join(
        f"{ranks_phrase(ranks, len(children))}{text}"
        for (_, text), ranks in sorted(alike.items(), key=lambda group: group[0][0])
    )


def show_interrupt(terminal: "pytest.TerminalReporter") -> None:
    """If a test was interrupted, write the recorded stacks as a separate section."""
    noted = terminal.config.stash.get(_KEY, None)
    if noted is not None:
        nodeid, text = noted
        terminal.section(f"interrupted: {nodeid}")
        terminal.write_line(text)
