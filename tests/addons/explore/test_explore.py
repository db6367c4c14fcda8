"""`distcheck explore`: planted bugs are found and shrunk, right code is left alone."""

import json
import re
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from distcheck import verify
from distcheck.addons.explore import verify_case
from distcheck.addons.explore.report import ExploreResult, as_json, print_search
from distcheck.addons.explore.running import Runner
from distcheck.addons.explore.search import Search
from distcheck.addons.explore.space import cases
from distcheck.errors import UsageError, VerdictError
from distcheck.records import Case, Delay
from distcheck.records.generated_words import (
    EXPLORED_DTYPES,
    PREFIX,
    GeneratedModelSpec,
    parse_model_words,
)
from distcheck.worlds.pool import Pool
from tests import explored
from tests.world.command import Run
from tests.world.warm import distcheck

__all__ = ["distcheck"]
TAKE_NONE = ("mean_over_those_that_have_it", "none_counts_as_zero")
PLANTED = str(Path(__file__).parents[2] / "explored.py")


def search(
    pool: Pool, name: str, most: int, *, deadline_s: float = 10.0, **space: object
) -> Search:
    """Without what the strategy declines, as the command does; what is planted takes no None."""
    planted = hasattr(explored, name)
    strategy = f"{PLANTED}:{name}" if planted else name
    without = [*space.pop("without", ())]  # type: ignore[misc]
    without += ["absent"] if planted and name not in TAKE_NONE else []
    runner = Runner(pool)
    runner.look_at([msgspec.structs.replace(TWICE, strategy=strategy)])
    without += runner.left_out
    drawn = cases(strategy, deadline_s=deadline_s, without=without, **space)  # type: ignore[arg-type]
    return search_in(pool, drawn, most, runner)


def search_in(
    pool: Pool, space: SearchStrategy[Case], most: int, runner: Runner | None = None
) -> Search:
    runner = runner or Runner(pool)
    found = Search(
        runner=runner, space=space, seed=1, until=time.monotonic() + 450, most_cases=most
    )
    try:
        found.run()
    finally:
        runner.close()
    return found


def least(found: Search) -> tuple[Case, GeneratedModelSpec]:
    assert found.finding is not None, f"nothing found in {len(found.cases)} cases"
    case = found.finding.report.case
    return case, parse_model_words(case.workload.removeprefix(PREFIX))


TWICE = Case(
    id="twice", strategy="allreduce", world=2, batch=4, steps=1,
    workload="generated:scale;accumulate=2",
)  # fmt: skip
# (world, number of layers, their marks), of one step of one sample per rank in float32, unless
# the bug needs something else.
LEAST = {
    "only_at_three": (3, 1, set()), "only_at_five": (5, 1, set()),
    "strided_left_out": (2, 1, {"strided"}), "frozen_forgotten": (1, 2, {"frozen"}),
    "norms_left_out": (2, 1, set()), "children_alone": (2, 1, set()),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "only_at_three",
        *(pytest.param(name, marks=pytest.mark.sweep) for name in LEAST if name != "only_at_three"),
    ],
)
def test_a_planted_bug_is_shrunk_to_its_least_case(pool: Pool, name: str) -> None:
    world, layers, marks = LEAST[name]
    found = search(pool, name, 300)
    case, model = least(found)
    assert (case.world, case.steps, case.batch) == (world, 1, world)
    assert (case.dtype, case.delays) == ("float32", ())
    assert len(model.layers) == layers
    assert [layer.kind == "norm" for layer in model.layers] == [name == "norms_left_out"] * layers
    assert [layer.nested for layer in model.layers] == [int(name == "children_alone")] * layers
    assert {mark for layer in model.layers for mark in layer.marks} == marks
    assert found.finding is not None
    assert (found.finding.failed, found.finding.replays) == (3, 3)


@pytest.mark.parametrize(
    ("name", "least_case"),
    [
        pytest.param("FirstGroupAlone", (2, 1, 2, "groups"), marks=pytest.mark.sweep),
        pytest.param("RateOfTheFirstStep", (1, 2, 1, "schedule"), marks=pytest.mark.sweep),
        pytest.param("mean_over_those_that_have_it", (2, 1, 2, "absent"), marks=pytest.mark.sweep),
        pytest.param("weights_in_the_first_steps", (2, 4, 3, ""), marks=pytest.mark.sweep),
    ],
)
def test_what_only_one_dimension_shows_is_shrunk_to_it(
    pool: Pool, name: str, least_case: tuple[int, int, int, str]
) -> None:
    """World, steps, samples, and the only word that is not the simplest."""
    case, model = least(search(pool, name, 600))
    words = re.findall("groups|schedule|absent|nested|norm|accumulate", case.workload)
    assert (case.world, case.steps, case.batch, "".join(words)) == least_case
    assert (case.dtype, case.delays) == ("float32", ())
    assert len(model.layers) == (2 if least_case[3] in ("groups", "absent") else 1)


@pytest.mark.sweep
def test_none_on_some_ranks_counts_as_zero(pool: Pool) -> None:
    found = search(pool, "none_counts_as_zero", 300)
    assert found.finding is None
    assert (found.unknown, found.once) == ([], [])
    assert len([case for case in found.passed if "absent" in case.workload]) > 10


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["SyncedInTheFirstBackward", "SummedInEveryBackward"])
def test_two_backward_passes_are_what_a_sync_for_one_fails_on(pool: Pool, name: str) -> None:
    found = search(pool, name, 100)
    case, model = least(found)
    assert (case.world, case.steps, case.batch, model.accumulate) == (2, 1, 4, 2)
    assert (case.dtype, len(model.layers), case.delays) == ("float32", 1, ())
    assert found.finding is not None
    assert (found.finding.failed, found.finding.replays) == (3, 3)


@pytest.mark.sweep
def test_what_is_averaged_again_in_every_backward_is_right(pool: Pool) -> None:
    found = search(pool, "MeansInEveryBackward", 300)
    assert found.finding is None
    assert (found.unknown, found.once) == ([], [])
    assert len(found.passed) + len(found.insensitive) == 300
    several = [case.dtype for case in found.cases if "accumulate" in case.workload]
    assert set(several) == set(EXPLORED_DTYPES)


def test_who_cannot_accumulate_is_not_asked_to(pool: Pool) -> None:
    def runner(strategy: str) -> Runner:
        made = Runner(pool)
        made.look_at([msgspec.structs.replace(TWICE, strategy=strategy)])
        return made

    assert "runs backward itself" in runner("ddp_no_sync").left_out["accumulate"]
    assert "declines accumulation" in runner("ddp_static_graph").left_out["accumulate"]
    assert "accumulate" not in runner("allreduce").left_out
    assert runner("allreduce").why_left_out(TWICE) == ""
    earlier = msgspec.structs.replace(TWICE, strategy="ddp_static_graph")
    found = Search(runner=runner("ddp_static_graph"), space=cases("allreduce"), seed=0, until=0.0)
    found.again([earlier])
    assert found.cases == []


# Right, and to be wrapped once in a process, as whatever opens connections of its own is.
ONCE = """
import torch.distributed as dist

class Once:
    used = False

    def wrap(self, model):
        assert not Once.used, "a second time"
        Once.used = True
        return model

    def sync(self, model, step):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= step.world_size
"""


def test_single_use_code_gets_fresh_processes(pool: Pool, tmp_path: Path) -> None:
    """Also where the first case to fail is one that is run twice by itself."""
    (tmp_path / "once.py").write_text(ONCE)
    strategy = f"{tmp_path}/once.py:Once"
    about = {"id": "rerun", "strategy": strategy, "workload": "generated:scale", "rerun": True}
    case = msgspec.structs.replace(TWICE, **about)
    found = search_in(pool, st.just(case), 3)
    assert found.finding is None
    assert "twice in one process" in found.runner.distrusts_kept


@pytest.mark.sweep
def test_unequal_shards_are_what_a_mean_of_means_fails_on(pool: Pool) -> None:
    case, model = least(search(pool, "mean_of_means", 100))
    assert (case.world, case.steps, case.batch) == (2, 1, 3)
    assert len(model.layers) == 1


@pytest.mark.sweep
def test_a_hang_is_a_failure_that_shrinks_too(pool: Pool) -> None:
    found = search(pool, "hangs_at_odd_worlds", 60, deadline_s=1.0, without=["late"])
    case, model = least(found)
    assert (case.world, case.steps, len(model.layers)) == (3, 1, 1)
    assert found.finding is not None
    assert found.finding.report.ranks_failed


def test_a_late_rank_brings_out_a_race() -> None:
    """A crowded machine is late by itself, so that only who is late by far is sure to show."""
    asked = {"world": 2, "workload": "generated:scale", "dtype": "float32", "batch": 2, "steps": 3}
    delays = [(1, 0, 300)]  # in every step
    report = verify(f"{PLANTED}:patience_of_20_ms", delays=delays, **asked)
    assert report.verdict == "fail"
    verify("allreduce", delays=delays, **asked).raise_for_verdict()


@pytest.mark.sweep
def test_a_race_is_found_by_making_ranks_late(pool: Pool) -> None:
    case, model = least(search(pool, "patience_of_20_ms", 150))
    assert case.world <= 3  # when two ranks suffice is a matter of luck
    assert len(model.layers) == 1
    late = msgspec.structs.replace(case, rerun=True, delays=(Delay(rank=1, ms=300),))
    assert verify_case(late).verdict == "fail"


@pytest.mark.sweep
def test_a_race_between_messages_is_shrunk_with_its_schedules(pool: Pool) -> None:
    without = ["unequal", "accumulate", "short-last-batch"]
    runner = Runner(pool)
    runner.distrusts_kept = "simulated worlds are not reused"
    strategy = f"{PLANTED}:first_come_first_added"
    runner.look_at([msgspec.structs.replace(TWICE, strategy=strategy)])
    space = cases(strategy, backend="simulated", without=[*without, "absent"], deadline_s=10.0)
    case, _ = least(search_in(pool, space, 60, runner))
    assert (case.world, case.steps, case.schedules) == (3, 1, 8)
    again = verify_case(case)
    assert [found.cause for found in again.cases[0].diagnosis] == ["message-race"]
    assert verify_case(msgspec.structs.replace(case, schedules=0)).verdict == "pass"


@pytest.mark.parametrize("most", [6, pytest.param(60, marks=pytest.mark.sweep)])
def test_nothing_is_found_in_right_code(pool: Pool, most: int) -> None:
    found = search(pool, "ddp", most)
    assert found.finding is None
    assert (found.unknown, found.once) == ([], [])
    assert len(found.passed) + len(found.insensitive) == most
    assert len(found.insensitive) <= most / 10, "the space is there to show mistakes"
    assert all(case.case.dtype == "bfloat16" for case in found.insensitive)


def test_a_case_that_could_not_show_a_mistake_is_not_counted_as_passed(pool: Pool) -> None:
    """What a rank leaves out of the sum of a frozen model's table is less than bfloat16 rounds."""
    workload = "generated:conv3.frozen-table70001-linear5.frozen;accumulate=2"
    wide = Case(id="wide", strategy="ddp", world=4, batch=10, steps=2, dtype="bfloat16",
                layers=("bitwise", "rounding"), workload=workload, rerun=False,
                separate=False)  # fmt: skip
    found = search_in(pool, st.just(wide), 1)
    assert (found.passed, found.unknown, found.finding) == ([], [], None)
    assert [report.case.id for report in found.insensitive] == ["wide"]
    story = ExploreResult(strategy="ddp", seed=0, spent_s=1.0, search=found, earlier=0,
                  unreadable=(), interrupted=False, kept_as=None)  # fmt: skip
    assert story.exit_code == 5, "nothing was shown to be right"
    assert json.loads(as_json(story))["insensitive"][0]["id"] == "wide"


def test_a_budget_below_one_case(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    found = Search(Runner(pool), st.nothing(), seed=0, until=0.0)
    story = ExploreResult(strategy="ddp", seed=0, spent_s=1.2, search=found, earlier=0,
                  unreadable=(), interrupted=False, kept_as=None)  # fmt: skip
    said = "no case was run, because the budget ended after 1 s; pass a longer one"
    print_search(story, quiet=False)
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    sorted(set(re.findall(r"^(?:def|class) ([a-zA-Z]\w+)", Path(PLANTED).read_text(), re.MULTILINE))
           - {"right", "trained", "mean", "none_counts_as_zero", "MeansInEveryBackward"}),
)  # fmt: skip
def test_what_simple_workloads_miss_is_found(pool: Pool, name: str) -> None:
    if name not in ("first_come_first_added", "in_order_of_arrival", "patience_of_20_ms"):
        # Of these, which are races, verify sees some: in its rerun ranks are late.
        verify(f"{PLANTED}:{name}", workload=("exact", "cnn")).raise_for_verdict()
    case, model = least(search(pool, name, 600))
    most = {"only_at_five": 5, "in_order_of_arrival": 4}  # the latter needs luck as well
    assert case.world <= most.get(name, 3)
    assert len(model.layers) <= 2


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        "gather_scatter", "parameter_server", "reduce_broadcast", "ring", "zero1", "fsdp",
        "ddp_small_buckets", "ddp_bucket_view", "ddp_static_graph", "ddp_find_unused",
        "ddp_no_sync", "ddp_allreduce_hook", "ddp_fp16_hook", "ddp_bf16_hook",
    ],
)  # fmt: skip
def test_nothing_is_found_in_the_strategies_that_come_along(distcheck: Run, name: str) -> None:
    ran = distcheck("explore", "--strategy", name, "--max-cases", "300")
    assert ran.returncode == 0, ran.stdout


def test_what_was_found_is_kept_replayed_and_printed(
    tmp_path: Path, distcheck: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found, kept, run first the next time, replayed, and run as the Python that is printed."""
    strategy = ("--strategy", "bad.py:no_sync")
    ran = distcheck("explore", *strategy, "--max-cases", "30", "--json", "found.json")
    assert not (tmp_path / ".hypothesis").exists()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["schema"] == "distcheck.explore/1"
    assert document["finding"]["report"]["case"]["world"] == 2
    (line,) = re.findall(r"^  replay  distcheck (replay .*)$", ran.stdout, re.MULTILINE)
    assert distcheck(*line.split()).returncode == 1
    program = ran.stdout[ran.stdout.index("import distcheck") :]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VerdictError):
        exec(program, {"__name__": "__main__"})
    again = distcheck("explore", *strategy, "--json", "-")
    assert (again.returncode, json.loads(again.stdout)["cases"]) == (1, 1)


def test_a_case_runs_by_itself_in_peoples_own_tests() -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    seen = []

    @seed(0)
    @settings(
        max_examples=2, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases("allreduce", most_world=2))
    def property_holds(case: Case) -> None:
        seen.append(case)
        verify_case(case).raise_for_verdict()

    property_holds()
    assert len(seen) == 2


def test_a_case_that_cannot_be_asked_for_is_rejected_in_peoples_own_tests() -> None:
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Unsatisfiable

    declined = msgspec.structs.replace(TWICE, strategy="ddp_no_sync", rerun=False)
    with pytest.raises(UsageError, match="it runs backward itself"):
        verify_case(declined)

    @settings(max_examples=1, deadline=None, database=None, phases=[Phase.generate])
    @given(st.just(declined))
    def property_holds(case: Case) -> None:
        verify_case(case)

    with pytest.raises(Unsatisfiable):
        property_holds()
