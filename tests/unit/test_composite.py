"""The composite model has what real ones have, and every tensor of it would show a mistake."""

from itertools import combinations, pairwise

import pytest
import torch

from distcheck.contract import Batch
from distcheck.errors import UsageError
from distcheck.judge.oracles import rounding
from distcheck.training.loading import load_workload
from distcheck.workloads.composite import LEARNING_RATE, Composite, CompositeWorkload, workload

OF_FEW_SAMPLES = ("expert.weight", "expert.bias")


def built(dtype: torch.dtype = torch.float32) -> Composite:
    torch.manual_seed(7)
    samples = workload.samples()
    model = workload.model(sample_shape=samples.shape, classes=samples.classes)
    assert isinstance(model, Composite)
    return model.to(dtype)


def batch(ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> Batch:
    inputs, labels = workload.samples().read(ids, train=True, dtype=dtype)
    return Batch(inputs=inputs, labels=labels, ids=ids, total=len(ids))


def shards(seed: int, world: int = 4) -> list[dict[str, torch.Tensor]]:
    """The gradients of each rank at the first step, 256 samples over all."""
    model = built()
    drawn = torch.randperm(50_000, generator=torch.Generator().manual_seed(seed))[:256]
    found = []
    for ids in drawn.tensor_split(world):
        model.zero_grad()
        workload.loss(model, batch(ids)).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return found


def test_it_may_have_no_parameter_of_five_dimensions() -> None:
    """Which channels_last cannot take; all else is as it was."""
    other = load_workload("composite:no-volume").workload
    model = other.model(sample_shape=(1,), classes=10)
    usual = load_workload("composite").workload.model(sample_shape=(1,), classes=10)
    assert {p.dim() for p in usual.parameters()} - {p.dim() for p in model.parameters()} == {5}
    names = [{name for name, _ in m.named_parameters()} for m in (model, usual)]
    assert names[0] == names[1]
    model.to(memory_format=torch.channels_last)


def test_it_may_have_a_vector_in_place_of_its_scalar() -> None:
    other = load_workload("composite:no-scalar").workload
    samples = workload.samples()
    model = other.model(sample_shape=samples.shape, classes=samples.classes)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    whole = {name: tuple(p.shape) for name, p in built().named_parameters()}
    assert {name for name in whole if whole[name] != shapes[name]} == {"gain"}
    assert min(map(len, shapes.values())) == 1
    with pytest.raises(UsageError, match="known are composite:no-scalar and"):
        load_workload("composite:without")


def test_it_has_what_real_models_have() -> None:
    model = built()
    parameters = dict(model.named_parameters())
    shapes = [tuple(p.shape) for p in parameters.values()]
    assert len(parameters) == 73
    assert {p.dim() for p in parameters.values()} == {0, 1, 2, 3, 4, 5}
    assert min(p.numel() for p in parameters.values()) == 1
    assert max(p.numel() for p in parameters.values()) > 2**20
    assert max(shapes.count(shape) for shape in shapes) >= 16
    assert max(name.count(".") for name in parameters) >= 3
    assert {(3,), (1, 3), (1,), ()} <= set(shapes)
    kinds = {type(module).__name__ for module in model.modules()}
    assert kinds >= {"Embedding", "LayerNorm", "GroupNorm", "BatchNorm2d", "Conv1d", "Conv2d",
                     "Conv3d", "ConvTranspose2d", "Linear"}  # fmt: skip
    assert any(isinstance(m, torch.nn.Conv2d) and m.kernel_size == (1, 1) for m in model.modules())
    buffers = dict(model.named_buffers())
    counts = [name for name, buffer in buffers.items() if buffer.dtype == torch.int64]
    assert {name.rpartition(".")[2] for name in counts} == {"seen", "num_batches_tracked"}
    assert set(buffers) - set(model.state_dict()) == {"seen"}


def test_groups_differ_and_no_two_steps_in_a_row_have_one_rate() -> None:
    made = workload.optimizer(workload.groups(built().parameters()))
    rates = []
    for step in range(12):
        workload.schedule(made, step)
        rates.append(tuple(group["lr"] for group in made.param_groups))
    assert all(weights == 2 * others for weights, others in rates)
    assert rates[0] == (0.0, 0.0)  # a warm-up's first
    assert all(one != two for one, two in pairwise(rates))
    assert 0 < rates[2][0] < rates[1][0] / 9
    assert [group["weight_decay"] > 0 for group in made.param_groups] == [True, False]


def test_two_dtypes_have_two_optimizers() -> None:
    """And both follow the schedule, each at rates of its own, groups or none."""
    for dtype, kind, rate in (
        (torch.float32, torch.optim.SGD, LEARNING_RATE / 10),
        (torch.float64, torch.optim.AdamW, 0.0),
    ):
        parameters = list(built(dtype).parameters())
        assert type(workload.optimizer(parameters)) is kind
        made = workload.optimizer(workload.groups(parameters))
        assert type(made) is kind
        workload.schedule(made, 2)
        assert made.param_groups[0]["lr"] == pytest.approx(rate)
        workload.schedule(made, 0)
        updates = made.param_groups[0]["lr"] > 0
        assert updates == (kind is torch.optim.AdamW)


def test_both_ends_of_the_largest_tensor_have_a_gradient() -> None:
    """And seven equal pieces do not cover it, so that what drops the rest shows."""
    model = built()
    workload.loss(model, batch(torch.arange(4))).backward()
    words = model.get_parameter("features.text.embedding.weight")
    assert words.numel() % 7
    assert words.grad is not None
    assert words.grad[0].any()
    assert words.grad[-1].any()


def test_a_lost_rank_shows_in_every_tensor() -> None:
    """By how many times its bound, where it shows most; and ranks and twins are no copies."""
    found = shards(0)
    assert len(found[0]) == len(list(built().parameters()))
    for name, first in found[0].items():
        parts = [shard[name] for shard in found]
        if name in OF_FEW_SAMPLES:
            continue
        bound = rounding.interval(parts, [0.25] * 4, rescaled=False).bound
        for part in parts:
            assert float((0.25 * part.double().abs() / bound).nan_to_num().max()) > 1e4, name
        for one, two in combinations(parts, 2):
            assert float((one - two).norm()) > 1e-4 * float(first.norm()), name
    for one, two in combinations(found[0], 2):
        if found[0][one].shape == found[0][two].shape:
            apart = (found[0][one] - found[0][two]).norm() / found[0][one].norm()
            assert apart > 1e-2 or one in OF_FEW_SAMPLES, (one, two)


def test_some_ranks_have_nothing_for_the_expert() -> None:
    """Over 12 shards of 64 samples; a layer without samples has a gradient all the same."""
    norms = [
        [float(shard[name].norm()) for name in OF_FEW_SAMPLES]
        for seed in range(3)
        for shard in shards(seed)
    ]
    assert any(norm == [0.0, 0.0] for norm in norms)
    assert any(min(norm) > 0 for norm in norms)


def test_masks_are_drawn_but_in_float64() -> None:
    for dtype, draws in ((torch.float32, True), (torch.float64, False)):
        model, state = built(dtype), torch.get_rng_state()
        workload.loss(model, batch(torch.arange(4), dtype))
        assert torch.equal(state, torch.get_rng_state()) != draws


def test_tokens_are_exact_in_bfloat16() -> None:
    dtype, ids = torch.bfloat16, torch.arange(16)
    short, whole = batch(ids, dtype).inputs[:, :13], batch(ids, torch.float64).inputs[:, :13]
    assert torch.equal(short.double(), whole)
    model = built(dtype)
    CompositeWorkload().loss(model, batch(ids, dtype)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
