"""How the shipped examples end, and what pytest prints of them."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from distcheck.records import Collective, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.testing import failures, front, waiting
from distcheck.testing.failures import WorldEnd
from distcheck.testing.messages import RankReport
from distcheck.worlds import root_cause
from distcheck.worlds.local.children import Child
from tests.once import once
from tests.stored import compare

EXAMPLES = Path(__file__).parent / "examples" / "test_examples.py"
PATIENCE = EXAMPLES.with_name("conftest.py")

ENDS = {
    "passed": [
        "test_sum", "test_view",
        "test_sizes[world2-0]", "test_sizes[world2-1]", "test_sizes[world3-0]",
        "test_sizes[world3-1]", "test_raises", "test_captures", "test_captures_descriptors",
        "test_warns", "test_leaks", "test_a_process_left_behind", "test_isolated_writes",
        "test_isolated_reads", "test_seeded", "test_seeded_otherwise", "TestMethods::test_method",
    ],
    "skipped": ["test_all_skip"],
    "xfailed": ["test_xfail_by_type", "test_xfail_inside"],
    "failed": [
        "test_one_rank_fails", "test_all_fail_alike", "test_each_fails_its_own_way",
        "test_output_is_folded",
        "test_deadlock", "test_segfault", "test_segfault_after_the_last_collective",
        "test_killed", "test_aborts", "test_leaves_with_success", "test_sys_exit",
        "test_pytest_fail", "test_one_skips", "test_xfail_of_another_type",
        "test_hypothesis_shrinks",
        "test_hypothesis_data", "test_coroutine", "test_one_skips_and_is_waited_for",
        "test_exception_without_text", "test_no_utf8", "test_debugger",
    ],
    "error": ["test_without_marker", "test_world_unseen"],
}  # fmt: skip


LEFT_S = f"7772.{os.getpid()}"  # on this machine the sleep of this process's examples alone


@pytest.fixture(params=[pytest.param("alone", marks=pytest.mark.sweep), "xdist"])
def session(
    request: pytest.FixtureRequest, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> pytest.RunResult:  # fmt: skip
    """All examples in one session, once without and once under xdist, in one worker."""

    def run() -> tuple[int, list[str], list[str], float]:
        for file in (EXAMPLES, PATIENCE):
            shutil.copy(file, pytester.path)
        teardowns = pytester.path / "teardowns"
        for name, value in (("TEARDOWNS", teardowns), ("LEFT_S", LEFT_S), ("COLUMNS", 120)):
            monkeypatch.setenv(name, str(value))
        options = ["-n", "1"] if request.param == "xdist" else []
        ran = pytester.runpytest_subprocess(
            "-rA", "-p", "no:cacheprovider", "--tb=short", *options, timeout=300
        )
        assert len(teardowns.read_text()) == 4, "every rank tears its own fixtures down"
        assert not alive(), "nothing survives"
        return int(ran.ret), ran.outlines, ran.errlines, ran.duration

    return pytest.RunResult(*once(tmp_path_factory, f"examples-{request.param}", run))


def alive() -> list[psutil.Process]:
    """Processes of the examples that slept when they were to end."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if LEFT_S in (process.info["cmdline"] or ())]


@pytest.fixture
def ran(session: pytest.RunResult) -> str:
    """What pytest printed."""
    return session.stdout.str()


def section(ran: str, name: str) -> str:
    """What pytest printed of one failure."""
    found = re.search(rf"^_+ {re.escape(name)} _+$(.*?)^(?:_+ \S+.* _+|=+ .* =+)$",
                      ran, re.M | re.S)  # fmt: skip
    assert found is not None, name
    return found[1]


def test_every_example_ends_as_it_should(session: pytest.RunResult, ran: str) -> None:
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    counts = {end: len(tests) for end, tests in ENDS.items()}
    session.assert_outcomes(**{"errors" if e == "error" else e: n for e, n in counts.items()})
    lines = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) \S*?::(\S+)", ran, re.M)
    names = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "XFAIL": "xfailed"}
    found: dict[str, list[str]] = {"skipped": ["test_all_skip"]}
    for word, name in lines:
        found.setdefault(names[word], []).append(name)
    assert {end: sorted(tests) for end, tests in found.items()} == {
        end: sorted(tests) for end, tests in ENDS.items()
    }


def test_what_passes_or_skips_is_told_in_a_line(session: pytest.RunResult) -> None:
    lines = session.outlines
    assert [line for line in lines if "test_sum" in line] == ["PASSED test_examples.py::test_sum"]
    assert not [line for line in lines if "test_all_skip" in line]
    decorator = EXAMPLES.read_text().splitlines().index("def test_all_skip(world):")
    session.stdout.fnmatch_lines([f"SKIPPED [[]1[]] test_examples.py:{decorator}: not here"])


def normalized(text: str, name: str) -> str:
    """Without what differs from run to run: the folder, addresses, the width of rules, and which
    of the ranks that failed alike was first. Lines of the examples are counted from the test's
    `def`.
    """
    source = EXAMPLES.read_text().splitlines()
    start = next(n for n, line in enumerate(source, 1) if f"def {name}(" in line)

    def counted(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) - start:+d}"

    text = re.sub(r"[^\s\"]*/(?=test_examples\.py)", "", text.strip("\n"))
    text = re.sub(r"(test_examples\.py:|test_examples\.py\", line )(\d+)", counted, text)
    text = re.sub(r"(0x)[0-9a-f]+( \[.*?\](?= \(most))?", r"\1...", text)  # 3.14 names threads
    text = re.sub(r"^-+ (.*?) -+$", r"--- \1 ---", text, flags=re.M)
    text = re.sub(r"^\[gw\d\] .*\n", "", text, flags=re.M)
    text = re.sub(r"\b[012](, 1\] == \[9| != 9)", r"RANK\1", text)
    return text.replace("Falsifying example", "Failing test case")  # in hypothesis' older words


@pytest.mark.parametrize(
    "name",
    [
        "test_one_rank_fails", "test_all_fail_alike", "test_each_fails_its_own_way",
        "test_output_is_folded", "test_deadlock", "test_one_skips_and_is_waited_for",
        "test_segfault", "test_killed", "test_one_skips", "test_hypothesis_shrinks",
    ],
)  # fmt: skip
def test_a_failure_to_the_letter(ran: str, name: str) -> None:
    """Like one of pytest, and of all ranks: causes first, each once, with whom they concern."""
    stored = name.removeprefix("test_").replace("_", "-")
    compare(f"pytest/{stored}.txt", normalized(section(ran, name), name))


def test_the_cause_is_in_the_summary(session: pytest.RunResult) -> None:
    session.stdout.fnmatch_lines_random(
        [
            "FAILED *::test_one_rank_fails - rank 2 of 4: AssertionError: assert {'rank': 2, *",
            "FAILED *::test_segfault - rank 1 of 3: killed (killed by SIGSEGV)",
            "FAILED *::test_hypothesis_shrinks - all 2 ranks: assert 100 < 100",
        ]
    )


@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("test_deadlock", ["rank 0 of 3 hung:", "time.sleep(1000)", "last collective: barrier"]),
        (
            "test_one_skips_and_is_waited_for",
            ["rank 0 of 2 hung:", "last collective: barrier", "rank 1 of 2 had skipped (not here)"],
        ),
        ("test_exception_without_text", ["in test_exception_without_text", "NoText: <"]),
        ("test_no_utf8", ["in test_no_utf8", "E     + \\udcff"]),
        ("test_debugger", ["in test_debugger", "a rank has no terminal for a debugger"]),
        ("test_segfault", ["rank 1 of 3 was killed by SIGSEGV:", "in test_segfault"]),
        ("test_segfault_after_the_last_collective", ["rank 1 of 2 was killed by SIGSEGV:"]),
        (
            "test_killed",
            ["rank 1 of 2 was killed by SIGKILL, sent by", "out-of-memory", "\nrank 0 of 2 ",
             " (last collective: barrier, number 2"],
        ),
        (
            "test_aborts",
            ["rank 1 of 2 was killed by SIGABRT:", "in test_aborts", "\nrank 0 of 2 ",
             " (last collective: all_reduce of [5], number 1"],
        ),
        (
            "test_leaves_with_success",
            ["rank 1 of 2 exited with code 0 without an error message:\nlast collective: "
             "all_reduce of [3], number 1 at /", "in test_leaves_with_success", "os._exit(0)",
             "rank 0 of 2 had finished"],
        ),
        ("test_sys_exit", ["SystemExit"]),
        ("test_pytest_fail", ["by request"]),
        ("test_one_skips", ["rank 1 of 2 skipped (not here)", "skip on every rank or on none"]),
        ("test_xfail_of_another_type", ["ValueError: unknown"]),
        ("test_hypothesis_shrinks", ["assert 100 < 100", "n=100"]),
        ("test_hypothesis_data", ["st.data() draws while the test runs"]),
        ("test_coroutine", ["is a coroutine function"]),
        ("ERROR at setup of test_without_marker", ["mark the test with @pytest.mark.world(4)"]),
        (
            "ERROR at setup of test_world_unseen",
            ["a fixture has to take `world` as an argument", "with request.getfixturevalue()"],
        ),
    ],
)  # fmt: skip
def test_what_is_said(ran: str, name: str, phrases: list[str]) -> None:
    text = section(ran, name)
    for phrase in phrases:
        assert phrase in text
    assert "_pytest/" not in text
    assert "entries are hidden" not in text


def test_ranks_that_hung_and_ranks_that_had_ended(pytestconfig: pytest.Config) -> None:
    passed, skipped = RankReport(end="passed"), RankReport(end="skipped", reason="not here")
    ended = WorldEnd(
        size=5,
        outcomes=[Outcome(rank=0, outcome="hung"), Outcome(rank=2, outcome="hung")]
        + [Outcome(rank=rank, outcome="finished") for rank in (1, 3, 4)],
        reports={1: passed, 3: skipped, 4: passed},
        outputs={},
    )
    assert str(failures.longrepr_of(ended, pytestconfig)).splitlines() == [
        "ranks 0, 2 of 5 hung",
        "ranks 1, 4 of 5 had finished",
        "rank 3 of 5 had skipped (not here)",
    ]


def test_what_ranks_were_in_when_they_lost_a_peer(pytestconfig: pytest.Config) -> None:
    test: Any = {"step": 0, "phase": "test"}
    lost: Any = {**test, "outcome": RankEnd.RAISED, "lost_peer": True, "text": "long"}
    at = " at mine.py:3 (last collective: barrier, number 2)"
    ended = WorldEnd(
        size=5,
        outcomes=[Outcome(rank=1, outcome=RankEnd.KILLED, ended_by="killed by SIGKILL", **test)]
        + [Outcome(rank=rank, lost_at=at, **lost) for rank in (2, 0)]
        + [Outcome(rank=3, **lost)]
        + [Outcome(rank=4, outcome="finished")],
        reports={4: RankReport(end="passed")},
        outputs={},
    )
    assert str(failures.longrepr_of(ended, pytestconfig)).splitlines() == [
        "rank 1 of 5 was killed by SIGKILL",
        "ranks 0, 2 of 5 lost a peer at mine.py:3 (last collective: barrier, number 2): "
        "secondary failure",
        "rank 3 of 5 lost a peer: secondary failure",
        "rank 4 of 5 had finished",
    ]


def test_ranks_that_were_ended_with_one_that_was_killed(pytestconfig: pytest.Config) -> None:
    """And one that lost a peer: what became of each is told once."""
    test: Any = {"step": 0, "phase": "test"}
    there = Collective(number=1, name="barrier", shapes="")
    ended = WorldEnd(
        size=4,
        outcomes=[
            Outcome(rank=3, outcome=RankEnd.KILLED, ended_by="killed by SIGKILL", **test),
            Outcome(rank=1, outcome=RankEnd.RAISED, lost_peer=True, text="E", **test),
            Outcome(rank=0, outcome=RankEnd.ENDED, call=there, text="  File ...", **test),
            Outcome(rank=2, outcome=RankEnd.ENDED, text="  File ...", **test),
        ],
        reports={},
        outputs={},
    )
    assert str(failures.longrepr_of(ended, pytestconfig)).splitlines() == [
        "rank 3 of 4 was killed by SIGKILL",
        "rank 1 of 4 lost a peer: secondary failure",
        "rank 0 of 4 was terminated with them (last collective: barrier, number 1)",
        "rank 2 of 4 was terminated with them",
    ]


def test_a_rank_that_passed_after_it_was_asked_has_hung() -> None:
    """Being asked ends a sleep; a kept rank that had told its end before only waits."""
    outcomes = [Outcome(rank=rank, outcome="hung", text="there") for rank in range(3)]
    reports = {0: RankReport(end="passed"), 1: RankReport(end="passed")}
    heard = waiting.RankMessages(reports=reports, in_time={0})
    ends = {o.rank: o.outcome for o in waiting._outcomes_of_test(outcomes, heard)}
    assert ends == {0: "finished", 1: "hung", 2: "hung"}


@pytest.mark.parametrize(("size", "words"), [(1, "rank 0 of 1 was"), (2, "all 2 ranks were")])
def test_killed_in_the_plural(pytestconfig: pytest.Config, size: int, words: str) -> None:
    killed = [Outcome(rank=rank, outcome="killed") for rank in range(size)]
    ended = WorldEnd(size=size, outcomes=killed, reports={}, outputs={})
    assert str(failures.longrepr_of(ended, pytestconfig)) == f"{words} killed"


def test_how_much_of_a_long_output_is_left_out() -> None:
    child = Child()
    for number in range(1000):
        child.take_output(b"%99d\n" % number)
    assert child.output_left_out + len(child.output) == 100_000
    world: Any = SimpleNamespace(children=[child])
    first, second, *_ = waiting.outputs_of(world)[0].splitlines()
    assert first == f"(the first {child.output_left_out} bytes are left out)"
    assert int(second) == child.output_left_out / 100
    child.take_output(b"9" * 80_000 + b"\nshort")
    detail = root_cause.rank_outcomes([child], hung=False)[0].detail
    assert "its output:\nshort" in detail, "the first line may begin within a secret"
    child.forget_output()
    for number in range(1000):
        child.take_output(b"%99d\n" % number)
    assert "its output (last 20 lines):" in root_cause.rank_outcomes([child], hung=False)[0].detail
    child.forget_output()
    child.take_output(b"of the next test")
    assert waiting.outputs_of(world)[0] == "of the next test"


def test_warnings_are_pytests_own(ran: str) -> None:
    text = ran
    assert text.count("UserWarning: on every rank") == 1
    assert re.search(r"LeakWarning: .*test_leaks left on rank 0, 1: 1 process group", text)


def test_fewer_reports_than_ranks_are_no_pass() -> None:
    """Every rank finished, and one of them has said nothing."""
    reports = {0: RankReport(end="passed")}
    finished = [Outcome(rank=rank, outcome="finished") for rank in range(2)]
    ended = WorldEnd(size=2, outcomes=finished, reports=reports, outputs={})
    with pytest.raises(AssertionError, match="1 of 2 ranks reported"):
        front._decide(SimpleNamespace(config=None), ended)  # type: ignore[arg-type]
    reports[1] = RankReport(end="passed")
    front._decide(SimpleNamespace(config=None), ended)  # type: ignore[arg-type]
