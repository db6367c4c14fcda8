"""What a model returns: how it is seen, recorded for each sample, and compared."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distcheck.contract import Batch
from distcheck.judge.checks import outputs as check
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.forms import ExpectedOutputs, WithinNorm
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.recordings.traces.reader import TraceReader
from distcheck.recordings.traces.writer import TraceWriter
from distcheck.records import Case, CheckResult, ModelLayout, TensorSpec
from distcheck.records.layers import NO_OUTPUTS
from distcheck.records.mesh import Mesh
from distcheck.training.losses import LossOfShard
from distcheck.training.outputs import MOST_NUMBERS, outputs_per_sample, record_outputs
from distcheck.training.recorder import TraceRecorder

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (torch.zeros(4, 3), (4, 3)),
        (torch.zeros(4, 5, 2), (4, 10)),
        (torch.zeros(4), (4, 1)),
        ({"logits": torch.zeros(4, 3), "loss": torch.zeros(())}, (4, 3)),
        ((torch.zeros(4, 3), torch.zeros(4, 2)), (4, 5)),
        ((torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.int64)), (4, 3)),
        (torch.zeros(4, 2 * MOST_NUMBERS + 1), (4, -(-(2 * MOST_NUMBERS + 1) // 3))),
    ],
)
def test_each_sample_has_a_row(made: Any, shape: tuple[int, ...]) -> None:
    rows = outputs_per_sample(made, 4)
    assert rows is not None
    assert rows.shape == shape


@pytest.mark.parametrize("made", [torch.zeros(()), torch.zeros(8, 3), torch.zeros(4, 0), None, "a"])
def test_what_has_no_row_for_each_sample_is_nothing(made: Any) -> None:
    assert outputs_per_sample(made, 4) is None


def test_a_look_at_calls_changes_nothing() -> None:
    model = nn.Linear(3, 2)
    before = torch.get_rng_state()
    with record_outputs(model, 4) as calls:
        made = model(torch.ones(4, 3))
        with torch.no_grad():
            right = made.clone()
            made.zero_()  # what is done to it later is not seen
        model(torch.ones(4, 3))
    assert not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), before)
    assert calls.rows is not None
    assert torch.equal(calls.rows, torch.cat([right, right], 1))
    with pytest.raises(RuntimeError), record_outputs(model, 4):
        model(torch.ones(4, 7))
    assert not model._forward_hooks


def batch_of(ids: list[int]) -> Batch:
    numbers = torch.tensor(ids)
    inputs = numbers.float().unsqueeze(1)
    return Batch(inputs=inputs, labels=numbers, ids=numbers, total=len(ids))


def test_a_loss_says_what_it_was_computed_of() -> None:
    seen: list[tuple[list[int], torch.Tensor | None]] = []
    model = nn.Linear(1, 2)
    loss_of = LossOfShard(
        lambda model, batch: model(batch.inputs).sum(), model,
        lambda ids, rows: seen.append((ids.tolist(), rows)),
    )  # fmt: skip
    loss_of(batch_of([3, 1]))
    loss_of.given(torch.ones(2, 5), batch_of([7, 8]))
    with torch.no_grad():  # a look on the side
        loss_of(batch_of([3, 1]))
        loss_of.given(torch.ones(2, 5), batch_of([7, 8]))
    (first, made), (second, given) = seen
    assert (first, second) == ([3, 1], [7, 8])
    assert made is not None
    assert torch.equal(made, model(batch_of([3, 1]).inputs).detach())
    assert given is not None
    assert torch.equal(given, torch.ones(2, 5))


LAYOUT = TraceLayout(
    world=2, steps=1, max_shard=3, model=ModelLayout(parameters=(), buffers=(), optimizer=()),
    outputs=(TensorSpec(name="outputs", shape=(3, 2), dtype="float32"),),
)  # fmt: skip


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, LAYOUT.total_bytes)
    yield fd
    os.close(fd)


Returned = list[tuple[list[int], torch.Tensor | None]]


def record(fd: int, rank: int, ids: list[int], returned: Returned) -> None:
    recorder = TraceRecorder(TraceWriter(fd, LAYOUT, rank), LAYOUT, CPU)
    model = nn.Sequential()
    recorder.reading(0, 0, torch.tensor(ids))
    for some, rows in returned:
        recorder.returned(torch.tensor(some), rows)
    recorder.updated(0, model, torch.optim.SGD([nn.Parameter(torch.ones(()))]), 0.0)


def rows_of(*numbers: int) -> torch.Tensor:
    return torch.tensor([[n, 10 * n] for n in numbers], dtype=torch.float32)


def test_rows_lie_where_their_samples_do(fd: int) -> None:
    record(fd, 0, [5, 2, 9], [([9], rows_of(9)), ([5, 2], rows_of(5, 2))])
    record(fd, 1, [4, 4], [([4], rows_of(4))])  # read twice
    reader = TraceReader(fd, LAYOUT)
    for rank, numbers in ((0, (5, 2, 9)), (1, (4, 4, 0))):
        found = reader.tensor(rank, Kind.OUTPUT, 0, 0)
        assert found is not None
        assert torch.equal(found, rows_of(*numbers))


@pytest.mark.parametrize(
    ("returned", "state"),
    [
        ([], EntryState.ABSENT),
        ([([1, 2], None)], EntryState.MALFORMED),
        ([([1], rows_of(1))], EntryState.MALFORMED),  # and nothing of the other
        ([([1, 2], torch.zeros(2, 3))], EntryState.MALFORMED),
        ([([1, 2], rows_of(1, 2).double())], EntryState.MALFORMED),
        ([([1, 2], rows_of(1, 2))], EntryState.STORED),
    ],
)
def test_a_bad_table_is_refused(fd: int, returned: Returned, state: EntryState) -> None:
    record(fd, 0, [1, 2], returned)
    assert TraceReader(fd, LAYOUT).entry(0, Kind.OUTPUT, 0, 0).state is state


def judged(fd: int, mesh: Mesh, expected: ExpectedOutputs) -> CheckResult:
    header: Any = SimpleNamespace(written=True)
    evidence = Evidence(
        case=Case(id="one", strategy="s", world=2, batch=3), facts=None, mesh=mesh,
        trace=TraceReader(fd, LAYOUT),
        expectations=(Expectation(step=0, headers=(header,), what=expected),),
    )  # fmt: skip
    tally = Tally("outputs", "full batch float32")
    check.compare(evidence, tally)
    return tally.result()


ONE_SHARD, TWO_SHARDS = Mesh((("tensor", 2),)), Mesh((("data", 2),))


def near(*expected: torch.Tensor, rounding: float = 0.0) -> ExpectedOutputs:
    forms = [WithinNorm(part, 0.5, rounding=rounding, why="it cancels") for part in expected]
    return ExpectedOutputs(tuple(forms))


def test_every_rank_is_compared_with_its_own_samples(fd: int) -> None:
    record(fd, 0, [5, 2, 9], [([5, 2, 9], rows_of(5, 2, 9))])
    record(fd, 1, [4, 1], [([4, 1], rows_of(4, 1))])
    right = near(rows_of(5, 2, 9), rows_of(4, 1))
    found = judged(fd, TWO_SHARDS, right)
    assert (found.verdict, found.compared.ranks, found.compared.elements) == ("pass", 2, 10)
    swapped = near(rows_of(5, 2, 9), rows_of(1, 4))
    found = judged(fd, TWO_SHARDS, swapped)
    assert (found.verdict, found.first and found.first.rank) == ("fail", 1)


@pytest.mark.parametrize(("rounding", "verdict"), [(0.0, "fail"), (0.9, "fail"), (1.1, "unknown")])
def test_what_may_be_rounding_is_unknown(fd: int, rounding: float, verdict: str) -> None:
    record(fd, 0, [1, 2], [([1, 2], rows_of(1, 2))])
    off = rows_of(1, 2)
    off[0, 0] += 1.0
    found = judged(fd, ONE_SHARD, near(off, rounding=rounding))
    assert found.verdict == verdict
    assert (found.reason == "it cancels") == (verdict == "unknown")


def test_ranks_without_outputs_are_left_to_those_that_have_some(fd: int) -> None:
    record(fd, 0, [1, 2], [])
    record(fd, 1, [1, 2], [([1, 2], rows_of(1, 2))])
    found = judged(fd, ONE_SHARD, near(rows_of(1, 2)))
    assert (found.verdict, found.compared.ranks, found.reason) == ("pass", 1, "")


def test_outputs_of_another_shape_are_unknown(fd: int) -> None:
    record(fd, 0, [1, 2], [([1, 2], torch.zeros(2, 3))])
    found = judged(fd, ONE_SHARD, near(rows_of(1, 2)))
    assert found.verdict == "unknown"
    assert "without the shape and dtype of one row per sample (2 float32)" in found.reason


def test_where_no_rank_has_any_it_is_said(fd: int) -> None:
    record(fd, 0, [1, 2], [])
    record(fd, 1, [1, 2], [])
    found = judged(fd, ONE_SHARD, near(rows_of(1, 2)))
    assert (found.compared.elements, found.reason) == (0, NO_OUTPUTS)
