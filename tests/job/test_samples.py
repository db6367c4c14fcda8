"""Which samples ranks have, and what these hold."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from distcheck.job import causes
from distcheck.job.checks import reference as against
from distcheck.job.checks import samples
from distcheck.job.settings import Read
from tests.job.recordings import Facts, make, reference


def apart(facts: Facts) -> None:
    """Every rank's sampler gives it indices of its own."""
    first = 8 * facts.step + 4 * facts.rank
    facts.of_batch = {"indices": (first, first + 1, first + 2, first + 3)}


def alike(facts: Facts) -> None:
    """Every rank's sampler gives it the same indices."""
    facts.of_batch = {"indices": tuple(range(4 * facts.step, 4 * facts.step + 4))}


def twice_in_the_data(facts: Facts) -> None:
    """Samples that are equal, and not the same ones."""
    apart(facts)
    facts.rows = ("a", "a", "b", "c")
    facts.passes = [facts.a_pass(0)]


def augmented(facts: Facts) -> None:
    """The same samples on all ranks, which look different, or a data set for each rank."""
    alike(facts)
    facts.of_batch["drawn"] = {"torch": f"{facts.rank}-{facts.step}"}


def own_data(facts: Facts) -> None:
    """A data set for each rank: one index is another sample on each."""
    alike(facts)


def augmented_alike(facts: Facts) -> None:
    apart(facts)
    facts.of_batch["drawn"] = {"torch": str(facts.step)}


@pytest.mark.parametrize(
    ("change", "verdict", "named"),
    [
        (apart, "pass", []),
        (twice_in_the_data, "pass", []),
        (augmented, "unknown", []),
        (own_data, "pass", []),
        (augmented_alike, "fail", ["same-randomness"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_sample_is_what_the_sampler_gave(
    change: Callable[[Facts], None], verdict: str, named: list[str], tmp_path: Path
) -> None:
    job = make(tmp_path, change)
    result = samples.disjoint(job)
    assert result.verdict == verdict
    assert [one.cause for one in causes.diagnose(job, [result])] == named


def test_an_evaluation_gives_no_samples(tmp_path: Path) -> None:
    """Nor does a pass that nothing was trained on."""

    def evaluates(facts: Facts) -> None:
        other = msgspec.structs.replace(facts.a_pass(0), rows=("x", "y"), live=False, batches=())
        facts.passes = [other, facts.a_pass(1)]

    assert samples.disjoint(make(tmp_path, evaluates)).verdict == "pass"


def test_workers_that_draw_alike_are_named(tmp_path: Path) -> None:
    job = make(tmp_path, apart)
    job.drawn.update({0: {"torch-1", "numpy-5"}, 1: {"torch-2", "numpy-5"}})
    result = samples.disjoint(job)
    assert result.verdict == "fail"
    assert "(numpy, in the processes of their loaders)" in result.reason


@pytest.mark.parametrize(
    ("parts", "fails"),
    [
        (("same", "same"), False),
        (("same", "other"), True),  # its labels are of other samples
        (("random", "same"), False),  # augmented
        (("same", "constant"), False),
    ],
)
def test_what_a_sample_holds_is_what_one_process_reads(
    parts: tuple[str, ...], fails: bool, tmp_path: Path
) -> None:
    job = make(tmp_path, apart)
    alone = reference(job, tmp_path)
    of_ranks = (("same", "same"), parts)
    reads = tuple(Read(rank=r, parts=found, sizes=(40, 4)) for r, found in enumerate(of_ranks))
    replayed = msgspec.structs.replace(alone.replayed, reads=reads)
    (result,) = against.contents(dataclasses.replace(alone, replayed=replayed))
    assert result.verdict == ("fail" if fails else "pass")
    named = [one.cause for one in causes.diagnose(job, [result])]
    assert named == (["data-differs"] if fails else [])
