"""Which samples ranks have, and what these hold."""

import dataclasses
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from distcheck.job import causes
from distcheck.job.checks import reference as against
from distcheck.job.checks import samples
from distcheck.job.inside.contents import read_with_equal_rng
from distcheck.job.inside.loaders import Loaders
from distcheck.job.settings import SampleComparison
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


def takes_its_rows(facts: Facts) -> None:
    """All ranks read one batch, and each gives its model other rows of it."""
    facts.of_batch = {"indices": tuple(range(8 * facts.step, 8 * facts.step + 8))}


def takes_the_rows_of_rank_0(facts: Facts) -> None:
    takes_its_rows(facts)
    facts.rows = ("a", "b", "c", "d")
    facts.passes = [facts.a_pass(0)]


@pytest.mark.parametrize(
    ("change", "verdict", "named"),
    [
        (apart, "pass", []),
        (takes_its_rows, "pass", []),
        (takes_the_rows_of_rank_0, "fail", ["same-data"]),
        (twice_in_the_data, "pass", []),
        (augmented, "unknown", []),
        (augmented_from_own_files, "pass", []),
        (augmented_from_the_same_files, "fail", ["same-data"]),
        (augmented_from_one_file, "unknown", []),
        (own_data, "pass", []),
        (augmented_alike, "fail", ["shared-rng-seed"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_sample_is_what_the_sampler_gave(
    change: Callable[[Facts], None], verdict: str, named: list[str], tmp_path: Path
) -> None:
    job = make(tmp_path, change)
    result = samples.disjoint_samples(job)
    assert result.verdict == verdict
    assert [one.cause for one in causes.diagnose(job, [result])] == named


@pytest.mark.parametrize("loads", [True, False])
def test_advice_names_a_loader_only_if_there_is_one(loads: bool, tmp_path: Path) -> None:
    job = make(tmp_path, takes_the_rows_of_rank_0)
    if not loads:
        own = {at: msgspec.structs.replace(r, batches=()) for at, r in job.records.items()}
        job = dataclasses.replace(job, records=own)
    (found,) = causes.diagnose(job, [samples.disjoint_samples(job)])
    assert (found.cause, "DataLoader" in found.suggestion) == ("same-data", loads)


RIGHT = {"seed": 0, "num_replicas": 2}
SAMPLERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("no sampler", {}, "a DistributedSampler", ""),
    ("a seed per rank", {"seed": 7}, "the same seed", "has the seed 0 on rank 0 and 7 on rank 1"),
    ("one rank", {"rank": 0}, "its own rank", "has the rank 0 on rank 0 and 0 on rank 1"),
    ("right", {"rank": 1}, "a DistributedSampler", ""),
]


@pytest.mark.parametrize(("settings", "advice", "fact"), [one[1:] for one in SAMPLERS])
def test_advice_on_samplers_follows_their_settings(
    settings: dict[str, Any], advice: str, fact: str, tmp_path: Path
) -> None:
    def sets(facts: Facts) -> None:
        alike(facts)
        facts.rows = tuple(map(str, range(4)))
        facts.passes = [facts.a_pass(0)]
        own = {**RIGHT, "rank": 0, **(settings if facts.rank else {})}
        facts.of_iteration = {"settings": own if settings else {}}

    job = make(tmp_path, sets)
    (found,) = causes.diagnose(job, [samples.disjoint_samples(job)])
    assert found.cause == "same-data"
    assert advice in found.suggestion
    assert fact in found.evidence


def test_advice_names_a_batch_sampler(tmp_path: Path) -> None:
    def sets(facts: Facts) -> None:
        takes_the_rows_of_rank_0(facts)
        facts.of_iteration = {"batch_sampler": "ByLength"}

    job = make(tmp_path, sets)
    (found,) = causes.diagnose(job, [samples.disjoint_samples(job)])
    assert "ByLength selects the batches" in found.evidence
    assert "DistributedSampler" not in found.suggestion


BATCHES = """
data = torch.utils.data.TensorDataset(torch.ones(8, 3))
sampler = torch.utils.data.DistributedSampler(data, 2, 1, seed=5)
class ByLength(torch.utils.data.BatchSampler): pass
own = torch.utils.data.DataLoader(data, batch_sampler=ByLength(sampler, 2, False))
model = torch.nn.Linear(3, 2)
optimizer = optimizer_of(model)
for loader in (torch.utils.data.DataLoader(data, 2, sampler=sampler), own):
    for (x,) in loader:
        optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
"""


def test_the_settings_of_samplers_are_recorded(tmp_path: Path) -> None:
    job = recorded(BATCHES, tmp_path, steps=4)
    first, second = (job.records[0, step].iterations[0] for step in (0, 2))
    assert first.settings == {"seed": 5, "rank": 1, "num_replicas": 2}
    assert (first.samples, first.batch_sampler, second.batch_sampler) == (8, "", "ByLength")


@pytest.mark.parametrize(
    ("samples_of_1", "size", "verdict"),
    [
        ((0, 1, 2, 4), 5, "pass"),  # accelerate: 0 to 3 on rank 0, 4 and the first again on rank 1
        ((0, 1, 2, 4), 6, "fail"),  # no rank reads the sample 5
        ((0, 1, 2, 3), 4, "fail"),  # there is nothing left to read
    ],
)
def test_a_pass_shorter_than_a_batch_may_be_filled(
    samples_of_1: tuple[int, ...], size: int, verdict: str, tmp_path: Path
) -> None:
    def fills(facts: Facts) -> None:
        indices = samples_of_1 if facts.rank else (0, 1, 2, 3)
        facts.of_batch = {"indices": indices}
        facts.rows = tuple(map(str, indices))
        facts.passes = [facts.a_pass(0)]
        facts.of_iteration = {"length": 1, "samples": size}

    assert samples.disjoint_samples(make(tmp_path, fills, steps=1)).verdict == verdict


@pytest.mark.parametrize(("number", "verdict"), [(3, "pass"), (2, "fail")])
def test_the_last_batch_may_be_filled(number: int, verdict: str, tmp_path: Path) -> None:
    """Rank 1 reads again, in the last batch of four or earlier, what rank 0 read first."""

    def fills(facts: Facts) -> None:
        facts.epoch = 0
        apart(facts)
        if (facts.rank, facts.step) == (1, number):
            facts.of_batch = {"indices": (0, 1, 2, 3)}
            facts.rows = tuple(f"0-0-{i}" for i in range(4))
        facts.passes = [facts.a_pass(0)]

    assert samples.disjoint_samples(make(tmp_path, fills, steps=4)).verdict == verdict


SHARDS = [
    (augmented, "own", "pass", []), (augmented, "same", "fail", ["same-data"]),
    (own_data, "own", "pass", []), (own_data, "same", "fail", ["same-data"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "data", "verdict", "named"), SHARDS)
def test_labels_that_ranks_have_in_common_do_not_make_their_samples_the_same(
    change: Callable[[Facts], None], data: str, verdict: str, named: list[str], tmp_path: Path
) -> None:
    """A shard for each rank, or one data set for all, with the same classes in the same order."""
    job = make(tmp_path, change)
    for rank, index in product(range(2), range(4)):
        image = f"{index} of {rank if data == 'own' else 0}"
        job.alike[rank, 0, index] = (image, str(index % 2))
    result = samples.disjoint_samples(job)
    assert result.verdict == verdict
    assert [one.cause for one in causes.diagnose(job, [result])] == named


def test_shards_that_are_augmented_alike_are_named(tmp_path: Path) -> None:
    def seeded_alike(facts: Facts) -> None:
        alike(facts)
        facts.of_batch["drawn"] = {"torch": str(facts.step)}

    job = make(tmp_path, seeded_alike)
    job.alike.update({(rank, 0, 0): (f"of {rank}", "label") for rank in range(2)})
    found = causes.diagnose(job, [samples.disjoint_samples(job)])
    assert [one.cause for one in found] == ["shared-rng-seed"]


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, shard: float, draws: torch.Generator | None = None) -> None:
        self.images, self.draws = shard + torch.zeros(20, 3), draws

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index] + torch.randn(3, generator=self.draws), index % 2


def test_ranks_read_samples_with_the_same_random_numbers() -> None:
    def read(data: Noisy) -> list[tuple[int, tuple[str, ...]]]:
        torch.manual_seed(int(data.images[0, 0]))
        before = torch.get_rng_state()
        found = [
            (one.index, one.parts)
            for one in read_with_equal_rng({2: DataLoader(data, batch_size=4)})
        ]
        assert torch.equal(torch.get_rng_state(), before)
        return found

    first = read(Noisy(0.0))
    assert [(index, len(parts)) for index, parts in first] == [(i, 2) for i in range(8)]
    assert read(Noisy(0.0)) == first
    other = read(Noisy(1.0))
    assert all(a[1][0] != b[1][0] and a[1][1] == b[1][1] for a, b in zip(first, other, strict=True))
    assert read(Noisy(0.0, torch.Generator())) == []  # its own numbers differ each time


def test_the_number_of_a_loader_that_is_gone_is_not_given_again() -> None:
    """A script may make one for each epoch."""
    loaders = Loaders()
    assert [loaders.number(DataLoader(Noisy(0.0))) for _ in range(3)] == [0, 1, 2]
    kept = DataLoader(Noisy(0.0))
    assert [loaders.number(kept) for _ in range(2)] == [3, 3]


def test_an_evaluation_gives_no_samples(tmp_path: Path) -> None:
    """Nor does a pass that nothing was trained on."""

    def evaluates(facts: Facts) -> None:
        other = msgspec.structs.replace(facts.a_pass(0), rows=("x", "y"), live=False, batches=())
        facts.passes = [other, facts.a_pass(1)]

    assert samples.disjoint_samples(make(tmp_path, evaluates)).verdict == "pass"


AHEAD = """
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.randn(3), torch.ones(3)
class Model(torch.nn.Linear):
    def forward(self, x, mask):
        return super().forward(x * mask)
model = Model(3, 2)
optimizer = optimizer_of(model)
batches = iter(torch.utils.data.DataLoader(Texts(), batch_size=2))
for step in range(2):
    optimizer.zero_grad()
    for x, mask in [next(batches) for _ in range(2)]:
        model(x, mask).square().mean().backward()
    optimizer.step()
"""


def test_a_batch_is_not_known_by_what_several_have(tmp_path: Path) -> None:
    """Those of a step are loaded before its passes, and their masks are alike."""
    job = recorded(AHEAD, tmp_path, steps=2)
    had = [[one.batches for one in job.records[0, step].passes] for step in job.steps]
    assert had == [[((0, 0, 0),), ((0, 0, 1),)], [((0, 0, 2),), ((0, 0, 3),)]]


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
    result = samples.disjoint_samples(job)
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
def test_samples_are_read_as_recorded(parts: tuple[str, ...], fails: bool, tmp_path: Path) -> None:
    job = make(tmp_path, apart)
    alone = reference(job, tmp_path)
    of_ranks = (("same", "same"), parts)
    reads = tuple(
        SampleComparison(rank=r, parts=found, sizes=(40, 4)) for r, found in enumerate(of_ranks)
    )
    replayed = msgspec.structs.replace(alone.replayed, reads=reads)
    (result,) = against.contents(dataclasses.replace(alone, replayed=replayed))
    assert result.verdict == ("fail" if fails else "pass")
    named = [one.cause for one in causes.diagnose(job, [result])]
    assert named == (["sample-content-differs"] if fails else [])
