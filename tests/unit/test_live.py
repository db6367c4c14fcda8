"""Progress: what a terminal and a log are shown while a verification runs."""

import io

import pytest
from rich.console import Console

from distcheck.records import Case
from distcheck.reports import live
from distcheck.reports.live import LiveProgress
from distcheck.verification.session import step_in_words, steps_in_words


class Clock:
    """Time that goes on when it is asked to."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    return clock


def case(name: str, steps: int = 3) -> Case:
    return Case(id=name, strategy="mine.py:sync", world=2, steps=steps)


def log(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_log_has_a_line_for_every_case_with_its_verdict_and_the_times(clock: Clock) -> None:
    stream = io.StringIO()
    cost = {"a": 1.0, "b": 3.0}
    with LiveProgress(Console(file=stream, width=20), cost=lambda case: cost[case.id]) as listener:
        clock.now += 5
        listener.preparing("importing torch")
        listener.planned([case("a"), case("b")])
        listener.progress(case("a"), "step 1 of 3, sync")
        clock.now += 10
        listener.finished(case("a"), "pass")
        clock.now += 29
        listener.finished(case("b"), "fail")
    assert log(stream) == [
        "progress: [0 of 2 cases judged, 5 s] starting the first case",
        "progress: [1 of 2 cases judged, 15 s, about 30 s left] a: pass",
        "progress: [2 of 2 cases judged, 44 s] b: fail",
    ]


def test_a_case_that_was_not_planned_is_no_sixth_of_five(clock: Clock) -> None:
    stream = io.StringIO()
    with LiveProgress(Console(file=stream)) as listener:
        listener.planned([case("a")])
        listener.finished(case("a"), "fail")
        listener.finished(case("a-simulated"), "fail")
    assert log(stream)[1:] == [
        "progress: [1 of 1 cases judged, 0 s] a: fail",
        "progress: [1 of 1 cases judged, 0 s] inspecting failures, a-simulated: fail",
    ]


def test_phases_are_lines_and_parts_are_counted(clock: Clock) -> None:
    stream = io.StringIO()
    live = LiveProgress(Console(file=stream))
    live.phase("[1/2] recording")
    clock.now += 10
    with live:
        live.phase("[2/2] replaying")
        live.counted(0, 4, "probe")
        clock.now += 20
        live.counted(1, 4, "probe")
        clock.now += 40
        live.counted(2, 4, "probe")
    assert log(stream) == [
        "progress: [0 s] [1/2] recording",
        "progress: [10 s] [2/2] replaying",
        "progress: [2 of 4, 70 s, about 60 s left] probe",
    ]


def test_a_log_of_a_long_case_has_a_line_every_half_minute(clock: Clock) -> None:
    stream = io.StringIO()
    with LiveProgress(Console(file=stream)) as listener:
        listener.planned([case("a")])
        for step in range(100):
            clock.now += 1
            listener.progress(case("a"), step_in_words(step, 100, "sync"))
    assert [line.partition("] ")[2] for line in log(stream)[1:]] == [
        f"a: step {step} of 100, sync" for step in (30, 60, 90)
    ]
    assert "cases judged, 90 s]" in log(stream)[-1]


def test_the_count_never_passes_the_number_of_cases() -> None:
    """A case that is run once more counts once, and one of a follow-up not at all."""
    stream = io.StringIO()
    with LiveProgress(Console(file=stream)) as listener:
        listener.planned([case("a"), case("b")], before=3)
        for name in ("a", "b", "a", "b-again"):
            listener.finished(case(name), "pass")
    counts = [line.partition("[")[2].partition(" cases")[0] for line in log(stream)]
    assert counts == ["3 of 5", "4 of 5", "5 of 5", "5 of 5", "5 of 5"]
    assert log(stream)[0].endswith("starting the first case; 3 were judged before a restart")


def test_no_count_before_it_is_known_of_how_many() -> None:
    stream = io.StringIO()
    with LiveProgress(Console(file=stream)) as listener:
        listener.finished(case("a"), "pass")
    assert log(stream) == ["progress: [0 s] a: pass"]


def test_a_terminal_has_one_line_whose_seconds_go_on_and_quiet_has_none(clock: Clock) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=60, force_terminal=True)
    with LiveProgress(console) as listener:
        listener.planned([case("a")])
        listener.progress(case("a"), "step 1 of 3, " + "long " * 20)
        before = console.render_str(listener.__rich__().plain).plain
        clock.now += 7
        assert before.startswith("[0 of 1 cases judged, 0 s] a: step 1 of 3")
        assert listener.__rich__().plain.startswith("[0 of 1 cases judged, 7 s] a: step 1 of 3")
        assert len(console.render_lines(listener)) == 1
    assert "progress: " not in stream.getvalue()
    quiet = io.StringIO()
    with LiveProgress(Console(file=quiet, quiet=True)) as listener:
        listener.planned([case("a")])
        listener.finished(case("a"), "pass")
    assert quiet.getvalue() == ""


@pytest.mark.parametrize(
    ("steps", "words"),
    [((2,), "step 3"), ((0, 1, 2), "steps 1 to 3"), ((0, 2), "steps 1, 3"), ((), "the whole run")],
)
def test_steps_in_words(steps: tuple[int, ...], words: str) -> None:
    assert steps_in_words(steps) == words


def test_no_step_is_beyond_the_last() -> None:
    assert step_in_words(2, 3, "update") == "step 3 of 3, update"
    assert step_in_words(3, 3, "close") == "all steps done, close"
