"""Every mutant is caught by exactly the checks that it is listed with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import distcheck
from distcheck import registry
from distcheck.judge.checks import ORDER
from distcheck.records.causes import causes
from distcheck.workloads.cells import CELLS
from tests.firsts import firsts
from tests.mutants import Mutant, everything
from tests.mutants.causes import CAUSES
from tests.mutants.lines import LINES, SILENT

ALL = everything()
BLINDS = {"SameDataOnEveryRank"}  # under which a missing sync would not show
# What a world in one process ends at the first use of a tensor in flight, before it is wrong.
IN_FLIGHT = {"does_not_wait"}


def _kinds(mutant: Mutant) -> Iterator[object]:
    """The checks that catch it together, each cause, and a cell that it alone shows."""
    yield mutant.caught
    yield from CAUSES.get(mutant.name, ())
    if str(mutant.workload) in CELLS:
        yield mutant.workload


OFTEN = {mutant.name for mutant in firsts([m for m in ALL if not m.seldom], _kinds)}


def _parameters() -> list[object]:
    """All of them; but in the sweep, those that bring a check, a cause or a cell are enough."""
    return [
        pytest.param(m, marks=[] if m.name in OFTEN else [pytest.mark.sweep], id=m.name)
        for m in ALL
    ]


def _backend(mutant: Mutant, config: pytest.Config) -> str:
    """A world in one process, of four ranks or of two, is one fork. Processes are taken for what
    only they show, for how ranks end, for those of the sweep, and for all with `--with-reruns`.
    """
    shown_by_processes = mutant.separate or mutant.exit_code == 4 or mutant.name in IN_FLIGHT
    if shown_by_processes or mutant.name not in OFTEN or config.getoption("--with-reruns"):
        return "gloo"
    return "simulated" if registry.is_installed("simulated") else "gloo"


@pytest.mark.parametrize("mutant", _parameters())
def test_mutant_is_caught(mutant: Mutant, request: pytest.FixtureRequest) -> None:
    if "rerun" not in {check for check, _ in mutant.caught}:
        request.getfixturevalue("no_rerun")
    report = distcheck.verify(**mutant.asked, backend=_backend(mutant, request.config))
    results = [result for case in report.cases for result in case.checks]
    failed = {(r.check, r.layer) for r in results if r.verdict == "fail"}
    assert failed == mutant.caught
    assert int(report.exit_code) == mutant.exit_code
    causes = {found.cause for case in report.cases for found in case.diagnosis}
    assert causes == CAUSES.get(mutant.name), "add its line in tests/mutants/causes.py"
    assert not [case for case in report.cases if case.diagnosis and case.verdict != "fail"]
    lines = {case.where.code[:55] for case in report.cases if case.where is not None}
    expected = {LINES[mutant.name]} if mutant.name in LINES else set()
    assert lines == expected, "add its line in tests/mutants/lines.py"
    if mutant.exit_code == 1:
        firsts = [r.first for r in results if r.verdict == "fail"]
        assert min(first.step for first in firsts if first is not None) == mutant.step
        unknown = [r.check for r in results if r.verdict == "unknown"]
        assert unknown == (["sensitivity"] if mutant.name in BLINDS else [])


def test_most_lines_are_named() -> None:
    """Of mutants whose first wrong gradient went through one line."""
    assert len(LINES) >= 9 * len(SILENT)
    assert {*LINES} | SILENT <= CAUSES.keys()
    assert not {*LINES} & SILENT


def test_every_mutant_says_what_it_is_called() -> None:
    assert set(CAUSES) == {mutant.name for mutant in ALL}


def test_every_cause_has_a_mutant() -> None:
    """Of those that `verify` names; the others are shown elsewhere (tests/unit/test_causes.py)."""
    # Of a machine that is lost, in tests/launchers; of schedules, in tests/addons/simulated;
    # of ranks that wait for each other and calls that are misused, in tests/wrong_programs; of
    # features of the code that no case exercises, in tests/unit/test_gaps.py; of the ledger of
    # collectives, in tests/job/test_ledger.py.
    elsewhere = {
        "unreachable", "depends-on-schedule", "needs-buffering", "hang",
        "work-not-waited", "work-waited-twice", "message-race", "not-exercised",
        "reduced-twice", "reduced-in-short-dtype",
    }  # fmt: skip
    of_verify = {name for name, cause in causes().items() if "verify" in cause.by}
    assert set().union(*CAUSES.values()) == of_verify - elsewhere


def test_every_check_has_a_mutant_that_it_alone_catches() -> None:
    alone = {next(iter(m.caught))[0] for m in ALL if len({check for check, _ in m.caught}) == 1}
    assert alone == {name.replace("_", " ") for name in ORDER}


def test_every_layer_has_a_mutant_that_it_alone_catches() -> None:
    layers = [{layer for _, layer in m.caught} for m in ALL]
    alone = {next(iter(found)) for found in layers if len(found) == 1}
    assert alone >= {"exact", "bitwise", "rounding", "full batch float32", "full batch float64"}


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*.py")), ids=lambda p: p.stem)
def test_mutants_know_each_other_relatively(path: Path) -> None:
    """Installed, the package has another name."""
    assert path.name.startswith("test_") or "tests.mutants" not in path.read_text()
