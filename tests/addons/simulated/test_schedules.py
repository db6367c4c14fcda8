"""Schedules of a simulated world: their text, their choices, the search, and what it is judged."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from distcheck.addons.simulated import judged_schedules as judging
from distcheck.addons.simulated.scheduler import Scheduler
from distcheck.addons.simulated.schedules import SchedulePolicy, ScheduleTree
from distcheck.addons.simulated.search import ScheduleForks, ScheduleRunner, search
from distcheck.errors import UsageError
from distcheck.plan.cases import plan_cases
from distcheck.plan.settings import Request
from distcheck.records.schedules import (
    PostedTurn,
    Schedule,
    ScheduleChoice,
    ScheduleRun,
    ScheduleSearchResult,
    SearchCoverage,
    parse_schedule,
)  # fmt: skip


@pytest.mark.parametrize("text", ["17", "3:1,7:0", "buffered", "buffered,3:1", ""])
def test_a_schedule_is_its_text(text: str) -> None:
    assert str(parse_schedule(text)) == text


@pytest.mark.parametrize("text", ["0", "x", "3:", "3:1,", "1:2:3", "9" * 14, "-1", "²", "buffer"])
def test_a_wrong_schedule_is_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="--schedule "):
        parse_schedule(text)


def test_schedules_need_the_simulated_backend_and_come_first() -> None:
    with pytest.raises(UsageError, match=r"--schedules needs .* add --backend simulated"):
        plan_cases(Request(strategies=("allreduce",), schedules=3))
    with pytest.raises(UsageError, match="out of range"):
        plan_cases(Request(strategies=("allreduce",), schedules=-1, backend="simulated"))
    first, *rest = plan_cases(
        Request(strategies=("allreduce",), schedules=3, schedule="4:1", backend="simulated")
    )
    assert (first.workload, first.schedules, first.rerun) == ("mlp:small", 3, False)
    assert {case.schedules for case in rest} == {0}
    assert {case.schedule for case in rest} == {"4:1"}
    assert first.command_line.endswith("--schedules 3 --schedule 4:1")


def order_under(text: str, turns: int = 6, *, asks: int | None = None) -> list[int]:
    """Who ran: three ranks that offer their turn after each of their calls."""
    chooser, seen = SchedulePolicy(parse_schedule(text), 3), []

    def stop(*_: object) -> None:
        raise AssertionError

    scheduler = Scheduler(
        3, switch=lambda before, after: None, stuck=stop, overslept=stop, most_sleep_s=1.0,
        choose=chooser.choose,
    )  # fmt: skip
    over: set[int] = set()

    def live(rank: int) -> None:
        if rank == asks:
            while len(over) < 2:
                scheduler.give_way()
        for _ in range(turns):
            seen.append(rank)
            scheduler.offer()
        over.add(rank)

    scheduler.run(live)
    return seen


def test_the_same_text_gives_the_same_turns_and_seeds_differ() -> None:
    orders = {str(seed): order_under(str(seed)) for seed in range(1, 13)}
    assert all(order_under(text) == order for text, order in orders.items())
    assert len({tuple(order) for order in orders.values()}) > 6
    assert all(sorted(order) == [0] * 6 + [1] * 6 + [2] * 6 for order in orders.values())
    assert order_under("") == [0] * 6 + [1] * 6 + [2] * 6
    assert order_under("3:2")[:3] == [0, 0, 2]
    assert order_under("1:2")[0] == 2  # also the rank that begins is chosen


@pytest.mark.parametrize("seed", range(1, 19))
def test_a_rank_that_asks_again_and_again_lets_the_others_run(seed: int) -> None:
    assert order_under(str(seed), asks=0)[-6:] == [0] * 6


def ran(schedule: Schedule, *, end: str = "finished", bits: bytes = b"a") -> ScheduleRun:
    preemptions = schedule.preemptions
    if schedule.seed:
        preemptions = tuple((choice, 1) for choice in range(1, 9))
    turns = (PostedTurn(0, "send", " at f.py:3"), PostedTurn(1, "recv", switched=bool(preemptions)))
    return ScheduleRun(str(schedule), end, "what", (bits, bits), preemptions, turns)


def all_of(one: Callable[[Schedule], ScheduleRun]) -> ScheduleRunner:
    def run_all(
        schedules: Sequence[Schedule], *, usual: ScheduleRun | None = None
    ) -> list[ScheduleRun]:
        return [one(schedule) for schedule in schedules]

    return run_all


def judged(found: object, **more: object) -> tuple[str, str, list[str]]:
    result, causes = judging.check_schedules(
        found, ranks=2, digests=lambda bits: [bits.decode()], replay="distcheck verify"
    )
    return (
        result.verdict, result.reason, [f"{c.cause}: {c.evidence} {c.suggestion}" for c in causes],
    )  # fmt: skip


def test_schedules_that_all_come_to_the_same_pass_and_say_how_many() -> None:
    verdict, reason, causes = judged(search(all_of(ran), 30))
    assert (verdict, causes) == ("pass", [])
    assert reason.startswith("30 schedules (round-robin, random, PCT")


def test_a_failing_schedule_is_shrunk_to_its_one_switch_and_replayed() -> None:
    found = search(all_of(lambda s: ran(s, bits=b"b" if needs(s) else b"a")), 30)
    assert found.other is not None
    assert found.other.preemptions == ((5, 1),)
    verdict, reason, (cause,) = judged(found)
    assert verdict == "fail"
    assert (
        "with 1 preemption, the same inputs yield different bits, first after step 0 on ranks 0, 1"
        in reason
    )
    assert cause.startswith("depends-on-schedule: with 1 preemption")
    assert "rank 0: send at f.py:3" in cause
    assert "rank 1: recv  (switched to this rank)" in cause
    assert cause.endswith("distcheck verify --schedule 5:1")


def needs(schedule: Schedule) -> bool:
    return schedule.seed % 3 == 1 or (5, 1) in schedule.preemptions


def test_a_schedule_that_deadlocks_is_named() -> None:
    found = search(all_of(lambda s: ran(s, end="deadlock" if needs(s) else "finished")), 5)
    verdict, reason, _ = judged(found)
    assert (verdict, "end in a deadlock: what" in reason) == ("fail", True)


def test_a_clock_accuses_no_schedule() -> None:
    found = search(all_of(lambda s: ran(s, end="hung" if s.seed else "finished")), 5)
    verdict, reason, causes = judged(found)
    assert (verdict, causes) == ("unknown", [])
    assert "5 of 5 schedules did not end in time (first 1)" in reason


def test_two_runs_of_one_schedule_that_differ_are_not_the_schedules_doing() -> None:
    bits = iter((b"a", b"b"))
    verdict, _, (cause,) = judged(search(all_of(lambda s: ran(s, bits=next(bits))), 5))
    assert verdict == "fail"
    assert cause.startswith("nondeterministic: two runs under the same schedule")


def test_a_deadlock_that_buffers_hide_is_named_and_another_is_not() -> None:
    found = search(all_of(lambda s: ran(s, end="finished" if s.buffered else "deadlock")), 5)
    verdict, _, (cause,) = judged(found)
    assert verdict == "unknown"
    assert cause.startswith("needs-buffering: what; if sends complete")
    assert judged(search(all_of(lambda s: ran(s, end="deadlock")), 5))[2] == []


class Shared(ScheduleForks):
    """Processes whose worlds find what the ones before them in the same process have left, and
    what `one` makes of a schedule and of that.
    """

    def __init__(self, one: Callable[[Schedule, int], ScheduleRun]) -> None:
        self._together, self._warm, self._one = True, True, one
        self.worlds: list[int] = []  # of each process

    def _run_in_forks(self, parts: Sequence[Sequence[Schedule]]) -> list[list[ScheduleRun]]:
        self.worlds += map(len, parts)
        return [[self._one(one, before) for before, one in enumerate(part)] for part in parts]


SEEDS = [parse_schedule(str(seed)) for seed in range(1, 9)]


def test_schedules_share_processes_which_end_with_the_usual_one() -> None:
    forks = Shared(lambda s, before: ran(s))
    found = forks.run_all(SEEDS, usual=ran(Schedule()))
    assert [one.schedule for one in found] == [str(one) for one in SEEDS]
    assert sum(forks.worlds) == len(SEEDS) + len(forks.worlds)
    assert len(forks.worlds) < len(SEEDS)


def test_a_world_that_finds_what_another_has_left_is_run_by_itself() -> None:
    forks = Shared(lambda s, before: ran(s, bits=b"b" if before else b"a"))
    for _ in range(2):
        found = forks.run_all(SEEDS, usual=ran(Schedule()))
        assert [one.results[0] for one in found] == [b"a"] * len(SEEDS)
    assert forks.worlds[-len(SEEDS) :] == [1] * len(SEEDS)  # the second time at once


def test_what_differs_in_a_shared_process_is_found_only_if_it_differs_alone() -> None:
    forks = Shared(lambda s, before: ran(s, bits=b"b" if s.seed == 5 else b"a"))
    found = forks.run_all(SEEDS, usual=ran(Schedule()))
    assert [one.schedule for one in found] == ["1", "2", "3", "4", "5"]
    assert found[-1].results == (b"b", b"b")
    forks = Shared(lambda s, before: ran(s, bits=b"b" if s.seed and before == 1 else b"a"))
    found = forks.run_all(SEEDS, usual=ran(Schedule()))
    assert [one.results[0] for one in found] == [b"a"] * len(SEEDS)


def interleaved(
    turns: Sequence[int], most: int, limit: int, **more: object
) -> tuple[ScheduleTree, list]:
    """Every schedule of ranks that take so many turns each, and the orders that they ran in."""

    def run_one(schedule: Schedule) -> tuple[ScheduleRun, tuple[int, ...]]:
        chooser = SchedulePolicy(schedule, len(turns), keeps=4096)
        order: list[int] = []
        scheduler = Scheduler(
            len(turns), switch=lambda *_: None, stuck=stop, overslept=stop, most_sleep_s=1.0,
            choose=chooser.choose,
        )  # fmt: skip

        def live(rank: int) -> None:
            for _ in range(turns[rank]):
                order.append(rank)
                scheduler.offer()

        scheduler.run(live)
        assert tuple(chooser.preemptions) == schedule.preemptions
        run = ScheduleRun(
            str(schedule), "finished", choices=tuple(chooser.choices),
            preemptions=tuple(chooser.preemptions),
            turns=(PostedTurn(0, str(more.get("call", "barrier"))),), cut=bool(more.get("cut")),
        )  # fmt: skip
        return run, tuple(order)

    usual, first = run_one(Schedule())
    tree, orders = ScheduleTree(usual, most), [first]
    for batch in tree.rounds(limit):
        runs = [run_one(schedule) for schedule in batch]
        orders += [order for _, order in runs]
        tree.enter([run for run, _ in runs])
    return tree, orders


def stop(*_: object) -> None:
    raise AssertionError


@pytest.mark.parametrize(("turns", "orders"), [((2, 2), 6), ((1, 2, 2), 30)])
def test_without_a_bound_every_order_is_run(turns: tuple[int, ...], orders: int) -> None:
    tree, ran = interleaved(turns, most=10, limit=10_000)
    assert len(set(ran)) == orders  # the multinomial coefficient
    assert tree.covered.all


def test_each_schedule_with_few_switches_is_run_once() -> None:
    tree, ran = interleaved((2, 2), most=1, limit=100)
    assert len(ran) == 1 + 3  # rank 1 begins, or goes on after either of rank 0's calls
    assert (tree.covered.preemptions, tree.covered.all) == (1, False)
    buffered, ran = interleaved((2, 2), most=1, limit=100, call="send(to rank 1)")
    assert len(ran) == 8
    assert buffered.covered.buffered


@pytest.mark.parametrize(
    ("limit", "more", "covered"),
    [
        (2, {}, (0, 2)),
        (8, {}, (0, 8)),
        (9, {}, (1, 0)),
        (10, {}, (1, 1)),
        (100, {"cut": True}, (0, 9)),
        (0, {"call": "send"}, (-1, 0)),
    ],
)
def test_what_was_not_run_is_never_claimed(
    limit: int, more: dict[str, object], covered: tuple[int, int]
) -> None:
    tree, ran = interleaved((2, 2, 2), most=3, limit=limit, **more)
    assert len(ran) <= 1 + limit
    assert (tree.covered.preemptions, tree.covered.further) == covered, len(ran)
    assert not tree.covered.all


@pytest.mark.parametrize(
    ("covered", "said"),
    [
        (SearchCoverage(most=2, preemptions=2),
         "all 7 schedules with at most 2 preemptions were bit-identical"),
        (SearchCoverage(most=1, preemptions=1, buffered=True),
         "all 7 schedules with at most 1 preemption (each also with buffered sends) were"),
        (SearchCoverage(most=9, preemptions=4, all=True),
         "all 7 possible schedules were bit-identical"),
        (SearchCoverage(most=2, preemptions=1, further=3),
         "7 schedules, which are all with at most 1 preemption and 3 of those with 2"),
        (SearchCoverage(most=2, preemptions=0, further=7),
         "7 schedules with at most 1 preemption, not all of"),
        (SearchCoverage(most=2, preemptions=-1),
         "7 schedules with at most 1 preemption, not all of them"),
    ],
)  # fmt: skip
def test_a_pass_says_which_schedules_were_run(covered: SearchCoverage, said: str) -> None:
    usual = ran(Schedule())
    verdict, reason, causes = judged(ScheduleSearchResult(usual, usual, 7, 2, covered=covered))
    assert (verdict, causes) == ("pass", [])
    assert reason.startswith(said)


def test_a_failure_among_enumerated_schedules_is_the_one_with_the_fewest_switches() -> None:
    choices = tuple(ScheduleChoice(0, (1,)) for _ in range(6))

    def one(schedule: Schedule) -> ScheduleRun:
        bits = b"b" if (5, 1) in schedule.preemptions else b"a"
        made = msgspec.structs.replace(schedule)
        run = ScheduleRun(
            str(made), "finished", "", (bits, bits), made.preemptions, (PostedTurn(0, "x"),)
        )
        return msgspec.structs.replace(run, choices=choices)

    found = search(all_of(one), 100, 2)
    assert found.other is not None
    assert (found.drawn, found.other.schedule) == ("5:1", "5:1")
    _, _, (cause,) = judged(found)
    assert "found by schedule 5:1, shrunk in 1 runs" in cause


def test_switches_take_a_limit_of_their_own() -> None:
    first, *_ = plan_cases(
        Request(strategies=("allreduce",), preemptions=2, backend="simulated", worlds=(2,))
    )
    assert (first.schedules, first.preemptions) == (1000, 2)
    assert first.command_line.endswith("--schedules 1000 --preemptions 2")
    for more, said in (
        ({"preemptions": 2}, "needs ranks that"),
        ({"preemptions": 99}, "out of range"),
    ):
        with pytest.raises(UsageError, match=f"--preemptions .*{said}"):
            plan_cases(Request(strategies=("allreduce",), **more))


@pytest.mark.parametrize("differs_from", [2, 3])
def test_what_differs_only_at_times_accuses_no_schedule(differs_from: int) -> None:
    """The usual schedule is run again where another one differs, and so is that one."""
    runs = {"": 0, "other": 0}

    def one(schedule: Schedule) -> ScheduleRun:
        name = "other" if schedule.seed or schedule.preemptions else ""
        runs[name] += 1
        late = name == "" and runs[name] > 2 and differs_from == 2
        never_twice = name == "other" and runs[name] % 2 and differs_from == 3
        return ran(schedule, bits=b"b" if late or never_twice or schedule.seed == 1 else b"a")

    verdict, reason, causes = judged(search(all_of(one), 30))
    assert verdict == "fail"
    assert [cause.partition(":")[0] for cause in causes] == ["nondeterministic"]
    assert "two runs under the s" in reason
