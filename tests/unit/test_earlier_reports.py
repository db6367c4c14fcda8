"""What earlier releases said of the ends of ranks in prose alone is read once, for the pictures."""

import json
from pathlib import Path

import pytest

from distcheck.records.ends import PROVEN
from distcheck.reports import json_report
from tests.sources import MODULES, text_of

CRASH = Path(__file__).parents[1] / "snapshots" / "crash.json"
ADDED = ("lost_peer", "sizes_differ", "proven", "why")


def test_a_report_of_an_earlier_release_says_the_same() -> None:
    now = json.loads(CRASH.read_text())
    then = json.loads(CRASH.read_text())
    for case in then["cases"]:
        for outcome in case["outcomes"]:
            for key in ADDED:
                outcome.pop(key, None)
    json_report.complete(then)
    assert then == now


@pytest.mark.parametrize(
    ("detail", "known"),
    [
        ("step 1, sync; its peer was gone at a.py:3\nRuntimeError", {"lost_peer": True}),
        ("step 1, sync\nprinted: its peer was gone", {}),
        ("step 1, sync\nis there a collective mismatch in it?", {"sizes_differ": True}),
        (
            f"step 1, sync\n{PROVEN['deadlock']}: all wait",
            {"proven": "deadlock", "why": "all wait"},
        ),
        ("", {}),
    ],
)
def test_what_is_read_out_of_prose(detail: str, known: dict[str, object]) -> None:
    outcome = {"rank": 0, "outcome": "raised", "detail": detail}
    json_report.complete({"cases": [{"outcomes": [outcome]}]})
    assert {key: outcome[key] for key in ADDED if outcome.get(key)} == known


def test_what_a_report_of_today_says_is_not_read_out_of_its_prose() -> None:
    said = {"lost_peer": False, "sizes_differ": False, "detail": "; its peer was gone"}
    outcome = {"rank": 0, "outcome": "raised", **said}
    json_report.complete({"cases": [{"outcomes": [outcome]}]})
    assert outcome == {"rank": 0, "outcome": "raised", **said}


def test_no_judge_reads_what_is_written_for_people() -> None:
    rooms = ("judge", "verification", "plan", "store", "job", "explore", "compare")
    readers = [path for path in MODULES if path.relative_to(MODULES[0].parent).parts[0] in rooms]
    assert readers
    assert not [str(path) for path in readers if ".detail" in text_of(path)]
