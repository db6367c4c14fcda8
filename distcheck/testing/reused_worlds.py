"""Persistent worlds: `@pytest.mark.world(4, reuse=True)` runs several tests in one world.

Ranks and process group persist, so a test costs one message in each direction. Ranks are forked
when the first such test runs, after collection, so they know every test. Values of inherited
fixtures are sent by pickle. After each test, its changes to the rank are reverted (see
reused_rank.py). If a test fails, its world is discarded.
"""

import atexit
import contextlib
import os
import pickle
import warnings
from typing import Any

import msgspec
import pytest

from distcheck.errors import HelperError
from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.testing import examples, fixtures, rank
from distcheck.testing.failures import WorldEnd
from distcheck.testing.messages import KEPT_ELSE, SERVE, RankReport, RequestedTest
from distcheck.testing.rank import PreparedTest
from distcheck.testing.waiting import collect_rank_messages, ranks_of, wait
from distcheck.worlds.local.helper_process import ForkedHelper
from distcheck.worlds.pool import Pool
from distcheck.worlds.worker_pool import WorkerPool

_MOST_KEPT = 2  # worlds of different sizes or backends

_Key = tuple[int, str, str]
_kept: dict[_Key, "ReusedWorld"] = {}


def run(prepared: PreparedTest) -> WorldEnd:
    """Run a test in a persistent world; start one if there is none."""
    options, arguments = prepared.options, _pickle_arguments(prepared)
    key = (options.size, options.backend, options.device)
    world = _kept.pop(key, None)
    if world is not None and not world.is_ready(options.deadline_s):
        world.close()
        world = None
    world = world or ReusedWorld(prepared)
    while len(_kept) >= _MOST_KEPT:
        _kept.pop(next(iter(_kept))).close()
    ended = None
    try:
        ended = world.run(prepared, arguments)
    finally:
        if ended is not None and world.usable and not _left_something(ended):
            _kept[key] = world  # the most recent one last
        else:
            world.close()
    return ended


def _left_something(ended: WorldEnd) -> bool:
    """Return True if a test left its ranks in a state that would affect the next one: a collective
    that only some have entered, a changed default group, a group created on some ranks only, a
    running thread, or the unfinished rest of a failed subtest.
    """
    failed = any(subtest.failure for _, subtest in ended.subtests)
    reports = ended.reports.values()
    apart = len({report.groups for report in reports}) > 1
    return failed or apart or any(report.left_stays for report in reports)


def close_all() -> None:
    while _kept:
        _kept.popitem()[1].close()


atexit.register(close_all)


class ReusedWorld:
    """Ranks that wait for the next test."""

    def __init__(self, prepared: PreparedTest) -> None:
        self._owner = os.getpid()
        self._closed = False
        self._deadline_s = prepared.options.deadline_s  # collectives wait for a multiple of it
        rank.set_test_for_ranks(prepared)
        self._pool = Pool(ForkedHelper())
        self._pool.wait_ready()
        options = prepared.options
        self._size = options.size
        try:
            self._ranks = WorkerPool.of_ranks(self._pool, ranks_of(options, SERVE))
        except BaseException:
            self._pool.close()
            raise
        finally:
            rank.set_test_for_ranks(None)

    @property
    def usable(self) -> bool:
        """Return True if this world can run another test."""
        return not self._closed and os.getpid() == self._owner and not self._ranks.world.over

    def is_ready(self, deadline_s: float) -> bool:
        """Return True if a test with this deadline may run here now: the timeout of collectives is
        sufficient, and no rank has died since the previous test.
        """
        if not self.usable or deadline_s > self._deadline_s:
            return False
        try:
            self._pool.pump(0)
        except HelperError:
            return False
        return not any(child.gone for child in self._ranks.world.children)

    def run(self, prepared: PreparedTest, arguments: bytes) -> WorldEnd:
        """Run one test, with its pickled arguments. If a rank fails, the world ends."""
        test = RequestedTest(
            nodeid=prepared.item.nodeid,
            arguments=arguments,
            options=msgspec.msgpack.encode(prepared.options),
            final=examples.is_final(),
        )
        heard = collect_rank_messages(self._ranks.world, prepared.item)
        self._ranks.world.begin_again(prepared.options.deadline_s)
        self._ranks.ask(test)
        ended = wait(
            self._pool, self._ranks.world, heard, enough=lambda: self._all_well(heard.reports)
        )
        if ended is None:
            self._pool.pump(0)  # output printed before the reports were sent
            done = [Outcome(rank=r, outcome=RankEnd.FINISHED) for r in range(self._size)]
            ended = heard.as_end(self._ranks.world, done)
            for child in self._ranks.world.children:
                child.forget_output()
        return ended

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._pool.close()
        self._ranks.hang_up()
        self._ranks.world.close()

    def _all_well(self, reports: dict[int, RankReport]) -> bool:
        return len(reports) == self._size and all(
            report.end in ("passed", "skipped", "rejected") for report in reports.values()
        )


def _filters() -> list[Any]:
    """Return the warning filters, without those of a category that ranks cannot import."""
    found = []
    for warning_filter in warnings.filters:
        with contextlib.suppress(Exception):
            pickle.dumps(warning_filter)
            found.append(warning_filter)
    return found


def _pickle_arguments(prepared: PreparedTest) -> bytes:
    """Return all arguments in one pickle, so that shared objects stay shared in a rank. Fails the
    test if they cannot be pickled.
    """
    asked = fixtures.values_for_ranks(prepared.item)
    try:
        return pickle.dumps((prepared.args, prepared.kwargs, asked, _filters()))
    except Exception as error:
        reason = str(error)
    values: dict[str, Any] = {f"argument {n}": v for n, v in enumerate(prepared.args)}
    for name, value in {**values, **asked, **prepared.kwargs}.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            reason = f"{name}: {error}"
    pytest.fail(
        f"the arguments of the test cannot be sent to a reused world ({reason}); {KEPT_ELSE}",
        pytrace=False,
    )
