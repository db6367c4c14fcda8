"""How work is shared between judges, and what a pool need not confirm again."""

import os
from typing import Any

import msgspec
import pytest

from distcheck.contract import BackendAllReduce
from distcheck.errors import InternalError
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, Delay, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.store.run_folder import SavedCase
from distcheck.training.jobs import CalibrationResult
from distcheck.verification import preparation
from distcheck.verification.case_run import CaseRun
from distcheck.verification.preparation import SharedDataset
from distcheck.verification.report_builder import restore_run
from distcheck.verification.session import Session, SilentListener, steps_of_judges
from distcheck.worlds.pool import Pool
from distcheck.worlds.surroundings import TOGETHER, separate
from tests.unit.test_plan import MODEL, ORDERED, cases, facts_of


@pytest.mark.parametrize(
    ("cores", "world", "seconds", "judges"),
    [
        (2, 4, 0.4, 1),  # 0.8 of a core: less than one judge's start is worth
        (2, 4, 0.6, 2),
        (2, 1, 1.2, 2),  # of one core, whatever there are
        (8, 4, 0.6, 3),
        (8, 4, 60.0, 12),  # a judge for every step
        (2, 4, 60.0, 4),  # two for every core
        (8, 4, None, 12),  # saved traces, judged again: no world ran
    ],
)
def test_a_world_is_judged_by_as_many_as_it_kept_cores_busy(
    monkeypatch: pytest.MonkeyPatch, cores: int, world: int, seconds: float | None, judges: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    case = next(c for c in cases(worlds=[world], steps=12) if "exact" not in c.layers)
    layout = TraceLayout(world=world, steps=12, max_shard=64, model=MODEL)
    run = CaseRun(case=case, facts=facts_of(ORDERED), planned=(), layout=layout)
    if seconds is not None:
        run.timings_s["world"] = seconds
    session = Session(Pool(), SharedDataset(), SilentListener())
    shares = steps_of_judges(run, 12, session._most_judges, session._cores)
    assert len(shares) == judges
    assert [step for share in shares for step in share] == list(range(12))
    run.case = msgspec.structs.replace(case, device="cuda")  # to begin there costs more than steps
    assert steps_of_judges(run, 12, session._most_judges, session._cores) == [tuple(range(12))]


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({}, 1),
        ({"seed": 7, "batch": 64, "steps": 5}, 1),  # nothing that an order depends on
        ({"deadline_s": 31.0}, 2),  # within which it must answer
        ({"world": 3}, 2),
        ({"dtype": "float64"}, 1),  # it is the model's parameters that say what is exchanged
    ],
    ids=str,
)
def test_what_gloo_has_confirmed_is_kept(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], asked: int
) -> None:
    calls = of_calibrating(monkeypatch, CalibrationResult(failures=((BackendAllReduce(), ""),)))
    case, pool = Case(id="it", strategy="it", world=4), Pool()
    for one in (case, msgspec.structs.replace(case, **change)):
        assert preparation._calibrate_for(pool, one, [one], [facts_of(ORDERED)]).failures
    assert len(calls) == asked
    preparation._calibrate_for(Pool(), case, [case], [facts_of(ORDERED)])
    assert len(calls) == asked + 1, "another pool is another torch"


def test_what_another_library_adds_up_with_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = CalibrationResult(failures=((BackendAllReduce(), ""),))
    calls = of_calibrating(monkeypatch, found)
    case, pool = Case(id="it", strategy="it", world=4, backend="mpi"), Pool()
    for _ in range(2):
        assert preparation._calibrate_for(pool, case, [case], [facts_of(ORDERED)]) is found
    assert len(calls) == 2


def of_calibrating(
    monkeypatch: pytest.MonkeyPatch, found: CalibrationResult
) -> list[dict[str, Any]]:
    """Every time that a world would have been started, and what it finds."""
    calls: list[dict[str, Any]] = []

    def calibrate(pool: Pool, **about: Any) -> CalibrationResult:
        calls.append(about)
        return found

    monkeypatch.setattr(preparation, "calibrate", calibrate)
    return calls


@pytest.mark.parametrize(
    ("change", "why_not", "reason"),
    [
        ({"separate": False}, "no room", "because of --no-separate"),
        ({"backend": "mpi"}, "", "backend mpi"),
        ({"device": "cuda"}, "", "ranks on a GPU"),
        ({}, "no room", "no room"),
    ],
)
def test_a_shared_rerun_has_a_reason(change: dict[str, Any], why_not: str, reason: str) -> None:
    run = case_run(**change)
    run.decide_surroundings(why_not)
    assert run.surroundings == TOGETHER
    assert run.rerun_in == f"not in separate interpreters: {reason}"


def test_a_persons_delays_leave_the_rerun_undisturbed() -> None:
    run, late = case_run(), case_run(delays=(Delay(rank=1, ms=5),))
    for one in (run, late):
        one.decide_surroundings("")
        assert "interpreters" in one.surroundings.factors
        assert one.rerun_in == one.surroundings.describe(4)
    assert run.surroundings.delays(4)
    assert not late.surroundings.delays(4)


def test_a_world_that_takes_a_rerun_apart_may_hang_for_less_long() -> None:
    run = case_run(deadline_s=30.0)
    for spent, deadline_s in ((0.2, 5.0), (1.5, 15.0), (60.0, 30.0)):
        run.timings_s["world"] = spent
        assert run.deadline_s("further") == deadline_s
        assert run.deadline_s("rerun") == 30.0


@pytest.mark.parametrize("after_hang", [False, True])
def test_other_cases_are_not_run_after_a_hang_unless_they_were_asked_for(after_hang: bool) -> None:
    hung, other, elsewhere = case_run(id="a"), case_run(id="b"), case_run(id="c", world=3)
    session = Session(Pool(), SharedDataset(), SilentListener())
    session.after_hang = after_hang
    session._worlds += [(other, "world"), (elsewhere, "world")]
    session._leave_out_others(hung)
    assert [run for run, _ in session._worlds] == [other, elsewhere][not after_hang :]
    assert not elsewhere.finished
    if not after_hang:
        assert other.not_run.startswith("not run: the strategy hung in exact float32; --after-ha")


def case_run(**change: Any) -> CaseRun:
    case = msgspec.structs.replace(cases()[0], rerun=True, **change)
    layout = TraceLayout(world=4, steps=3, max_shard=64, model=MODEL)
    return CaseRun(case=case, facts=facts_of(ORDERED), planned=(), layout=layout)


def test_a_saved_case_comes_back_as_it_was_and_closes_its_traces() -> None:
    run = case_run()
    run.outcomes = run.rerun_outcomes = (Outcome(rank=0, outcome=RankEnd.FINISHED),)
    run.surroundings, run.rerun_in = separate(0, delayed=True), "there"
    run.notes, run.defect = ("left out",), InternalError("lost", "a traceback")
    same = (
        "case", "facts", "planned", "layout", "outcomes", "rerun_outcomes", "rerun_in",
        "surroundings", "separation", "notes",
    )  # fmt: skip
    said = {name: getattr(run, name) for name in same}
    trace = os.open(os.devnull, os.O_RDONLY)
    saved = SavedCase(**said, defect=("lost", "a traceback"), environment={}, digests={})
    back = restore_run(saved, [trace])
    assert {name: getattr(back, name) for name in same} == said
    assert back.defect is not None
    assert (str(back.defect), back.defect.traceback) == ("lost", "a traceback")
    assert back.traces == {"world": trace}
    back.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(trace)
