"""Parts of a gate's run, merged into one document."""

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner

from distcheck.cli import root_command
from distcheck.errors import DistcheckError, ExitCode, UsageError
from distcheck.records import CaseReport, Report, RunPlan
from distcheck.reports import github, junit
from distcheck.reports.json_report import as_document
from distcheck.reports.terminal import render_text
from distcheck.verification.merging import MatrixPart, join
from tests.unit.gate_documents import (
    ALL,
    CRASHED,
    FAILED,
    PASSED,
    UNKNOWN,
    case_report,
    document_of,
    parsed,
)


def parts(*shared: CaseReport, shards: int = 2, **options: Any) -> list[MatrixPart]:
    return [
        MatrixPart(
            f"{n + 1}.json",
            document_of(
                *shared[n::shards], shard=n + 1, shards=shards, plan=tuple(shared), **options
            ),
        )
        for n in range(shards)
    ]


def test_parts_make_the_whole_in_the_order_of_the_plan() -> None:
    whole = join(list(reversed(parts(*ALL))))
    assert [case["case"]["id"] for case in whole["cases"]] == [c.case.id for c in ALL]
    assert (whole["verdict"], whole["exit_code"]) == ("fail", ExitCode.MISMATCH)
    assert [part["shard"] for part in whole["parts"]] == [2, 1]
    assert join([MatrixPart("whole.json", whole)])["cases"] == whole["cases"]
    junit.render(whole)


@pytest.mark.parametrize(
    ("cases", "code"),
    [
        ([PASSED, case_report("fsdp", "pass")], ExitCode.PASS),
        ([PASSED, FAILED, CRASHED], ExitCode.MISMATCH),
        ([PASSED, CRASHED, UNKNOWN], ExitCode.RANK_FAILED),
        ([PASSED, UNKNOWN], ExitCode.UNKNOWN),
    ],
)
def test_the_code_is_that_of_one_run(cases: list[CaseReport], code: ExitCode) -> None:
    assert join(parts(*cases))["exit_code"] == code
    assert Report(environment={}, cases=tuple(cases)).exit_code == code


def test_the_screen_says_that_it_shows_a_part() -> None:
    plan = RunPlan(digest="d", shard=2, shards=3, cases=())
    text = render_text(Report(environment={}, cases=(PASSED,), plan=plan), width=100)
    assert (
        "part 2 of 3: 1 of 0 planned cases; run distcheck merge to check that the other parts ran"
        in text
    )
    whole = msgspec.structs.replace(plan, shard=0, shards=1)
    assert "part" not in render_text(Report(environment={}, cases=(PASSED,), plan=whole), width=100)


def test_a_planned_cell_that_is_missing_is_unknown() -> None:
    passed = [case_report(f"s{n}", "pass") for n in range(4)]
    whole = join(parts(*passed)[:1])
    assert (whole["verdict"], whole["exit_code"]) == ("unknown", ExitCode.UNKNOWN)
    missing = [case for case in whole["cases"] if case["verdict"] == "unknown"]
    assert [case["case"]["id"] for case in missing] == ["s1-w2", "s3-w2"]
    assert [*missing[0]["notes"]] == ["planned in part 2 of 2, but in no report"]
    root = ElementTree.fromstring(junit.render(whole).encode())
    assert (root.get("tests"), root.get("errors")) == ("4", "2")
    (warning, _) = github.annotations(whole, Path("/"))
    said, replay = parsed(warning)[2].split("\n")
    assert said == "planned in part 2 of 2, but in no report"
    assert replay.startswith("replay: distcheck verify --strategy s1 --world 2 ")
    # A report that was cut out of its own plan is noticed as well.
    (one, two) = parts(*passed)
    del two.document["cases"][0], two.document["totals"]
    assert join([one, two])["exit_code"] == ExitCode.UNKNOWN


def test_a_missing_cell_has_all_keys_and_no_part_without_parts() -> None:
    whole = join(parts(PASSED, FAILED)[:1])
    assert set(whole["cases"][1]) == set(whole["cases"][0])
    alone = document_of(PASSED, plan=(PASSED, FAILED))
    (_, missing) = join([MatrixPart("a.json", alone)])["cases"]
    assert [*missing["notes"]] == ["planned, but in no report"]
    assert join(parts(PASSED, FAILED))["plan"]["shard"] == 0


def test_what_was_left_out_is_not_missing() -> None:
    out = case_report("ddp", "pass", name="ddp-w2-exact")
    document = document_of(PASSED, plan=(PASSED, out), left_out={"ddp-w2-exact": "no float16"})
    whole = join([MatrixPart("a.json", document)])
    assert (whole["verdict"], len(whole["cases"])) == ("pass", 1)
    assert whole["left_out"] == {"ddp-w2-exact": "no float16"}


def test_parts_that_were_interrupted_are_unknown() -> None:
    one, two = parts(PASSED, UNKNOWN, interrupted=True)
    assert join([one, two])["exit_code"] == ExitCode.UNKNOWN


def edited(part: MatrixPart, **changes: Any) -> MatrixPart:
    document = copy.deepcopy(part.document)
    document["cases"][0] |= changes
    return MatrixPart("edited.json", document)


def test_the_same_case_twice() -> None:
    one, two = parts(PASSED, FAILED)
    again = edited(one, timings_s={"world": 9.0}, replay="distcheck replay elsewhere")
    assert join([one, again, two])["exit_code"] == ExitCode.MISMATCH
    with pytest.raises(UsageError, match=r"1.json and edited.json both have case ddp-w2, but diff"):
        join([one, edited(one, notes=["other"]), two])


def test_parts_of_other_plans_are_refused() -> None:
    one, two = parts(PASSED, FAILED)
    other = parts(PASSED, FAILED, digest="e")[1]
    with pytest.raises(UsageError, match=r"2.json has a different plan than 1.json \(e in 2 parts"):
        join([one, other])
    three = parts(PASSED, FAILED, CRASHED, shards=3)[2]
    with pytest.raises(UsageError, match="options, files or versions differ; merge parts of"):
        join([one, three])
    cut = copy.deepcopy(two)
    del cut.document["plan"]["cases"][0]
    with pytest.raises(UsageError, match="have the same plan digest, but different cases"):
        join([one, cut])
    stray = edited(one, case={**one.document["cases"][0]["case"], "id": "stray"})
    with pytest.raises(UsageError, match="has case stray, which is not in its plan"):
        join([stray])
    with pytest.raises(UsageError, match="has neither a plan nor the command"):
        join([MatrixPart("r.json", as_document(Report(environment={}, cases=ALL)))])


def merge(*words: str) -> tuple[int, str]:
    """The command, as `distcheck` calls it: its code or its error, and what it printed."""
    runner = CliRunner()
    ran = runner.invoke(root_command, ["merge", *words], standalone_mode=False)
    if isinstance(ran.exception, DistcheckError):
        return ran.exception.exit_code, str(ran.exception)
    assert ran.exception is None, ran.exception
    return ran.return_value, ran.output


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part in parts(*ALL):
        Path(part.file).write_text(json.dumps(part.document))
    words = ["--json", "whole.json", "--junit", "whole.xml", "--github"]
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, output = merge("1.json", "2.json", *words)
    assert code == ExitCode.MISMATCH
    first, *lines = output.splitlines()
    assert first == "FAIL    4 planned cases, 2 reports: 2 failed, 1 unknown, 1 passed"
    assert sum(line.startswith("::error file=") for line in lines) == 2
    told = [line.split(maxsplit=1) for line in lines if not line.startswith("::")]
    assert [words[0] for words in told if words[0].isupper()] == ["FAIL", "FAIL", "UNKNOWN"]
    replays = [words[1] for words in told if words[0] == "replay"]
    assert [line.startswith("distcheck verify --strategy sync.py:f") for line in replays] == [
        True
    ] * 3
    assert merge("1.json", "2.json", "--quiet")[1].splitlines() == [first]
    assert json.loads(Path("whole.json").read_text())["exit_code"] == 1
    assert ElementTree.parse("whole.xml").getroot().get("tests") == "4"
    assert "## distcheck" in Path("summary.md").read_text()
    merge("1.json", "2.json", "--github")
    assert Path("summary.md").read_text().count("## distcheck") == 2, "a step may say more"


def test_files_that_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (one, _) = parts(PASSED, FAILED)
    Path("1.json").write_text(json.dumps(one.document))
    Path("old.json").write_text(json.dumps({**one.document, "schema": "distcheck.report/0"}))
    Path("text.json").write_text("{")
    Path("cut.json").write_text(json.dumps({**one.document, "cases": [{"case": {"id": "x"}}]}))
    odd = copy.deepcopy(one.document)
    odd["cases"][0]["verdict"] = "passed"
    Path("odd.json").write_text(json.dumps(odd))
    for words, code, message in (
        (["cut.json"], 2, "cut.json is damaged: Object missing required field `strategy`"),
        (["odd.json"], 2, "odd.json is damaged: Invalid enum value 'passed'"),
        (["old.json"], 2, "old.json has the schema 'distcheck.report/0'; this version reads"),
        (["text.json"], 2, "text.json is not a report that --json wrote"),
        (["none.json"], 2, "none.json cannot be read: No such file or directory"),
        (["1.json", "--junit", "/proc/x.xml"], 3, "--junit /proc/x.xml cannot be written"),
        (["1.json", "--json", "a", "--junit", "a"], 2, "name the same file"),
        (["1.json", "--json", "-", "--github"], 2, "would both write to standard output"),
    ):
        found, text = merge(*words)
        assert found == code, text
        assert message in text
