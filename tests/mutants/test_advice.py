"""Every option that a report advises does what is said of it: it is given, and the case passes."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

import distcheck
from distcheck import registry
from distcheck.records import CaseReport
from tests.mutants import Mutant, everything
from tests.mutants.test_zoo import IN_FLIGHT

ALL = {mutant.name: mutant for mutant in everything()}
# One mutant for each kind of advice; the sweep follows the advice that any mutant has.
ADVISED = {
    "missing_division": ["--loss mean/world", "--loss sum/global"],
    "mean_of_means": ["--batch 255"], "drops_the_last_rank": ["--without-data 3"],
    "conversion_dropped": ["--accept low-precision:bfloat16"],
    "AveragesWhatItUpdated": ["--accept local-sgd:1"], "shorter_wire_than_promised": [],
    "quantized_without_the_last_rank": [], "buckets_by_the_wrong_dtype": [],
}  # fmt: skip
_OPTION = re.compile(r"(?:give|pass|or|with) (--[a-z-]+ [\w:/-]*\w)")
_FOLLOWED = {"--loss", "--batch", "--without-data", "--accept"}


def advice_of(case: CaseReport) -> Iterator[str]:
    """The options that the suggestions of a case advise."""
    for found in case.diagnosis:
        for option in _OPTION.findall(found.suggestion):
            if option.split()[0] in _FOLLOWED and option != "--accept quantized:8":
                yield option


def run(mutant: Mutant, **changed: Any) -> distcheck.Report:
    shown_by_processes = mutant.separate or mutant.exit_code == 4 or mutant.name in IN_FLIGHT
    in_one = registry.is_installed("simulated") and not shown_by_processes
    backend = "simulated" if in_one else "gloo"
    return distcheck.verify(**{"backend": backend, **mutant.asked, "separate": False, **changed})


def follow(mutant: Mutant, option: str) -> distcheck.Report:
    name, value = option.split()
    asked = mutant.asked
    if name == "--without-data":
        without = [*asked.get("without_data", ()), int(value)]
        others = asked["world"] - len(without)
        batch = asked.get("batch", 256) // others * others
        return run(mutant, without_data=without, batch=batch)
    field = name.removeprefix("--")
    return run(mutant, **{field: int(value) if field == "batch" else value})


@pytest.mark.usefixtures("no_rerun")
@pytest.mark.parametrize("name", ADVISED)
def test_what_is_advised_works(name: str) -> None:
    mutant = ALL[name]
    report = run(mutant)
    advice = [option for case in report.cases for option in advice_of(case)]
    assert list(dict.fromkeys(advice)) == ADVISED[name]
    for option in ADVISED[name]:
        assert follow(mutant, option).verdict == "pass", option


@pytest.mark.sweep
@pytest.mark.usefixtures("no_rerun")
@pytest.mark.parametrize("name", sorted(ALL.keys() - ADVISED.keys()))
def test_whatever_is_advised_works(name: str) -> None:
    mutant = ALL[name]
    advice = {option for case in run(mutant).cases for option in advice_of(case)}
    for option in sorted(advice):
        assert follow(mutant, option).verdict == "pass", option
