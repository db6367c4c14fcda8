"""full batch float32 and float64: the whole batch in one process, beside ranks worked out one after
the other.
"""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch, Contract
from distcheck.errors import UsageError
from distcheck.judge.checks.comparison import compare_by_norm
from distcheck.judge.oracles.full_batch import FullBatchReference, loss_tolerance
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import Case
from distcheck.training.building import Ingredients, describe_model, open_ingredients
from distcheck.verification.inspection import inspect_workload
from distcheck.workloads.cells.samples import FEATURES, CellWorkload

SHARDS = [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]
IDS = [i for shard in SHARDS for i in shard]


class Norm(nn.Module):
    """A layer that normalizes, between two others."""

    def __init__(self, norm: nn.Module, *, columns: int = 8) -> None:
        super().__init__()
        self.inputs, self.norm, self.outputs = nn.Linear(FEATURES, 24), norm, nn.Linear(24, 4)
        self.columns = columns

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [n, 3, 8, 8] -> logits [n, 4]."""
        hidden = self.inputs(inputs.flatten(1))
        rows = self.norm(hidden.view(-1, self.columns)).view(len(inputs), 24)
        return cast("torch.Tensor", self.outputs(rows.tanh()))


class Plain(CellWorkload):
    """BatchNorm as everybody has it: one row for a sample."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Norm(nn.BatchNorm1d(24), columns=24)


class Sequences(CellWorkload):
    """BatchNorm over flattened sequences: three rows for a sample."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Norm(nn.BatchNorm1d(8))


class Frozen(CellWorkload):
    """BatchNorm in eval mode, as fine-tuning has it."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        class Tuned(Norm):
            def train(self, mode: bool = True) -> "Tuned":
                super().train(mode)
                self.norm.eval()
                return self

        return Tuned(nn.BatchNorm1d(24), columns=24)


class FrozenByTheScript(Plain):
    """The same, by the script."""

    def before_step(self, model: Norm, step: int) -> None:
        model.norm.eval()


class WithoutStatistics(FrozenByTheScript):
    """In eval mode, and with nothing to normalize by but the batch."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Norm(nn.BatchNorm1d(24, track_running_stats=False), columns=24)


class OwnNorm(nn.BatchNorm1d):
    """A forward of its own, which looks at the running statistics in training as well."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        assert self.running_mean is not None
        shifted = input - self.running_mean
        return super().forward(input).abs() + 0.1 * shifted


class OwnForward(CellWorkload):
    """BatchNorm of a class of its own."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Norm(OwnNorm(24), columns=24)


def opened(workload: type, dtype: str = "float64") -> Ingredients:
    case = Case(
        id="one", strategy="allreduce", world=2, batch=len(IDS), steps=1, dtype=dtype,
        workload=f"{workload.__module__}:{workload.__name__}",
    )  # fmt: skip
    return open_ingredients(case, b"", None)


def shifted(ingredients: Ingredients, rank: int) -> nn.Module:
    """The model as a rank has it: one and the same but for the running statistics."""
    model = ingredients.model()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(rank + 1)
    return model


def recorded(ingredients: Ingredients) -> TraceReader:
    """What those ranks have recorded of themselves before their first step."""
    models = [shifted(ingredients, rank) for rank in range(len(SHARDS))]

    def tensor(rank: int, kind: Kind, slot: int, index: int) -> torch.Tensor:
        held = models[rank].parameters() if kind is Kind.PARAMETER else models[rank].buffers()
        return list(held)[index].detach().clone()

    fake = SimpleNamespace(
        layout=SimpleNamespace(
            outputs=(), world=len(SHARDS), model=describe_model(ingredients, ingredients.model())
        ),
        header=lambda rank, step: SimpleNamespace(ids=SHARDS[rank], settings=0),
        entry=lambda rank, kind, slot, index: SimpleNamespace(order=0),
        tensor=tensor,
        ranks=range(len(SHARDS)),
    )
    return cast("TraceReader", fake)


def reference(ingredients: Ingredients) -> FullBatchReference:
    trace = recorded(ingredients)
    return FullBatchReference(ingredients, Contract(), trace, ingredients.model())


def rank_by_rank(ingredients: Ingredients) -> tuple[float, list[torch.Tensor]]:
    """The mean over all samples of what each rank has of its shard, by itself."""
    loss, sums = 0.0, [torch.zeros_like(p) for p in ingredients.model().parameters()]
    for rank, shard in enumerate(SHARDS):
        model = shifted(ingredients, rank)
        ingredients.prepare(model, 0)
        batch = ingredients.batch(torch.tensor(shard), len(IDS))
        own = ingredients.loaded.workload.loss(model, batch) * (len(shard) / len(IDS))
        own.backward()
        loss += float(own.detach())
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total += 0 if parameter.grad is None else parameter.grad
    return loss, sums


@pytest.mark.parametrize(
    ("workload", "by_the_batch"),
    [
        (Plain, True),
        (Sequences, True),
        (Frozen, False),
        (FrozenByTheScript, False),
        (WithoutStatistics, True),
        (OwnForward, True),
    ],
)
def test_batchnorm_on_the_whole_batch_equals_the_ranks(workload: type, by_the_batch: bool) -> None:
    """Each rank from running statistics of its own, which eval mode normalizes by."""
    ingredients = opened(workload)
    full, (loss, gradients) = reference(ingredients).run(0), rank_by_rank(ingredients)
    assert full.ghost is by_the_batch
    assert full.loss == pytest.approx(loss, rel=1e-12)
    for actual, expected in zip(full.gradients, gradients, strict=True):
        assert actual is not None
        assert torch.allclose(actual, expected, rtol=0, atol=1e-12)


def test_the_models_own_layers_and_statistics_are_as_they_were() -> None:
    ingredients = opened(Sequences)
    model = cast("Norm", ingredients.model())
    held = list(model.buffers())
    FullBatchReference(ingredients, Contract(), recorded(ingredients), model).run(0)
    assert all(now is then for now, then in zip(model.buffers(), held, strict=True))
    assert "forward" not in model.norm.__dict__
    assert torch.equal(held[0], torch.ones(8, dtype=torch.float64))  # as rank 0 recorded it


def test_every_rank_starts_from_the_statistics_that_its_contract_says() -> None:
    ingredients = opened(Frozen)
    trace, model = recorded(ingredients), ingredients.model()
    local = FullBatchReference(ingredients, Contract(), trace, model).run(0)
    sent = FullBatchReference(ingredients, Contract(buffers="rank 0"), trace, model).run(0)
    assert local.loss != pytest.approx(sent.loss, rel=1e-6)


class TimeMajor(Sequences):
    """Three rows for a sample, the first of every sample first."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        class Turned(Norm):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                steps = self.inputs(inputs.flatten(1)).view(-1, 3, 8).transpose(0, 1)
                rows = self.norm(steps.reshape(-1, 8)).view(3, -1, 8)
                return cast("torch.Tensor", self.outputs(rows.transpose(0, 1).reshape(-1, 24)))

        return Turned(nn.BatchNorm1d(8))


class Some(Sequences):
    """Only some rows are normalized."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        class Picking(Norm):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                rows = self.inputs(inputs.flatten(1)).view(-1, 8)
                picked = rows.detach()[:, 0] > 0
                rows = rows.index_put((picked.nonzero().flatten(),), self.norm(rows[picked]))
                return cast("torch.Tensor", self.outputs(rows.view(-1, 24)))

        return Picking(nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("workload", "apart"), [(Plain, False), (Sequences, False), (TimeMajor, True), (Some, True)]
)
def test_rows_that_are_not_sample_after_sample_are_seen(workload: type, apart: bool) -> None:
    facts = inspect_workload(opened(workload))
    assert facts.normalizes_batches
    assert facts.rows_apart is apart


def test_batchnorm_in_eval_mode_normalizes_nothing_by_the_batch() -> None:
    assert not inspect_workload(opened(Frozen)).normalizes_batches
    assert inspect_workload(opened(FrozenByTheScript)).normalizes_batches  # at some step it may
    assert inspect_workload(opened(WithoutStatistics)).normalizes_batches


def test_rows_of_nobody_are_not_guessed() -> None:
    with pytest.raises(NotRecordedError, match="the rank of each row is not recorded"):
        reference(opened(Some)).run(0)


class Exchanging(CellWorkload):
    """Its forward pass asks the other ranks."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Norm(nn.SyncBatchNorm(24), columns=24)


def test_a_batchnorm_over_all_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="norm is a SyncBatchNorm, which synchronizes statistics"):
        inspect_workload(opened(Exchanging))


class Rounding(CellWorkload):
    """An autocast, in the workload's own loss."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, classes))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch.inputs)
        return F.cross_entropy(logits.float(), batch.labels)


class OneShortLayer(CellWorkload):
    """A layer in a dtype of its own."""

    own_dtypes = True

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        first = nn.Linear(FEATURES, 8, dtype=torch.float16)
        return nn.Sequential(nn.Flatten(), first, nn.Linear(8, classes))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        flatten, first, second = cast("nn.Sequential", model)
        hidden = first(flatten(batch.inputs).to(torch.float16))
        return F.cross_entropy(second(hidden.float()), batch.labels)


class Constants(Plain):
    """Short constants round nothing."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, batch) * torch.tensor(0.5, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("workload", "dtype", "found"),
    [
        (Plain, "float32", {"float32"}),
        (Plain, "float64", {"float64"}),
        (Rounding, "float32", {"float32", "bfloat16"}),
        (Rounding, "float64", {"float64", "float32"}),
        (OneShortLayer, "float32", {"float32", "float16"}),
        (Constants, "float32", {"float32"}),
    ],
)
def test_what_a_workload_rounds_to_is_seen(workload: type, dtype: str, found: set[str]) -> None:
    assert set(inspect_workload(opened(workload, dtype)).rounds_to) == found


def _first_logit(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cast("torch.Tensor", model(batch.inputs))[:, 0]


class BothSigns(Plain):
    """Losses that cancel, and BatchNorm in training."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return _first_logit(model, batch).mean()


class OneSign(Plain):
    """Losses that add up."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return -_first_logit(model, batch).square().mean()


class NoMean(Plain):
    """A loss that no samples have by themselves."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return _first_logit(model, batch).sum() - 5


class OfSeveral(Plain):
    """A loss that is not defined for one sample."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if len(batch.ids) < 2:
            raise ValueError("two are needed")
        return _first_logit(model, batch).mean()


def terms(ingredients: Ingredients) -> torch.Tensor:
    """The samples' first logits, rank by rank."""
    parts = []
    for rank, shard in enumerate(SHARDS):
        batch = ingredients.batch(torch.tensor(shard), len(IDS))
        parts.append(_first_logit(shifted(ingredients, rank), batch).detach())
    return torch.cat(parts)


def magnitude(workload: type) -> tuple[float, float, torch.Tensor]:
    """What the terms of a loss are said to be, the loss, and the samples' first logits."""
    ingredients = opened(workload)
    asked = reference(ingredients)
    loss = asked.run(0).loss
    return asked.loss_magnitude(0, loss), loss, terms(ingredients)


def test_losses_of_both_signs_are_measured_one_by_one() -> None:
    found, loss, logits = magnitude(BothSigns)
    assert found == pytest.approx(float(logits.abs().mean()), rel=1e-9)
    assert found > 1.1 * abs(loss)


def test_losses_of_one_sign_get_no_more_than_their_mean() -> None:
    found, loss, logits = magnitude(OneSign)
    assert loss == pytest.approx(-float(logits.square().mean()))
    assert found == pytest.approx(abs(loss), rel=1e-12)


@pytest.mark.parametrize("workload", [NoMean, OfSeveral])
def test_a_loss_whose_terms_are_unknown_gets_no_more_than_itself(workload: type) -> None:
    found, loss, _ = magnitude(workload)
    assert found == abs(loss)


def test_the_mean_of_losses_that_cancel_rounds_by_their_size() -> None:
    """Centered advantages: right means of float32, shard by shard, of 256 samples of 4 ranks."""
    beyond = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        losses = torch.randn(256, generator=generator)
        losses -= losses.mean()
        whole = float(losses.mean())
        mean = sum(float(shard.mean()) for shard in losses.split(64)) / 4
        assert abs(mean - whole) <= loss_tolerance(
            "full batch float32", float(losses.double().abs().mean())
        )
        beyond += abs(mean - whole) > loss_tolerance("full batch float32", whole)
    assert beyond > 20


def test_an_infinity_is_owed_as_one() -> None:
    required = torch.tensor([float("inf"), 3.0, 4.0])
    assert compare_by_norm(required, required, 0.0).ok
    near = torch.tensor([float("inf"), 3.0, 4.5])
    assert compare_by_norm(near, required, 0.5).ok
    assert not compare_by_norm(near, required, 0.4).ok
    for wrong in (1.0, float("-inf"), float("nan")):
        assert not compare_by_norm(torch.tensor([wrong, 3.0, 4.0]), required, 1e30).ok
