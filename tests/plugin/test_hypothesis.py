"""Hypothesis' examples in worlds: rejected, held to a deadline, spoken of. Under its defaults."""

import functools
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import DeadlineExceeded, FlakyFailure
from hypothesis.internal.observability import with_observability_callback
from hypothesis.vendor.pretty import pretty

from distcheck.records import Outcome
from distcheck.testing import examples, failures
from distcheck.testing.failures import WorldEnd
from distcheck.testing.fixtures import Deferred
from distcheck.testing.messages import RankReport
from tests.plugin.running import run_warm

Run = Callable[..., str]

# Its own profile, also where the environment has CI and hypothesis loads another.
HEAD = """
import os, time
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, event, example, given, note, reject, settings, target
from hypothesis import strategies as st

settings.load_profile("default")
few = settings(max_examples=5, database=None)
FRESH = pytest.mark.world(2, deadline_s=1)
KEPT = pytest.mark.world(2, reuse=True, deadline_s=1)
both = pytest.mark.parametrize(
    "kind", [pytest.param("fresh", marks=FRESH), pytest.param("kept", marks=KEPT)]
)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs pytest on a text in a folder of its own, and returns what was printed."""

    def go(text: str, *options: str) -> str:
        ran = run_warm(tmp_path, HEAD + text, "--tb=short", *options)
        return ran.stdout + ran.stderr

    return go


REJECTED = """
@both
@few
@given(n=st.integers(0, 9))
@example(n=2)
def test_rejected(world, kind, n):
    with open(f"{kind}-{world.rank}", "a") as file:
        file.write(f"{os.getpid()} {n % 2}\\n")
    assume(n % 2)
    dist.all_reduce(torch.ones(1))

@both
@settings(max_examples=1, database=None)
@given(n=st.integers(0, 9))
def test_always(world, kind, n):
    reject()

@KEPT
def test_in_no_example(world):
    assume(False)

left = []

@KEPT
@few
@given(n=st.integers(0, 1))
def test_leaves_one_open(world, n):
    if n == 0:
        if world.rank == 0:
            left.append(dist.all_reduce(torch.ones(1), async_op=True))
        reject()
    total = torch.full((1,), 3.0)
    dist.all_reduce(total)
    assert total == 6
"""


def test_an_example_that_all_ranks_reject_is_rejected(run: Run, tmp_path: Path) -> None:
    """Another one is tried; a kept world goes on."""
    text = run(REJECTED)
    assert "3 failed, 3 passed" in text, text
    assert "test_leaves_one_open left on rank 0: 1 collective not waited for" in text
    assert text.count("Unsatisfiable: Unable to satisfy assumptions of test_always") >= 2
    assert "test_in_no_example - all 2 ranks: hypothesis.errors.UnsatisfiedAssumption" in text
    for kind in ("fresh", "kept"):
        ran = [line.split() for line in (tmp_path / f"{kind}-1").read_text().splitlines()]
        assert {odd for _, odd in ran} == {"0", "1"}
        assert (len({pid for pid, _ in ran}) == 1) == (kind == "kept")


@pytest.mark.sweep
def test_a_leak_may_be_made_an_error_in_a_rejected_example(run: Run) -> None:
    text = run(REJECTED, "-W", "error", "-k", "leaves_one_open")
    assert "1 failed" in text, text
    assert "1 collective not waited for" in text


NOT_TORN_DOWN = """
@pytest.fixture
def bad(world):
    yield
    raise ValueError("not torn down")

@both
@few
@given(n=st.just(0))
@example(n=0)
def test_rejected(world, kind, bad, n):
    assume(n)
"""


def test_a_fixture_that_cannot_be_torn_down_fails_a_rejected_example(run: Run) -> None:
    text = run(NOT_TORN_DOWN)
    assert "2 failed" in text, text
    for kind in ("fresh", "kept"):
        assert f"test_rejected[{kind}] - all 2 ranks: ValueError: not torn down" in text


LIMITED = """
@both
def test_first(world, kind):  # no limit strikes while torch is imported
    pass

@pytest.mark.world(2, deadline_s=20)
@few
@pytest.mark.timeout(5)
@given(n=st.just(3))
def test_hangs(world, n):
    with open("hung", "a") as file:
        file.write(f"{world.rank}")
    time.sleep(1000 if world.rank else 0)
    world.barrier()

@pytest.mark.world(2, reuse=True, deadline_s=20)
@settings(database=None)
@pytest.mark.timeout(6)
@given(n=st.integers(0, 999))
def test_shrinks(world, n):
    time.sleep(0.3)
    assert n < 0
"""


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=pytest.mark.sweep) for method in ("signal", "thread")]
)
def test_a_timeout_ends_the_search(run: Run, tmp_path: Path, method: str) -> None:
    """It is one for all examples. Others would run without any, and be told as flaky."""
    text = run(LIMITED, "--timeout-method", method)
    assert "2 failed, 2 passed" in text, text
    for seconds in (5, 6):
        assert f"Timeout (>{seconds}.0s) from pytest-timeout." in text
    assert "laky" not in text
    assert (tmp_path / "hung").read_text() in ("01", "10")
    assert "In the example world=<world of each rank>, n=3\n" in text
    assert "rank 1 of 2 hung" in text
    before = (
        r"\n(?:E +)?Before, the example .*n=\d+ had failed:\n(?:E +)?all 2 ranks: assert \d+ < 0\n"
    )
    assert re.search(before, text)


ALONE = """
once = settings(max_examples=1, database=None)  # hypothesis goes on to ten that fail

@FRESH
@few
@given(n=st.just(0))
def test_others_pass(world, n):
    assume(world.rank == 0)

@FRESH
@few
@given(n=st.just(0))
def test_others_wait(world, n):
    assume(world.rank == 0)
    world.barrier()
"""


def test_an_example_that_one_rank_rejects_fails(run: Run) -> None:
    """As a skip does that is not on all ranks: nobody has tested it."""
    text = run(ALONE)
    why = "rank 1 of 2 {} (failed to satisfy assume() in test_others_{} (line "
    assert "2 failed" in text, text
    assert why.format("rejected the example", "pass") in text
    assert "rank 0 of 2 did not; reject on every rank or on none" in text
    assert "rank 0 of 2 hung:" in text
    assert why.format("had rejected the example", "wait") in text


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ("skipped passed", "rank 0 of 2 skipped (why 0), rank 1 of 2 did not; skip on"),
        ("passed rejected",
         "rank 1 of 2 rejected the example (why 1), rank 0 of 2 did not; reject"),
        ("rejected skipped", "(why 0), rank 1 of 2 skipped (why 1); reject or skip on every rank"),
    ],
    ids=["one skips", "one rejects", "none has tested"],
)  # fmt: skip
def test_ranks_that_do_not_agree(ends: str, sentence: str) -> None:
    reports = {
        rank: RankReport(end=end, reason=f"why {rank}")  # type: ignore[arg-type]
        for rank, end in enumerate(ends.split())
    }
    outcomes = [Outcome(rank=rank, outcome="finished") for rank in reports]
    ended = WorldEnd(size=2, outcomes=outcomes, reports=reports, outputs={})
    assert sentence in failures.why_ranks_disagree(ended)


def test_a_failure_beside_a_rejection_tells_both(pytestconfig: pytest.Config) -> None:
    reports = {1: RankReport(end="rejected", reason="assume()")}
    killed = [Outcome(rank=0, outcome="killed"), Outcome(rank=1, outcome="finished")]
    ended = WorldEnd(size=2, outcomes=killed, reports=reports, outputs={})
    assert str(failures.longrepr_of(ended, pytestconfig)).splitlines() == [
        "rank 0 of 2 was killed",
        "rank 1 of 2 had rejected the example (assume())",
    ]


def test_the_deadline_is_for_the_body_on_its_ranks() -> None:
    """Not for this process, which starts them; hypothesis' default is no demand of the test's."""

    def strict(milliseconds: float) -> Callable[[], None]:
        demand = settings(deadline=milliseconds, max_examples=1, database=None)
        return demand(given(st.none())(lambda _: time.sleep(0.02)))

    with examples.without_hypothesis_deadline(strict(200)) as deadline:
        assert deadline is None
    with examples.without_hypothesis_deadline(test := strict(10)) as deadline:
        test()
    assert deadline == timedelta(milliseconds=10)
    with examples.without_hypothesis_deadline(functools.wraps(test)(lambda: test())):
        test()
    with pytest.raises(DeadlineExceeded):
        test()


@settings(max_examples=1, database=None)
@given(limit=st.just(100))
def test_the_slowest_rank_is_held_to_the_deadline(limit: int) -> None:
    demand = timedelta(milliseconds=limit)
    examples.enforce_deadline(None, [9.0])
    examples.enforce_deadline(demand, [])
    examples.enforce_deadline(
        demand, [0.01, 0.12]
    )  # as hypothesis: strict about what it shows alone
    with pytest.raises(DeadlineExceeded, match=r"took 130\.00ms.* deadline of 100\.00ms"):
        examples.enforce_deadline(demand, [0.01, 0.13])


def test_a_flaky_deadline_is_told_where_hypothesis_observes() -> None:
    """As flaky: hypothesis speaks of the deadline that it believes to have set."""
    body_s = iter([9.0])  # and none in the run that is to show it

    @settings(deadline=10, max_examples=1, database=None, phases=[Phase.generate])
    @given(st.none())
    def test(_: None) -> None:
        examples.enforce_deadline(deadline, body_s)

    with (
        with_observability_callback(lambda _: None),
        examples.without_hypothesis_deadline(test) as deadline,
        pytest.raises(FlakyFailure, match="did not on a subsequent one"),
    ):
        test()


DEADLINES = """
class TestMethods:
    @FRESH
    @few
    @given(n=st.integers(0, 1))
    def test_no_demand(self, world, n):
        time.sleep(0.3)  # the default is 0.2 s

@both
@settings(max_examples=2, database=None, deadline=50)
@given(n=st.integers(0, 1))
def test_demand(world, kind, n):
    time.sleep(0.2 if world.rank else 0)
"""


def test_hypothesis_own_deadline_is_no_demand(run: Run) -> None:
    text = run(DEADLINES)
    assert "2 failed, 1 passed" in text, text
    assert len(re.findall(r"DeadlineExceeded: Test took \d+", text)) >= 2
    assert "world=<world of each rank>" in text


DRAWS = """
@both
@few
@given(t=st.tuples(st.randoms()))
def test_nested(world, kind, t):
    if world.rank:
        t[0].randrange(9)

@both
@few
@given(f=st.functions(like=lambda x: None, returns=st.integers()))
def test_functions(world, kind, f):
    f(1)

@FRESH
@few
@given(r=st.randoms())
def test_plain(world, r):
    pass

@FRESH
@few
@given(r=st.random_module())
def test_module(world, r):
    pass

@FRESH
@few
@given(r=st.randoms(use_true_random=True))
def test_true(world, r):
    assert len(set(world.gather(r.random()))) == 1
"""


def test_what_draws_in_ranks_is_refused(run: Run) -> None:
    """Ranks would draw apart, and the pytest process, which varies examples, would not know."""
    text = run(DRAWS)
    assert "6 failed, 1 passed" in text, text
    here = "a strategy of this test (st.data(), st.functions() or st.randoms() without use_true"
    assert "test_nested[fresh] - rank 1 of 2: Failed: a strategy of this test" in text
    assert "test_functions[fresh] - all 2 ranks: Failed: a strategy of this test" in text
    assert text.count(f"E   Failed: {here}") == 2
    told = "the arguments of the test cannot be"
    assert f"{told} recreated in a reused world (ArtificialRandom.__init__() miss" in text
    assert f"{told} sent to a reused world (f: Can't pickle" in text
    assert "st.randoms() without use_true_random=True draws while the test runs, so ranks" in text
    assert "st.random_module() seeds only the pytest process" in text


def test_a_users_class_may_be_called_as_one_that_draws() -> None:
    kind = type("DataObject", (), {"__module__": "hypothesis_jsonschema"})
    examples.check_example_arguments([kind(), 7])
    drawn = type("DataObject", (), {"__module__": "hypothesis.strategies._internal.core"})
    with pytest.raises(pytest.fail.Exception, match=r"st\.data"):
        examples.check_example_arguments([drawn()])


SPEAKS = """
@pytest.fixture
def anew(world):
    return []
@both
@few
@given(n=st.just(30))
@example(n=30)
def test_notes(world, kind, n):
    note(f"noted by {world.rank} of {kind}")
    assert n < 30

@both
@few
@given(n=st.integers(0, 1))
def test_tells(world, kind, anew, n):
    anew.append(n)
    assert anew == [n], "no health check need forbid it"
    note("noted by nobody")
    event("it happened", n // 10)
    target(float(world.rank), label="its rank")

@KEPT
def test_in_no_example(world):
    with pytest.raises(Exception, match="outside of a test"):
        event("it happened")
"""


def test_ranks_may_speak_to_hypothesis(run: Run) -> None:
    """Notes are a rank's output; events and targets are told to hypothesis, once."""
    text = run(SPEAKS, "--hypothesis-show-statistics")
    assert "2 failed, 3 passed" in text, text
    for kind in ("fresh", "kept"):
        for rank in range(2):
            assert text.count(f"\nnoted by {rank} of {kind}") == 1
    assert "noted by nobody" not in text
    assert text.count("* 100.00%, it happened: 0") == 2
    assert text.count("Highest target score: 1  (label='its rank')") == 2


def test_what_ranks_set_up_is_shown_as_such() -> None:
    assert pretty(Deferred("model")) == "<model of each rank>"


def test_only_the_explanation_is_left_out() -> None:
    failures = [AssertionError(), KeyError()]
    notes = ["Failing test case: n=7", "Explanation:", "    These lines", "        front.py:1"]
    for failure in failures:
        for note in [*notes, "\nYou can reproduce this"]:
            failure.add_note(note)
    found = ExceptionGroup("2 distinct failures", failures)
    found.add_note("Highest target score: 1")
    examples.leave_out_explanation(found)
    assert found.__notes__ == ["Highest target score: 1"]
    for failure in failures:
        assert failure.__notes__ == ["Failing test case: n=7", "\nYou can reproduce this"]


class Coded(Exception):  # noqa: N818
    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


@pytest.mark.parametrize("kind", [KeyError, Coded])
def test_a_failure_reports_all_ranks(pytestconfig: pytest.Config, kind: type[Exception]) -> None:
    """Where it is shown as one of a group, of all that hypothesis has found; whatever its class
    would make of its text.
    """
    report = RankReport(
        end="failed", exception=f"{kind.__module__}:{kind.__qualname__}", message="told"
    )
    raised = [Outcome(rank=0, outcome="raised", text="told")]
    ended = WorldEnd(size=1, outcomes=raised, reports={0: report}, outputs={})
    failure = failures.failure_of(ended, pytestconfig)
    assert isinstance(failure, kind)
    assert str(failure).splitlines()[0] == "rank 0 of 1: told"
