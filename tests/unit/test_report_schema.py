"""The JSON Schema of reports is made from what writes and reads them, and says what they say."""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import click.testing
import jsonschema
import msgspec
import pytest

from distcheck.cli import root_command
from distcheck.records import CheckResult, Difference
from distcheck.reports.json_report import (
    Document,
    as_document,
    document_of,
    json_schema,
    render_json,
)
from tests import documents
from tests.unit.test_screens import REPORTS

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(msgspec.json.encode(json_schema()))


def written(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(render_json(REPORTS[name]))
    return document


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_is_what_its_schema_says(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(written(name), SCHEMA)


@pytest.mark.parametrize("name", REPORTS)
def test_what_is_written_is_what_is_read(name: str) -> None:
    assert msgspec.convert(written(name), Document) == document_of(REPORTS[name])


def test_every_key_that_is_written_is_in_the_schema() -> None:
    """Of a report that has all kinds of picture in it."""
    closed = copy.deepcopy(SCHEMA)
    for one in closed["$defs"].values():
        one["additionalProperties"] = False
    report = documents.vgg11(steps=4), documents.crash()
    for case in report:
        text = msgspec.json.encode(documents.document(case))
        jsonschema.validate(json.loads(text), closed)


def test_what_is_no_number_is_said_in_a_word() -> None:
    """As the first sample of a rank that had none, or a setting."""
    case = documents.crash()
    place = Difference(
        parameter="samples", rank=1, step=0, index=(), actual="none", expected=3.0, error="inf",
        bound=0.0,
    )  # fmt: skip
    wrong = CheckResult(check="data", layer="-", verdict="fail", worst=place, first=place)
    case = msgspec.structs.replace(case, checks=(*case.checks, wrong))
    text = msgspec.json.encode(documents.document(case))
    jsonschema.validate(json.loads(text), SCHEMA)
    assert msgspec.json.decode(text, type=Document).cases[0].checks[-1].worst == place


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict",), "green"),
        (("exit_code",), -1),
        (("cases", 0, "case", "world"), 0),
        (("cases", 0, "checks", 0, "compared", "tensors"), 2**64),
        (("cases", 0, "checks", 0, "verdict"), "passed"),
        (("cases", 0, "notes"), "one"),
    ],
)
def test_what_no_report_holds_is_refused(path: tuple[str | int, ...], value: object) -> None:
    document: Any = written("crash")
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_the_command_prints_it() -> None:
    ran = click.testing.CliRunner().invoke(
        root_command, ["report", "--schema"], standalone_mode=False
    )
    assert ran.return_value == 0
    assert json.loads(ran.output) == SCHEMA


def test_a_document_is_made_of_dictionaries_and_lists() -> None:
    document = as_document(REPORTS["crash"])
    assert json.loads(msgspec.json.encode(document)) == written("crash")


def test_the_page_logs_to_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the two libraries pretended: neither is installed for tests."""
    monkeypatch.chdir(tmp_path)
    Path("report.json").write_text(render_json(REPORTS["several"]))
    Path("report.html").write_text("<p>a page</p>")
    wandb, mlflow = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    page = (ROOT / "docs" / "report.md").read_text().partition("## To an experiment tracker")[2]
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(block, names)
    (numbers,) = mlflow.log_metrics.call_args.args
    assert numbers["allreduce-w4-cnn-float32/passed"] == 1.0
    share = numbers["allreduce-w4-cnn-float32/gradients rounding/share of bound"]
    assert share == pytest.approx(3.46e-10 / 7.24e-10)
    logged = wandb.init.return_value.__enter__.return_value.log.call_args_list
    assert logged[0].args == (numbers,)
