"""Which cases failed when they were last run, as kept runs say it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from distcheck.records import Case
from distcheck.records.decoding import read_if_whole

_MOST_RUNS = 50  # so that a run costs little to plan, whatever is kept


class _Judged(msgspec.Struct, frozen=True):
    """As much of a case in report.json; the rest is skipped, not decoded."""

    verdict: str
    strategy: str
    world: int
    backend: str
    device: str
    dtype: str
    workload: str
    seed: int


class _Report(msgspec.Struct):
    cases: list[_Judged]


def of_cases(runs: Path, cases: Sequence[Case]) -> set[str]:
    """The ids of those cases that failed in the newest of the runs that judged them: that gave them
    a verdict other than unknown.
    """
    last: dict[tuple[object, ...], str] = {}
    for path in sorted(runs.glob("*/report.json"), reverse=True)[:_MOST_RUNS]:
        earlier = read_if_whole(path, _Report)
        for judged in earlier.cases if earlier is not None else ():
            if judged.verdict in ("pass", "fail"):
                last.setdefault(msgspec.structs.astuple(judged)[1:], judged.verdict)
    of = _Judged.__struct_fields__[1:]
    return {
        case.id for case in cases if last.get(tuple(getattr(case, name) for name in of)) == "fail"
    }


def first(cases: Sequence[Case], failed: set[str]) -> list[Case]:
    """The cases, those of a strategy and world with one that failed before the others, and of these
    the ones that failed.
    """
    ahead = {case.siblings for case in cases if case.id in failed}
    place = {case.siblings: number for number, case in reversed(list(enumerate(cases)))}

    def key(case: Case) -> tuple[bool, int, bool]:
        return case.siblings not in ahead, place[case.siblings], case.id not in failed

    return sorted(cases, key=key)


def the_others(cases: Sequence[Case], failed: set[str]) -> dict[str, str]:
    """The ids of the cases that did not fail, with that as the reason to leave them out."""
    why = "you gave --last-failed, and it did not fail when it was last run"
    return {case.id: why for case in cases if case.id not in failed}
