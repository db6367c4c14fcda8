"""What `--thorough` plans: cells, worlds, searches, and their cost."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner

from distcheck.addons.explore.thorough_search import _excluded_words, search_thoroughly
from distcheck.cli import root_command
from distcheck.cli.commands import verify as verify_module
from distcheck.cli.forecast import print_plan_estimate
from distcheck.errors import CannotRunError, DistcheckError, UsageError
from distcheck.plan.cases import plan_cases
from distcheck.plan.cells_to_run import ALWAYS
from distcheck.plan.matrix import Planned, plan_run
from distcheck.plan.settings import Request
from distcheck.plan.thorough import ThoroughSearch, thorough_extras, with_thorough_worlds
from distcheck.records import Report
from distcheck.records.run_facts import ExploredSearch
from distcheck.reports import github, html_report, junit
from distcheck.reports.json_report import decode_document
from distcheck.reports.wording import describe_search
from distcheck.verification.merging import MatrixPart, join
from distcheck.workloads.cells import CELLS
from distcheck.worlds.pool import Pool
from tests.unit.gate_documents import FAILED, PASSED, case_report, document_of


def request(**more: Any) -> Request:
    return Request(strategies=("allreduce",), thorough=True, **more)


def planned(*words: str, folder: Path, config: str = "") -> Planned:
    """What `verify` would plan for these words, with a matrix in `folder` if there is one."""
    if config:
        (folder / "pyproject.toml").write_text(config)
    context = verify_module.command.make_context("verify", [*words])
    asked = dict(context.params)
    for name in ("save", "verbose", "quiet", "config", "shard", "nnodes"):
        asked.pop(name, None)
    with context:
        given = frozenset(
            name
            for name in context.params
            if context.get_parameter_source(name).name == "COMMANDLINE"  # type: ignore[union-attr]
        )
    asked["worlds"] = asked["worlds"] or (4,)
    asked["ranks_here"] = None
    known = {*Request.__struct_fields__, "form", "arguments", "variables", "finish", "reset",
             "without_data"}  # fmt: skip
    asked = {name: value for name, value in asked.items() if name in known}
    shard = context.params["shard"]
    return plan_run(asked, given=given, launch=None, config=context.params["config"], shard=shard)


def test_worlds_that_were_not_given_are_two_to_six_and_cells_run_in_one() -> None:
    cases = plan_cases(with_thorough_worlds(request(), world_given=False))
    usual = [case for case in cases if case.workload not in CELLS]
    assert {case.world for case in usual} == {2, 3, 4, 5, 6}
    assert {case.workload for case in usual} == set(ALWAYS)
    assert {case.world for case in cases if case.workload in CELLS} == {4}
    assert {case.workload for case in cases if case.workload in CELLS} == set(CELLS)


def test_a_world_that_was_given_is_kept_for_all() -> None:
    cases = plan_cases(with_thorough_worlds(request(worlds=(3,)), world_given=True))
    assert {case.world for case in cases} == {3}
    assert {case.workload for case in cases} == {*ALWAYS, *CELLS}
    plain = Request(strategies=("allreduce",))
    assert with_thorough_worlds(plain, world_given=False) == plain


def test_a_batch_for_few_ranks_has_only_worlds_that_it_fills() -> None:
    assert with_thorough_worlds(request(batch=3), world_given=False).worlds == (2, 3)
    assert with_thorough_worlds(request(batch=3), world_given=False).cell_worlds == (3,)


def test_only_worlds_that_were_not_given_may_be_left_out() -> None:
    assert thorough_extras([with_thorough_worlds(request(), world_given=False)]).spare == (
        2,
        3,
        5,
        6,
    )
    assert thorough_extras([request(worlds=(2, 3))]).spare == ()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"accept": "quantized:8"}, "explored cases have no bounds for --accept quantized:8"),
        ({"backend": "mpi"}, "explore runs only with gloo on the CPU, not with mpi"),
        ({"device": "cuda"}, "explore runs only with gloo on the CPU, not with cuda"),
        ({"dtype": "float16"}, "explore draws no case in float16"),
    ],
)
def test_what_explore_cannot_do_is_left_out_and_said(more: dict[str, Any], why: str) -> None:
    (search,) = thorough_extras([request(**more)]).searches
    assert why in search.why_not


def test_under_a_launcher_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    (search,) = thorough_extras([request()], launched=True).searches
    assert "a launcher started these" in search.why_not
    assert thorough_extras([request()]).searches[0].why_not == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "a launcher started these" in thorough_extras([request()]).searches[0].why_not


def test_a_strategy_is_searched_once_in_every_dtype_that_was_asked_for() -> None:
    asked = [request(dtype=dtype) for dtype in ("float32", "bfloat16")]
    (search,) = thorough_extras(asked).searches
    assert search.dtypes == ("float32", "bfloat16")
    assert thorough_extras([request(), *asked]).searches[0].dtypes == ()
    assert thorough_extras([request(explore_s=0.0)]).searches == ()
    assert thorough_extras([Request(strategies=("allreduce",))]).searches == ()


def test_without_hypothesis_a_search_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CannotRunError, match="or pass --explore-s 0"):
        thorough_extras([request()])
    assert thorough_extras([request(explore_s=0.0)]).searches == ()
    assert thorough_extras([request(dtype="float16")]).searches[0].why_not


@pytest.mark.parametrize("words", ["-1", "nan", "1e9"])
def test_a_budget_that_is_none_gets_one_sentence(words: str) -> None:
    ran = CliRunner().invoke(
        root_command, ["plan", "--strategy", "allreduce", "--thorough", "--explore-s", words]
    )
    assert isinstance(ran.exception, UsageError)
    assert "is out of range; it takes a number of seconds from 0 (no search) to 86400" in str(
        ran.exception
    )


def test_nothing_is_searched_where_cases_fail_already() -> None:
    entered: list[ExploredSearch] = []
    asked = [ThoroughSearch(strategy=FAILED.case.strategy, budget_s=60.0)]
    search_thoroughly(
        Pool(), asked, [FAILED], (), keep=False, show=lambda text: None,
        enter=lambda explored, found: entered.append(explored),
    )  # fmt: skip
    (explored,) = entered
    assert (explored.verdict, explored.cases) == ("not run", 0)
    assert explored.reason == "not searched: its cases already fail"
    report = Report(environment={}, cases=(FAILED,), explored=(explored,))
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert Report(environment={}, cases=(PASSED,), explored=(explored,)).exit_code == 0
    unknown = msgspec.structs.replace(explored, verdict="unknown")
    assert Report(environment={}, cases=(PASSED,), explored=(unknown,)).exit_code == 5


def test_words_are_left_out_for_cells_dtypes_and_what_did_not_count() -> None:
    left = _excluded_words(
        ThoroughSearch(strategy="s", budget_s=1, without=("transposed", "resume")), [], ()
    )
    assert left == {"strided": "you passed --without transposed"}
    left = _excluded_words(ThoroughSearch(strategy="s", budget_s=1, dtypes=("float64",)), [], ())
    assert set(left) == {"float32", "bfloat16"}
    left = _excluded_words(ThoroughSearch(strategy="s", budget_s=1), [PASSED], (PASSED.case.id,))
    assert set(left) == {"float64", "bfloat16"}


MATRIX = """
[tool.distcheck]
strategies = ["allreduce", "ddp"]
thorough = true
explore_s = 7

[tool.distcheck.strategy.ddp]
worlds = [2]
explore_s = 0
"""


def test_matrix_and_command_line_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = planned(folder=tmp_path, config=MATRIX)
    worlds = {name: {c.world for c in whole.every if c.strategy == name} for name in
              ("allreduce", "ddp")}  # fmt: skip
    assert worlds == {"allreduce": {2, 3, 4, 5, 6}, "ddp": {2}}
    assert [(s.strategy, s.budget_s) for s in whole.extras.searches] == [("allreduce", 7.0)]
    typed = planned("--world", "3", "--explore-s", "9", folder=tmp_path)
    assert {case.world for case in typed.every} == {3}
    assert {(s.strategy, s.budget_s) for s in typed.extras.searches} == {
        ("allreduce", 9.0), ("ddp", 9.0),
    }  # fmt: skip
    assert typed.whole.digest != planned("--world", "3", folder=tmp_path).whole.digest


def test_a_search_is_in_exactly_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--strategy", "allreduce", "--strategy", "ring", "--thorough")
    parts = [planned(*words, "--shard", f"{n}/3", folder=tmp_path) for n in (1, 2, 3)]
    assert len({part.whole.digest for part in parts}) == 1
    searched = [search.strategy for part in parts for search in part.extras.searches]
    assert sorted(searched) == ["allreduce", "ring"]
    for number, part in enumerate(parts, 1):
        here = {search.strategy for search in part.whole.searches if search.shard == number}
        assert here == {search.strategy for search in part.extras.searches}


def test_the_cost_is_printed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--strategy", "allreduce", "--thorough", "--explore-s", "90")
    whole = planned(*words, folder=tmp_path)
    print_plan_estimate(whole, costs=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    cells = len(CELLS)
    assert captured.err.startswith(
        f"distcheck: {len(whole.cases)} cases in worlds 2, 3, 4, 5, 6, {cells} of them cells in "
        "world 4; explore allreduce for 90 s; about "
    )
    assert "a rough estimate" in captured.err
    print_plan_estimate(whole, costs=False)
    assert capsys.readouterr().err == ""
    ran = CliRunner().invoke(root_command, ["plan", *words, "--json", "plan.json"])
    assert "  explore allreduce for 90 s\n" in ran.output
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["searches"] == [{"strategy": "allreduce", "seconds": 90.0, "why_not": ""}]
    assert document["seconds"] > 90 + sum(case["seconds"] for case in document["cases"])


def searched(verdict: str, *found: str, **more: Any) -> dict[str, Any]:
    one = {"strategy": "ddp", "verdict": verdict, "budget_s": 60.0, "found": [*found], **more}
    document = document_of(PASSED, *(case_report(name[:-3], "fail") for name in found),
                           plan=(PASSED,))  # fmt: skip
    document["plan"]["searches"] = [{"strategy": "ddp", "budget_s": 60.0, "shard": 1}]
    document["explored"] = [] if verdict == "missing" else [one]
    if verdict == "unknown":
        document |= {"verdict": "unknown", "exit_code": 5}
    return document


@pytest.mark.parametrize(
    ("document", "verdict", "code"),
    [
        (searched("pass", cases=3, passed=3), "pass", 0),
        (searched("not run", reason="its cases already fail"), "pass", 0),
        (searched("unknown", reason="no case was run within the budget"), "unknown", 5),
        (searched("missing"), "unknown", 5),
        (searched("fail", "found-w2", cases=9), "fail", 1),
    ],
)
def test_merging_takes_searches(document: dict[str, Any], verdict: str, code: int) -> None:
    whole = join([MatrixPart("part.json", document)])
    assert (whole["verdict"], whole["exit_code"]) == (verdict, code)
    assert len(whole["explored"]) == 1
    assert join([MatrixPart("whole.json", whole)])["explored"] == whole["explored"]
    if document["explored"] == []:
        assert whole["explored"][0]["reason"] == "planned in part 1, but in no report"


def test_a_case_that_no_search_has_found_is_still_refused() -> None:
    document = searched("fail", "found-w2", cases=9)
    document["explored"][0] |= {"verdict": "pass", "passed": 9, "found": []}
    with pytest.raises(DistcheckError, match="which is not in its plan"):
        join([MatrixPart("part.json", document)])


def test_how_far_a_search_went_is_one_line() -> None:
    about = ExploredSearch(
        strategy="ddp", verdict="pass", budget_s=60.0, spent_s=61.2, seed=3, most_world=6,
        most_steps=6, cases=40, passed=38, insensitive=2, left_out={"absent": "declined"},
    )  # fmt: skip
    assert describe_search(about) == (
        "explore: ddp: found nothing in 40 cases, worlds 1 to 6, up to 6 steps; 61 s of 60 s, seed "
        "3; 2 cases could not have revealed every simple mistake; absent was excluded: declined"
    )
    not_run = ExploredSearch(
        strategy="ddp", verdict="not run", budget_s=60.0, reason="not searched: x"
    )
    assert describe_search(not_run) == "explore: ddp: not searched: x"


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (searched("pass", cases=3, passed=3), None),
        (searched("not run", reason="not searched: x"), "skipped"),
        (searched("unknown", reason="no case was run within the budget"), "error"),
        (searched("fail", "found-w2", cases=9), "failure"),
    ],
)
def test_services_and_pages_say_how_far_it_went(document: dict[str, Any], kind: str | None) -> None:
    root = ElementTree.fromstring(junit.render(document).encode())
    (case,) = (case for case in root.iter("testcase") if case.get("name") == "explore")
    assert [child.tag for child in case] == ([kind] if kind else [])
    (line,) = map(describe_search, decode_document(document).explored)
    assert line.startswith("explore: ddp: ")
    assert line in html_report.render(document)
    assert "explore: ddp: " in github.step_summary(document)
