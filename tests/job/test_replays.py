"""What a replay hands out, and what it makes of what its copies wrote."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from distcheck.job import recording
from distcheck.job.inside import state
from distcheck.job.inside.feeding import ALL, Feeding, _together
from distcheck.job.inside.forks import Forks, Role
from distcheck.job.inside.step_file import StepFile
from distcheck.job.reading import Recording, read
from distcheck.job.recording import Batch, Iteration, LossCall, Pass, RankRecord


@pytest.fixture
def job(tmp_path: Path) -> Recording:
    """Two ranks with a batch of two and of three samples."""
    for rank, rows in ((0, 2), (1, 3)):
        mine = recording.rank_folder(tmp_path, rank)
        mine.mkdir()
        about = RankRecord(
            rank=rank, world=2, arguments=(), folder="", backend="gloo", device="cpu", torch="2",
            threads=1,
        )  # fmt: skip
        recording.write_json(mine / "rank.json", about)
        file = StepFile(mine, 0)
        inputs = file.add_data(torch.full((rows, 4), float(rank)))
        target = file.add_data(torch.full((rows,), rank))
        file.add("random/0", torch.full((8,), rank, dtype=torch.uint8))
        call = LossCall(name="mse_loss", reduction="mean", counted=rows, value=1.0, target=target)
        file.write(
            1 << 20, rank=rank, world=2, optimizer="", groups=(),
            passes=(Pass(inputs=(inputs,), rows=(), random={}, loss=1.0, losses=(call,)),),
            batches=(Batch(loader=0, epoch=1, number=5, leaves=(inputs, target), rows=()),),
            iterations=(Iteration(loader=0, epoch=1, length=7, sampler="", shuffles=False),),
        )  # fmt: skip
    return read(tmp_path)


def test_batches_of_one_rank_and_of_all(job: Recording) -> None:
    feeding = Feeding(job)
    own = feeding.batch([(1, (0, 1, 5))])
    assert own is not None
    assert [list(leaf.shape) for leaf in own] == [[3, 4], [3]]
    everything = feeding.batch([(0, (0, 1, 5)), (1, (0, 1, 5))])
    assert everything is not None
    assert everything[1].tolist() == [0, 0, 1, 1, 1]
    assert feeding.batch([(0, (0, 1, 6))]) is None
    assert feeding.lengths == {0: 7}


def test_inputs_targets_and_random_states(job: Recording) -> None:
    feeding = Feeding(job)
    inputs = feeding.inputs(0, feeding.pairs(0, ALL))
    assert inputs is not None
    assert inputs[0][:, 0].tolist() == [0, 0, 1, 1, 1]
    assert feeding.inputs(0, feeding.pairs(1, 0)) is None
    target = feeding.target(0, [(1, 0)], 0)
    assert target is not None
    assert target.tolist() == [1, 1, 1]
    assert feeding.target(0, [(1, 0)], 1) is None
    assert feeding.random(0, (1, 0)).tolist() == [1] * 8


def test_tensors_that_do_not_fit_are_not_put_together() -> None:
    assert _together([[torch.zeros(2, 3)], [torch.zeros(2, 4)]]) is None
    assert _together([[torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]]) is None
    scalar = _together([[torch.tensor(3)], [torch.tensor(3)]])
    assert scalar is not None
    assert scalar[0].item() == 3


def test_state_is_loaded_and_moved_by_one_ulp() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    kept = {f"before/{n}": torch.randn_like(p) for n, p in model.named_parameters()}
    kept["buffer/1.running_mean"] = torch.tensor([5.0, 6.0])
    state.load([model], kept, 0)
    assert torch.equal(model[0].weight, kept["before/0.weight"])
    assert model[1].running_mean.tolist() == [5, 6]
    found = state.load([model], kept, 1)
    changed, before = found["0.weight"].detach(), kept["before/0.weight"]
    assert bool((changed != before).all())
    assert torch.equal(torch.nextafter(changed, before), before)


def test_means_and_distances() -> None:
    one, two = {"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([3.0, 1.0])}
    found = state.mean([one, two], [0.25, 0.75])
    assert found is not None
    assert found["w"].tolist() == [2.5, 1.5]
    assert found["w"].dtype == torch.float32
    assert state.mean([one, None], [0.5, 0.5]) is None
    assert state.distance({"w": 2 * one["w"]}, one) == pytest.approx(1.0)
    assert state.distance({"w": one["w"], "loss": torch.ones(())}, one) == 0


def test_copies_write_what_they_compute_and_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    forks = Forks(tmp_path)
    right, wrong, raises = Role(1), Role(2, draw=1), Role(3)
    found = forks.run([right, wrong, raises], 0, "together")
    if isinstance(found, Role):  # in a copy
        if found == wrong:
            os.abort()
        if found == raises:
            sys.excepthook(ValueError, ValueError("no such sample\nand more"), None)
        forks.leave(found, {"w": torch.tensor([float(found.rank)])}, 0)
        return
    gradients = found[right]
    assert gradients is not None
    assert gradients["w"].tolist() == [1]
    assert found[wrong] is found[raises] is None
    assert forks.why == {wrong: "it was ended by signal 6", raises: "ValueError: no such sample"}


def test_what_a_sum_was_divided_by() -> None:
    assert state.divisor_of(3.4234719, 342.34718) == 100
    assert state.divisor_of(2.0, 5.0) == 2.5
    assert state.divisor_of(2.0, float("nan")) == state.divisor_of(0.0, 1.0) == 0


def test_a_batch_that_was_handed_out_ahead(job: Recording) -> None:
    feeding = Feeding(job)
    assert not feeding.is_ahead(0)
    assert not feeding.is_ahead(1)  # one batch, and one pass
    record = job.records[0, 0]
    job.records[0, 0] = msgspec.structs.replace(record, batches=(*record.batches, *record.batches))
    assert feeding.is_ahead(1)


FORKS_AFTER_FAKE_TENSORS = """
import os, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from distcheck.job.inside import alone

alone.install()
with FakeTensorMode():
    torch.ones(2) + 1
weight = torch.ones(3, requires_grad=True)
weight.sum().backward()
child = os.fork()
if child == 0:
    weight.sum().backward()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_copy_can_go_backward_after_fake_tensors(tmp_path: Path) -> None:
    """FSDP2 has them; autograd then has threads for GPUs that are not there."""
    ran = subprocess.run(
        [sys.executable, "-c", FORKS_AFTER_FAKE_TENSORS],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout == "7\n", ran.stderr
