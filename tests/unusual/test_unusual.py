"""Right programs of unusual forms pass."""

import pytest

import distcheck
from tests.unusual import everything

pytestmark = pytest.mark.usefixtures("no_rerun")

ALL = everything()
FIRST = {program.group: program.name for program in reversed(ALL)}


def test_there_are_as_many_as_it_says() -> None:
    assert len({program.name for program in ALL}) == len(ALL) >= 60


def test_one_of_each_kind_is_not_accused() -> None:
    """At a world that is no power of two, with unequal shards."""
    some = [program.spec for program in ALL if FIRST[program.group] == program.name]
    report = distcheck.verify(
        some, world=3, workload="tests.mutants.small:Small", dtype="float32", steps=2
    )
    assert {case.case.id: case.verdict for case in report.cases if case.verdict != "pass"} == {}
    assert len(report.cases) == len(some) == 8


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("group", sorted(FIRST))
def test_none_is_accused(group: str, world: int) -> None:
    report = distcheck.verify([p.spec for p in ALL if p.group == group], world=world)
    assert {case.case.id: case.verdict for case in report.cases if case.verdict != "pass"} == {}
