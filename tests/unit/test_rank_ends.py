"""How a rank can end is said once, for code, blame and the page on reports."""

import re
from pathlib import Path

import msgspec
import pytest

from distcheck.records import Outcome
from distcheck.records.exit_status import SECONDARY_FAILURE, RankEnd

ROOT = Path(__file__).parents[2]
SPELLED = re.compile(
    r'(\.outcome\b|outcome=|\["outcome"\]).*"(finished|raised|exited|killed|hung|ended|lost)"'
)


@pytest.mark.parametrize("end", RankEnd)
def test_each_end_is_on_the_page(end: RankEnd) -> None:
    rows = (ROOT / "docs" / "report.md").read_text().splitlines()
    (row,) = [line for line in rows if line.startswith("| `outcomes` |")]
    assert f"`{end}`" in row


def test_what_ends_on_its_own_comes_before_what_waits_and_before_victims() -> None:
    own = {RankEnd.KILLED, RankEnd.EXITED, RankEnd.RAISED}
    assert (
        max(end.place for end in own) < RankEnd.HUNG.place < SECONDARY_FAILURE < RankEnd.ENDED.place
    )
    assert RankEnd.LOST.place == min(end.place for end in RankEnd)
    assert RankEnd.FINISHED.place == max(end.place for end in RankEnd)


def test_a_report_holds_its_word_and_no_other() -> None:
    data = msgspec.json.encode(Outcome(rank=1, outcome=RankEnd.HUNG))
    assert b'"outcome":"hung"' in data
    assert msgspec.json.decode(data, type=Outcome).outcome is RankEnd.HUNG
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data.replace(b"hung", b"slept"), type=Outcome)


def test_no_other_module_spells_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "distcheck").rglob("*.py"))
        for line in path.read_text().splitlines()
        if SPELLED.search(line) and "RankEnd" not in line
    ]
    assert not found
