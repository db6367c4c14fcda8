"""The JSON Schema of reports is made from what writes and reads them, and says what they say."""

import copy
import json
from typing import Any

import click.testing
import jsonschema
import msgspec
import pytest

from distcheck.cli import _group
from distcheck.records import CheckResult, Difference
from distcheck.reports.document import Document, json_schema
from distcheck.reports.json_report import as_document, document_of, render_json
from tests import documents
from tests.unit.test_screens import REPORTS

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
        (("cases", 0, "world"), 0),
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
    ran = click.testing.CliRunner().invoke(_group, ["report", "--schema"], standalone_mode=False)
    assert ran.return_value == 0
    assert json.loads(ran.output) == SCHEMA


def test_a_document_is_made_of_dictionaries_and_lists() -> None:
    document = as_document(REPORTS["crash"])
    assert json.loads(msgspec.json.encode(document)) == written("crash")
