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
from tests.job.scripts import recorded


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


def augmented_from_own_files(facts: Facts) -> None:
    """A data set for each rank, which says so by the files that samples are from."""
    augmented(facts)
    facts.of_batch["files"] = tuple(f"{facts.rank}-{index}" for index in range(4))


def augmented_from_the_same_files(facts: Facts) -> None:
    augmented(facts)
    facts.of_batch["files"] = tuple(f"{facts.step}-{index}" for index in range(4))


def augmented_from_one_file(facts: Facts) -> None:
    augmented(facts)
    facts.of_batch["files"] = ("all",) * 4


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
        (augmented_from_own_files, "pass", []),
        (augmented_from_the_same_files, "fail", ["same-data"]),
        (augmented_from_one_file, "unknown", []),
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


FILES = """
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.randn(3), index % 2, ("/etc/hosts", "/etc", "/", "/etc/passwd")[index]
model = torch.nn.Linear(3, 2)
optimizer = optimizer_of(model)
for x, y, names in torch.utils.data.DataLoader(Images(), batch_size=2):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_the_files_that_samples_are_from_are_noted(tmp_path: Path) -> None:
    """Where they are there; other text is no name of a sample."""
    job = recorded(FILES, tmp_path, steps=2)
    found = [batch.files for step in job.steps for batch in job.records[0, step].batches]
    assert [len(one) for one in found] == [2, 2]
    assert len({name for one in found for name in one}) == 4
    (tmp_path / "other").mkdir()
    job = recorded(FILES.replace('"/etc"', '"a cat"'), tmp_path / "other", steps=2)
    assert [len(b.files) for step in job.steps for b in job.records[0, step].batches] == [0, 2]


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
