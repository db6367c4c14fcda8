"""The ledger of collectives: what is read of the flight recorder, and what it shows."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distcheck.job.inside import rank
from distcheck.judge.diagnosis.communication import warn_of_ledger
from distcheck.records.ledger import FSDP, Ledger, LedgerRow, table_of
from distcheck.worlds import flight
from distcheck.worlds.ledger import StepLedger
from distcheck.worlds.step_calls import StepCalls, storage_range

TORCH = torch.__path__[0]
C10D = (f"{TORCH}/distributed/distributed_c10d.py", "all_reduce")
BACKWARD = (f"{TORCH}/autograd/graph.py", "_engine_run_backward")
SCRIPT = ("/home/me/train.py", "main")
OF_FSDP = (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param.py", "_get_grad_inner_tensor")
DTENSOR = (f"{TORCH}/distributed/tensor/_redistribute.py", "redistribute")


def entry(number: int, *frames: tuple[str, str], **about: Any) -> dict[str, Any]:
    found = {
        "record_id": number, "profiling_name": "gloo:all_reduce", "input_sizes": [[3, 4]],
        "output_sizes": [[3, 4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
        "process_group": ("0", "default_pg"),
        "frames": [{"filename": file, "name": name, "line": 7} for file, name in frames],
    }  # fmt: skip
    return {**found, **about}


def ledger_of(monkeypatch: pytest.MonkeyPatch, *since: dict[str, Any]) -> Ledger | None:
    entries = [entry(5, C10D, SCRIPT)]
    monkeypatch.setattr(flight, "entries", lambda **_: list(entries))
    found = StepLedger()
    found.begin()
    entries += since
    return found.taken(3, [torch.ones(3, 4, requires_grad=True), torch.ones(9)])


def test_equal_calls_are_one_row_and_earlier_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"input_dtypes": ["BFloat16"]}
    calls = [entry(6, C10D, SCRIPT), entry(7, C10D, SCRIPT), entry(8, C10D, SCRIPT, **short)]
    found = ledger_of(monkeypatch, *calls)
    assert found is not None
    one = LedgerRow(operation="all_reduce", group="world", ranks=0, dtype="float32", calls=2,
                    bytes=96, place="/home/me/train.py:7")  # fmt: skip
    assert found.rows == (one, replace(one, dtype="bfloat16", calls=1, bytes=24))
    assert (found.gradients, found.gradient_bytes, found.left_out) == (12, 48, False)
    assert found.in_words() == (
        "step 3: 3 collectives of 120 B; 120 B are reduced, 2.5x the bytes of the gradients"
    )
    assert table_of(found)[0] == [
        "all_reduce", "world (0)", "float32", "2", "96 B", "/home/me/train.py:7"
    ]  # fmt: skip


def test_calls_that_the_recorder_lost_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ledger_of(monkeypatch, entry(9, C10D, SCRIPT))
    assert found is not None
    assert found.in_words().endswith("; earlier collectives of the step are not known")


def test_an_empty_recorder_is_no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger_of(monkeypatch) is None


@pytest.mark.parametrize(
    ("frames", "library"),
    [
        ([C10D, SCRIPT], ""),
        ([BACKWARD, SCRIPT], "backward"),  # C++ code of DistributedDataParallel
        ([C10D, DTENSOR, OF_FSDP, BACKWARD, SCRIPT], FSDP),
        # A layer of the script that FSDP1 calls communicates by itself.
        ([C10D, SCRIPT, (f"{TORCH}/nn/modules/module.py", "_call_impl"), OF_FSDP], ""),
        ([C10D, (f"{TORCH}/nn/modules/_functions.py", "forward"), OF_FSDP], ""),
    ],
)
def test_the_caller_is_the_code_that_requests_it(
    monkeypatch: pytest.MonkeyPatch, frames: list[tuple[str, str]], library: str
) -> None:
    found = ledger_of(monkeypatch, entry(6, *frames))
    assert found is not None
    assert found.rows[0].library == library


def test_the_operation_is_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo reduces and scatters by an all-reduce."""
    inner, outer = (C10D[0], "_allreduce"), (C10D[0], "reduce_scatter_tensor")
    found = ledger_of(monkeypatch, entry(6, inner, (C10D[0], "wrapper"), outer, SCRIPT))
    assert found is not None
    assert found.rows[0].operation == "reduce_scatter_tensor"


def test_communication_of_distcheck_is_not_the_strategys(monkeypatch: pytest.MonkeyPatch) -> None:
    own = (rank.__file__, "gather")
    assert ledger_of(monkeypatch, entry(6, C10D, own, SCRIPT)) is None


def row(**about: Any) -> LedgerRow:
    given = {"operation": "all_reduce", "dtype": "bfloat16", "library": FSDP, **about}
    return LedgerRow(group="tp", ranks=2, calls=4, bytes=64, **given)


@pytest.mark.parametrize(
    ("one", "policy", "causes"),
    [
        (row(), "float32", ["reduced-in-short-dtype"]),
        (row(operation="reduce_scatter_tensor"), "float32", ["reduced-in-short-dtype"]),
        (row(), "bfloat16", []),  # MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        (row(), "", []),  # reduces in the parameters' dtype, as documented
        (row(dtype="float32"), "float32", []),
        (row(operation="all_gather_into_tensor"), "float32", []),  # parameters, not gradients
        (row(library=""), "float32", []),  # activations of tensor parallelism
        (row(dtype="uint8"), "float32", []),
    ],
)
def test_a_lower_precision_than_the_policy_is_named(
    one: LedgerRow, policy: str, causes: list[str]
) -> None:
    found = list(warn_of_ledger(Ledger(step=1, rows=(one,), policy=policy)))
    assert [cause.cause for cause in found] == causes
    assert all("in bfloat16 in 4 calls" in cause.evidence for cause in found)


def test_a_gradient_that_two_calls_add_is_named_once() -> None:
    one, other = torch.ones(8), torch.ones(8)
    calls, held = StepCalls(), {"weight": storage_range(one), "bias": storage_range(other[:2])}
    calls.hear("all_reduce", [one], 0, "[0, 1]", "a.py:1")
    calls.hear("all_reduce", [one], 0, "[0, 2]", "a.py:2")  # an axis of a mesh after another
    calls.hear("all_reduce", [one], 0, "", "a.py:3")  # a maximum
    calls.hear("all_reduce", [one.clone()], 0, "[0, 1]", "a.py:4")  # a norm
    calls.hear("all_reduce", [other[:2]], 0, "[0, 1]", "a.py:5")
    calls.hear("all_reduce", [other[2:]], 0, "[0, 1]", "a.py:6")  # the next bucket of a buffer
    assert calls.reduced_twice(held) == {}
    halves = {"whole": storage_range(other)}
    assert calls.reduced_twice(halves) == {}, "each half once"
    calls.hear("all_reduce", [one], 0, "[0, 1]", "a.py:7")
    found = calls.reduced_twice(held)
    assert found == {"weight": ("a.py:1", "a.py:7")}
    twice = tuple((name, *lines) for name, lines in found.items())
    (cause,) = warn_of_ledger(Ledger(step=1, twice=twice))
    assert cause.cause == "reduced-twice"
    assert cause.evidence.endswith(
        "gradient of weight over the same ranks: a.py:1, and then a.py:7"
    )
    calls.begin()  # the next backward pass
    calls.hear("all_reduce", [one], 0, "[0, 1]", "a.py:7")
    assert calls.reduced_twice(held) == {}


def _ledger(train: Any, model: nn.Module) -> Ledger:
    found = StepLedger()
    found.begin()
    train()
    made = found.taken(0, model.parameters(), [model])
    assert made is not None
    return made


@pytest.mark.world(2)
def test_the_policy_of_fsdp_covers_the_axis_of_tensor_parallelism(world: Any) -> None:
    """Torch before 2.15 reduces in bfloat16 there (pytorch issue 190626), as the patch does."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.LayerNorm(8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel()})
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    def train() -> None:
        model(torch.ones(2, 4, 8)).to_local().sum().backward()

    original: Any = FSDPParam._get_grad_inner_tensor

    def short(one: Any, gradient: Any) -> Any:
        return original(one, gradient.to(torch.bfloat16)).float()

    with patch.object(FSDPParam, "_get_grad_inner_tensor", short):
        (cause,) = warn_of_ledger(_ledger(train, model))
    assert cause.cause == "reduced-in-short-dtype"
    assert "FSDP reduces in bfloat16 in 1 call, although" in cause.evidence
    if torch.__version__ >= "2.15":
        assert [*warn_of_ledger(_ledger(train, model))] == []
    dist.destroy_process_group(mesh["dp"].get_group())


@pytest.mark.world(2)
def test_collectives_of_torch_are_recorded(world: Any) -> None:
    model = nn.Linear(4, 2)
    replicas = DistributedDataParallel(model)
    found = _ledger(lambda: replicas(torch.ones(3, 4)).sum().backward(), model)
    (one,) = found.rows
    assert (one.operation, one.ranks, one.dtype, one.calls, one.bytes) == (
        "all_reduce", 2, "float32", 1, 40,
    )  # fmt: skip
    assert found.reduced == found.gradient_bytes == 40
    assert one.place.startswith(__file__)
    assert rank.ranks_that_ddp_averages(replicas) == "[0, 1]"
    replicas.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    assert rank.ranks_that_ddp_averages(replicas) == ""  # it may reduce nothing
    gradient = torch.ones(2)
    assert rank.ranks_that_add((gradient,), {}) == "[0, 1]"
    assert rank.ranks_that_add((gradient, dist.ReduceOp.MAX), {}) == ""

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = fully_shard(nn.Linear(4, 2, bias=False), mp_policy=policy)
    found = _ledger(lambda: sharded(torch.ones(3, 4)).sum().backward(), sharded)
    rows = {one.operation: one for one in found.rows if one.library == FSDP}
    assert {name: (one.dtype, one.elements) for name, one in rows.items()} == {
        "all_gather_single": ("bfloat16", 8), "reduce_scatter_single": ("float32", 8),
    }  # fmt: skip
    assert (found.policy, found.gradients) == ("float32", 8)
    assert list(warn_of_ledger(found)) == []
