"""The audit of a guard: right exchanges pass, and what all ranks get wrong alike is found."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import distcheck
from distcheck.errors import UsageError
from distcheck.job.guard import audit, explaining
from distcheck.job.guard.audit import Audit
from distcheck.job.guard.guarding import DivergenceError, Guard, GuardWarning
from distcheck.machine.numerics import unit_roundoff

ROUNDOFF = unit_roundoff(torch.float32)
Exchange = Callable[[nn.Module, int, int], None]  # model, rank, step


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])


def train(
    rank: int, exchange: Exchange, *, passes: int = 1, steps: int = 8, bare: bool = False,
    **about: Any,
) -> tuple[nn.Module, Guard | None]:  # fmt: skip
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    guard = None
    if not bare:
        guard = distcheck.guard(
            optimizer, model=model, every=4, save=None, randomness=False, samples=False,
            **{"audit": True, **about},
        )  # fmt: skip
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for _ in range(passes):
            F.mse_loss(model(torch.randn(6, 16)), torch.randn(6, 16)).backward()
        exchange(model, rank, step)
        optimizer.step()
    if guard is not None:
        guard.finish()
        guard.close()
    return model, guard


def mean(model: nn.Module, rank: int, step: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def clipped(model: nn.Module, rank: int, step: int) -> None:
    mean(model, rank, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def weighted(model: nn.Module, rank: int, step: int) -> None:
    """As by samples: rank 1 counts twice."""
    total = dist.get_world_size() + 1
    for parameter in model.parameters():
        parameter.grad *= (1 + (rank == 1)) / total
        dist.all_reduce(parameter.grad)


def summed(model: nn.Module, rank: int, step: int) -> None:
    """Right where the loss is divided by the number of ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def in_bfloat16(model: nn.Module, rank: int, step: int) -> None:
    for parameter in model.parameters():
        wire = parameter.grad.bfloat16()
        dist.all_reduce(wire)
        parameter.grad = wire.float() / dist.get_world_size()


def padding_taken_for_gradients(model: nn.Module, rank: int, step: int) -> None:
    mean(model, rank, step)
    list(model.parameters())[3].grad[-2:] = 0


def half_of_one(model: nn.Module, rank: int, step: int) -> None:
    mean(model, rank, step)
    list(model.parameters())[2].grad /= 2


def last_rank_forgotten(model: nn.Module, rank: int, step: int) -> None:
    world = dist.get_world_size()
    for parameter in model.parameters():
        parameter.grad *= (rank != world - 1) * world / (world - 1)
    mean(model, rank, step)


def first_rank_for_all(model: nn.Module, rank: int, step: int) -> None:
    """Replicas stay alike, by the gradients of one rank: nothing that a replica shows."""
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, 0)


def stale(model: nn.Module, rank: int, step: int) -> None:
    """The exchange of the step before."""
    mean(model, rank, step)
    for parameter in model.parameters():
        now = getattr(parameter, "before", torch.zeros_like(parameter))
        parameter.before = parameter.grad.clone()  # type: ignore[attr-defined]
        parameter.grad.copy_(now)


def once(model: nn.Module, rank: int, step: int) -> None:
    mean(model, rank, step)
    if step == 4:
        list(model.parameters())[5].grad[3] *= 1.5


@pytest.mark.world([2, 3], reuse=True)
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("exchange", [mean, clipped, summed, weighted], ids=lambda e: e.__name__)
def test_a_right_exchange_passes(world: Any, exchange: Exchange, passes: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, guard = train(world.rank, exchange, passes=passes)
    assert guard is not None
    assert (guard.checks, guard.divergences) == (3, [])
    said = [one for one in guard.remarks if "ranks have weights" in one]
    assert len(said) == (exchange is weighted), guard.remarks
    assert len(guard.remarks) == len(said), "something was audited"
    alone, _ = train(world.rank, exchange, passes=passes, bare=True)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other), "an audited training is the training"


@pytest.mark.world(2, reuse=True)
def test_ddp_passes(world: Any) -> None:
    wrapped: list[nn.Module] = []

    def nothing(model: nn.Module, rank: int, step: int) -> None:
        """DDP exchanges in backward."""

    model = build()
    wrapped.append(nn.parallel.DistributedDataParallel(model))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(world.rank)
    guard = distcheck.guard(optimizer, every=4, save=None, audit=True, samples=False)
    for _ in range(8):
        optimizer.zero_grad()
        for last in (False, True):
            with wrapped[0].no_sync() if not last else warnings.catch_warnings():  # type: ignore[operator,union-attr]
                F.mse_loss(wrapped[0](torch.randn(6, 16)), torch.randn(6, 16)).backward()
        optimizer.step()
    guard.finish()
    guard.close()
    assert (guard.divergences, guard.remarks, guard.checks) == ([], [], 3)


@pytest.mark.world(3, reuse=True)
@pytest.mark.parametrize(
    ("exchange", "cause", "said"),
    [
        (padding_taken_for_gradients, "wrong-reduction",
         "2.bias: the gradient passed to the optimizer is"),
        (half_of_one, "wrong-reduction", "2.weight: the gradient passed to the optimizer is"),
        (last_rank_forgotten, "dropped-rank",
         "passed to the optimizer do not include those of rank 2"),
        (first_rank_for_all, "dropped-rank",
         "passed to the optimizer do not include those of ranks 1, 2"),
        (stale, "wrong-reduction",
         "not a weighted mean of the ranks' gradients (7 of 8 parameters)"),
        (once, "wrong-reduction", "not reproduced at the next step"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_common_mistake_is_found(world: Any, exchange: Exchange, cause: str, said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, blind = train(world.rank, exchange, audit=False)
        assert blind is not None
        assert blind.divergences == [], "replicas agree, and a guard without an audit sees nothing"
        with pytest.raises(DivergenceError) as error:
            train(world.rank, exchange)
    found = error.value.divergence
    assert [one.cause for one in explaining.causes(found)] == [cause]
    assert said in found.text
    assert found.step == (4 if exchange is once else 2)
    assert found.findings[0].when == ("once" if exchange is once else "again")


def shards(
    rank: int, shape: tuple[int, ...], *, wrong: str = "", dtype: torch.dtype | None = None,
    reduces_in: torch.dtype | None = None, passes: int = 1, fresh: bool = True, dry: bool = False,
) -> Guard:  # fmt: skip
    """Trains a model that fully_shard divides, of sizes that ranks do not divide evenly."""
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(9, 9), nn.Tanh())])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduces_in)
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(100 + rank)
    guard = distcheck.guard(
        optimizer, every=4, save=None, randomness=False, samples=False, audit=True
    )
    for step in range(8):
        optimizer.zero_grad(set_to_none=fresh)
        if dry:  # a pass whose gradients are cleared before the step
            model(torch.randn(6, 9)).square().mean().backward()
            optimizer.zero_grad(set_to_none=fresh)
        for number in range(passes):
            model.set_requires_gradient_sync(number == passes - 1 or step % 4 == 3)  # type: ignore[operator]
            model(torch.randn(6, 9)).square().mean().backward()
        if wrong == "half":
            model[2].weight.grad.mul_(0.5)
        if wrong == "end":  # what the last rank that has some of a gradient has is lost
            model[2].weight.grad.to_local().mul_(rank != 2)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    guard.finish()
    guard.close()
    return guard


@pytest.mark.world(4, reuse=True)
@pytest.mark.parametrize(
    "shape",
    [pytest.param((4,), id="shards"), pytest.param((2, 2), id="replicas", marks=pytest.mark.sweep)],
)
def test_what_fully_shard_divides_is_audited(world: Any, shape: tuple[int, ...]) -> None:
    short = {"dtype": torch.bfloat16, "reduces_in": torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GuardWarning)
        for about in (
            {},
            short,
            {"reduces_in": torch.bfloat16},
            {"passes": 2},
            {"passes": 2, **short},
            {"fresh": False},
        ):
            guard = shards(world.rank, shape, **about)  # type: ignore[arg-type]
            assert (guard.divergences, guard.remarks, guard.checks) == ([], [], 3), about
        guard = shards(world.rank, shape, dry=True)
        assert (guard.divergences, guard.remarks) == ([], [])
        # Cleared by zeros, which a rank's part may have by itself: such a step is not compared.
        guard = shards(world.rank, shape, dry=True, fresh=False)
        assert guard.divergences == []
        assert "an audit compared nothing" in guard.remarks[0]
        for wrong in ("half", "end")[: 1 + (len(shape) == 1)]:  # replicas would differ
            with pytest.raises(DivergenceError) as error:
                shards(world.rank, shape, wrong=wrong)
            found = error.value.divergence
            assert [one.cause for one in explaining.causes(found)] == ["wrong-reduction"], (
                found.text
            )
            assert "2.weight: the gradient passed to the optimizer is" in found.text
            assert "(1 of 8 parameters)" in found.text


@pytest.mark.world(2, reuse=True)
def test_a_narrow_wire_is_told(world: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, guard = train(world.rank, in_bfloat16, audit="bfloat16")
        assert guard is not None
        assert guard.divergences == []
        with pytest.raises(DivergenceError):
            train(world.rank, in_bfloat16)


def test_a_dtype_of_the_wire_is_one_of_two() -> None:
    with pytest.raises(UsageError, match='audit must be True, "bfloat16" or "float16", not'):
        distcheck.guard(torch.optim.SGD(build().parameters(), lr=0.1), audit="fp8")


def measured(world: int, count: int, elements: int = 500) -> list[list[list[float]]]:
    """What ranks measure of the mean of random gradients."""
    torch.manual_seed(1)
    rows: list[list[list[float]]] = [[] for _ in range(world)]
    made = Audit(torch.optim.SGD([torch.zeros(elements, requires_grad=True)] * 1, lr=1.0), None)
    for _ in range(count):
        own = [torch.randn(elements) for _ in range(world)]
        got = sum(own[1:], own[0]) / world
        for rank, gradient in enumerate(own):
            given, size = made.projected(gradient, made.leaves[0]).tolist()
            rows[rank].append([given, size, 1.0, float(made.projected(got, made.leaves[0])[0])])
    return rows


def test_one_element_in_five_hundred_shows() -> None:
    """An error of one element is above the bound for all but the smallest."""
    rows = measured(4, 12)
    found = audit.judge(rows, [ROUNDOFF] * 12)
    assert found is not None
    assert (found.wrong, found.compared, found.is_even) == ({}, 12, True)
    for rank in range(4):
        rows[rank][7][3] += 0.01
    found = audit.judge(rows, [ROUNDOFF] * 12)
    assert found is not None
    assert found.wrong == {7: (0, 1, 2, 3)}


@pytest.mark.parametrize("count", [3, 12])
def test_the_largest_gradient_does_not_make_the_others_wrong(count: int) -> None:
    rows = measured(2, count)
    for rank in range(2):
        for n in (0, 1, 3):
            rows[rank][2][n] *= 1e4  # given, its size, got
        rows[rank][2][3] *= 0.9
    found = audit.judge(rows, [ROUNDOFF] * count)
    assert found is not None
    assert found.wrong.keys() == {2}


def test_weights_are_fitted_where_there_are_enough_gradients() -> None:
    rows = measured(4, 12)
    shares = (0.4, 0.3, 0.2, 0.1)
    for n in range(12):
        got = sum(share * rows[rank][n][0] for rank, share in enumerate(shares))
        for rank in range(4):
            rows[rank][n][3] = got
    found = audit.judge(rows, [ROUNDOFF] * 12)
    assert found is not None
    assert found.weights == pytest.approx(shares)
    assert (found.wrong, found.is_even, found.left_out) == ({}, False, ())
    few = audit.judge([one[:4] for one in rows], [ROUNDOFF] * 4)
    assert few is not None
    assert few.wrong, "four gradients fit any four weights, so that these show nothing"


def test_what_is_absent_or_zero_is_not_compared() -> None:
    rows = measured(2, 3)
    for rank in range(2):
        rows[rank][0][3] = math.nan
        rows[rank][1] = [0.0, 0.0, 0.0, 0.0]
    found = audit.judge(rows, [ROUNDOFF] * 3)
    assert found is not None
    assert (found.compared, found.wrong) == (1, {})
    assert audit.judge([one[:2] for one in rows], [ROUNDOFF] * 2) is None


def test_a_bundle_says_what_was_found(tmp_path: Path) -> None:
    """The fields of an audit are read again from what a guard saves."""
    from distcheck.job.guard import records
    from distcheck.job.guard.records import Divergence, ReplicaFinding

    found = ReplicaFinding(kind="exchange", first="a", groups=((0,),), what="other", when="once")
    whole = Divergence(step=4, agreed_at=2, every=4, ranks=(0, 1), findings=(found,))
    assert records.read(records.write(whole, tmp_path)).findings == (found,)
