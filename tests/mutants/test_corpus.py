"""Every public report has its mutant or the reason why not, and every mutant its place."""

from tests.mutants import everything
from tests.mutants.corpus import CORPUS, EXTRAS

NAMES = {mutant.name for mutant in everything()}
RECREATED = {name for known in CORPUS for name in known.mutants}


def test_every_report_has_a_mutant_or_a_reason() -> None:
    assert len(CORPUS) == 83
    assert len({known.where for known in CORPUS}) == len(CORPUS)
    assert [known.where for known in CORPUS if bool(known.mutants) == bool(known.why_not)] == []


def test_every_mutant_that_is_named_exists() -> None:
    assert not RECREATED - NAMES


def test_every_mutant_has_one_place() -> None:
    assert not NAMES - RECREATED - EXTRAS
    assert not EXTRAS - NAMES
    assert not RECREATED & EXTRAS
