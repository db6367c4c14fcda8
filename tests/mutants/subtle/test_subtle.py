"""Every subtle mutant is wrong: its witness shows it, and names no cause that it has not."""

from collections import Counter
from pathlib import Path

import pytest

import distcheck
from tests.mutants import everything as everything_else
from tests.mutants.corpus import CORPUS
from tests.mutants.subtle import Subtle, everything
from tests.mutants.subtle.causes import CAUSES

ALL = everything()
SHOWN = [mutant for mutant in ALL if mutant.asked is not None]


HEAVY = ("Deep", "Large", "Huge", "Kinds", "over_2_24_elements")  # many tensors, or large ones


def _first_of_each_group() -> set[str]:
    """A quick one of each class: a small model before a large one, then few steps."""

    def cost(mutant: Subtle) -> tuple[bool, int]:
        asked = mutant.asked or {}
        return asked["workload"].endswith(HEAVY), asked["steps"]

    firsts: dict[str, str] = {}
    for mutant in sorted(SHOWN, key=cost):
        firsts.setdefault(mutant.group, mutant.name)
    return set(firsts.values())


# Of these the named cause was another one, although the check was the same.
_NAMED_OTHERWISE = {"BroadcastsFromAnother", "lower_precision_from_step_11"}
FIRST = (_first_of_each_group() | _NAMED_OTHERWISE) - {
    "offsets_in_float32",
    "hypercube",
    "shuffled_by_the_global_generator",
    "children_only",
}  # 64 MiB; 8 ranks; five interpreters, as a mutant of test_zoo that every run tries; a deep model


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, marks=[] if m.name in FIRST else [pytest.mark.sweep], id=m.name)
        for m in SHOWN
    ],
)
def test_witness_shows_it(mutant: Subtle, request: pytest.FixtureRequest) -> None:
    assert mutant.asked is not None
    if mutant.group not in ("process", "races"):  # which may show in the second world alone
        request.getfixturevalue("no_rerun")
    report = distcheck.verify(**mutant.asked)
    assert report.verdict == "fail"
    # A race may end in a collective that does not fit another rank's, or go through with it.
    ends = {1, 4} if mutant.group == "races" else {mutant.exit_code}
    assert int(report.exit_code) in ends
    causes = {found.cause for case in report.cases for found in case.diagnosis}
    assert causes - {"unexplained"} <= CAUSES[mutant.name]


def test_zoo_is_as_large_as_it_says() -> None:
    assert len(ALL) >= 150
    assert len({m.name for m in ALL} | {m.name for m in everything_else()}) == len(ALL) + len(
        everything_else()
    )
    assert min(Counter(m.group for m in ALL).values()) >= 8
    assert 3 * len([m for m in ALL if m.after]) >= len(ALL)


def test_reports_that_are_named_are_in_the_corpus() -> None:
    assert {m.after for m in ALL if m.after} <= {known.where for known in CORPUS}


def test_what_no_run_here_shows_says_why() -> None:
    without = [m for m in ALL if m.asked is None]
    # Generators are seeded anew before every step, in every rank: what seeds them is undone.
    unseen = {m.name for m in without if m.reach == "default"}
    assert unseen == {"seeds_all_ranks_alike"}
    reaches = {m.reach for m in without if m.name not in unseen}
    assert reaches <= {"apart", "machines", "inherent", "size", "thorough"}
    assert all(m.asked["world"] == 4 for m in SHOWN if m.reach == "default" and m.asked)


def test_every_mutant_that_is_shown_has_causes() -> None:
    assert set(CAUSES) == {m.name for m in SHOWN}


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*.py")), ids=lambda p: p.stem)
def test_mutants_know_each_other_relatively(path: Path) -> None:
    """Installed, the package has another name."""
    assert path.name.startswith("test_") or "tests.mutants" not in path.read_text()
