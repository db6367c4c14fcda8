"""What a replay hands out, and what it makes of what its copies wrote."""

import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch
from torch import nn

from distcheck.job.inside import replayer, state
from distcheck.job.inside.batch_injection import BatchInjector
from distcheck.job.inside.batch_source import (
    ALL,
    BatchSource,
    NotTogetherError,
    _can_concatenate,
    _concatenate,
    _pad_rows,
    padding_value,
)
from distcheck.job.inside.forks import Forks
from distcheck.job.inside.joining import can_join_passes, joined
from distcheck.job.inside.replay_tasks import ReplayTasks
from distcheck.job.inside.step_file import StepFile
from distcheck.job.settings import BY_RANK, JobSettings, ReplayTask
from distcheck.recordings.jobs import records
from distcheck.recordings.jobs.reading import JobRecording, read_recording
from distcheck.recordings.jobs.records import (
    ForwardPass,
    LoadedBatch,
    LoaderIteration,
    LossCall,
    RankRecord,
    StepRecord,
)
from tests.world import warm


@pytest.fixture
def job(tmp_path: Path) -> JobRecording:
    """Two ranks with a batch of two and of three samples."""
    for rank, rows in ((0, 2), (1, 3)):
        mine = records.rank_folder(tmp_path, rank)
        mine.mkdir()
        about = RankRecord(
            rank=rank, world=2, arguments=(), folder="", backend="gloo", device="cpu", torch="2",
        )  # fmt: skip
        records.write_json(mine / "rank.json", about)
        file = StepFile(mine, 0)
        inputs = file.add_data(torch.full((rows, 4), float(rank)))
        target = file.add_data(torch.full((rows,), rank))
        file.add("random/0", torch.full((8,), rank, dtype=torch.uint8))
        call = LossCall(name="mse_loss", reduction="mean", counted=rows, value=1.0, target=target)
        file.write(
            1 << 20, rank=rank, world=2, optimizer="", groups=(),
            passes=(ForwardPass(inputs=(inputs,), rows=(), random={}, loss=1.0, losses=(call,)),),
            batches=(LoadedBatch(loader=0, epoch=1, number=5, leaves=(inputs, target), rows=()),),
            iterations=(LoaderIteration(loader=0, epoch=1, length=7, sampler="", shuffles=False),),
        )  # fmt: skip
    return read_recording(tmp_path)


def test_micro_batches_become_one_pass(job: JobRecording) -> None:
    """They are refused where samples interact, or the script may count those of a batch."""
    record = job.records[1, 0]
    one = msgspec.structs.replace(record.passes[0], rows=("a",), batches=((0, 1, 5),))
    several = msgspec.structs.replace(record, passes=(one, one), backwards=2)

    def of(record: StepRecord) -> JobRecording:
        return dataclasses.replace(job, records=dict.fromkeys(job.records, record))

    assert can_join_passes(of(several))
    assert not can_join_passes(of(record)), "there is one pass"
    assert not can_join_passes(of(msgspec.structs.replace(several, batchnorm=True)))
    other = msgspec.structs.replace(one, batches=((0, 1, 6),))
    assert not can_join_passes(of(msgspec.structs.replace(several, passes=(one, other))))
    found = joined(dataclasses.replace(job, records={**job.records, (1, 0): several}))
    (single,) = found.records[1, 0].passes
    assert (single.rows, single.loss, single.losses[0].counted) == (("a", "a"), 2.0, 6)
    (inputs,) = BatchSource(found).inputs(0, [(1, 0)])
    target = BatchSource(found).target(0, [(1, 0)], 0)
    assert inputs is not None
    assert target is not None
    assert (inputs.shape, target.shape, found.joined) == ((6, 4), (6,), {0: 1})


def test_batches_of_one_rank_and_of_all(job: JobRecording) -> None:
    batch_source = BatchSource(job)
    own = batch_source.batch([(1, (0, 1, 5))])
    assert own is not None
    assert [list(leaf.shape) for leaf in own] == [[3, 4], [3]]
    everything = batch_source.batch([(0, (0, 1, 5)), (1, (0, 1, 5))])
    assert everything is not None
    assert everything[1].tolist() == [0, 0, 1, 1, 1]
    assert batch_source.batch([(0, (0, 1, 6))]) is None
    assert batch_source.lengths == {0: 7}


def test_inputs_targets_and_random_states(job: JobRecording) -> None:
    batch_source = BatchSource(job)
    inputs = batch_source.inputs(0, batch_source.pairs(0, ALL))
    assert inputs[0] is not None
    assert inputs[0][:, 0].tolist() == [0, 0, 1, 1, 1]
    assert batch_source.has(0, batch_source.pairs(0, ALL))
    assert not batch_source.has(0, batch_source.pairs(1, 0))
    target = batch_source.target(0, [(1, 0)], 0)
    assert target is not None
    assert target.tolist() == [1, 1, 1]
    assert batch_source.target(0, [(1, 0)], 1) is None
    assert batch_source.random(0, (1, 0)).tolist() == [1] * 8


def test_inputs_of_the_ranks_are_kept(job: JobRecording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one rank, or of both; only the latter are divided among the ranks."""

    def fails(why: str) -> NoReturn:
        raise NotTogetherError(why)

    monkeypatch.setattr(BatchInjector, "set_random_streams", lambda *_, **__: None)
    asked = JobSettings(own_inputs=True, task=ReplayTask(1), task_mode=BY_RANK)
    hands = BatchInjector(job, asked, fails)
    of_both = torch.cat([torch.zeros(2, 4), torch.ones(3, 4)])
    for own, divides in ((torch.ones(3, 4), False), (of_both.flip(0), True)):
        kept, hands.passes = own.clone(), 0
        hands.inputs((own,), {})
        hands.target(torch.zeros(len(own)), target := torch.full((len(own),), 9))
        assert torch.equal(own, kept)
        assert target.tolist() == [9] * len(own)
        assert hands.divides is divides
    for other in (torch.ones(2, 4), of_both + 1):
        hands.passes = 0
        with pytest.raises(NotTogetherError, match="other samples; have it read"):
            hands.inputs((other,), {})


def test_tensors_that_do_not_fit_are_padded_or_refused() -> None:
    short, long = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[4, 5, 6], [7, 0, 0]])
    assert not _can_concatenate([short, long])
    assert _concatenate([*_pad_rows([short, long], 0, longer=False)]).tolist() == [
        [1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 0, 0],
    ]  # fmt: skip
    assert [part.shape[1] for part in _pad_rows([short, long], 0, longer=True)] == [4, 4]
    with pytest.raises(NotTogetherError):
        list(_pad_rows([torch.zeros(2, 3, 1), torch.zeros(2, 3, 2)], 0, longer=False))
    assert _concatenate([torch.tensor(3), torch.tensor(3)]).item() == 3
    assert padding_value(iter([short, long])) == 0
    assert padding_value(iter([torch.tensor([[1, -100], [2, -100]]), long])) == -100
    assert padding_value(iter([torch.tensor([[1, 5]])])) == 0  # no row ends as another one


def test_state_is_loaded_and_moved_by_one_ulp() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    parameters = dict(model.named_parameters())
    kept = {f"before/{n}": torch.randn_like(p) for n, p in parameters.items()}
    kept["buffer/1.running_mean"] = torch.tensor([5.0, 6.0])
    graph = (parameters["0.weight"] ** 2).sum()
    state.load_recorded_tensors(parameters, kept, "before/")
    state.load_recorded_tensors(dict(model.named_buffers()), kept, "buffer/")
    graph.backward()  # what has the tensor is not in its way
    assert torch.equal(model[0].weight, kept["before/0.weight"])
    assert model[1].running_mean.tolist() == [5, 6]
    state.load_recorded_tensors(parameters, kept, "before/", torch.Generator().manual_seed(1))
    changed, before = parameters["0.weight"].detach(), kept["before/0.weight"]
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
    assert state.factor_of({"w": 3 * one["w"]}, one) == 3
    assert state.distance({"w": 3 * one["w"]}, one, 3.0) == 0


def test_copies_write_what_they_compute_and_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    forks = Forks(tmp_path)
    right, wrong, raises = ReplayTask(1), ReplayTask(2, draw=1), ReplayTask(3)
    found = forks.run([right, wrong, raises], 0, "together")
    if isinstance(found, ReplayTask):  # in a copy
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
    assert forks.why == {wrong: "it was killed by signal 6", raises: "ValueError: no such sample"}


def test_copies_begin_where_their_batch_was_handed_out(job: JobRecording) -> None:
    """As where a loader hands out a batch ahead of its step."""
    batch_source = BatchSource(job)
    assert batch_source.begins_at(0) == 0
    for rank in (0, 1):
        one = job.records[rank, 0]
        ahead = (msgspec.structs.replace(one.passes[0], batches=((0, 1, 5),)),)
        job.records[rank, 1] = msgspec.structs.replace(one, step=1, passes=ahead, batches=())
    assert batch_source.begins_at(1) == 0
    job.records[1, 1] = msgspec.structs.replace(job.records[1, 1], earlier=((0, 0),), passes=())
    assert batch_source.begins_at(1) == 0


def test_recorded_settings_replace_those_of_tuples() -> None:
    then = {"lr": 0.1, "betas[0]": 0.8}
    assert replayer._recorded("betas", (0.9, 0.999), then) == (0.8, 0.999)
    assert (replayer._recorded("lr", 0.2, then), replayer._recorded("eps", 1e-8, then)) == (
        0.1,
        1e-8,
    )


def test_rounding_of_an_all_reduce_needs_no_perturbed_copy(job: JobRecording) -> None:
    copies = object.__new__(ReplayTasks)
    copies._job, copies.spreads = job, {"weight": 0.0}
    own = {"weight": torch.ones(4)}
    assert not copies._exceeds_spread(own, {"weight": torch.full((4,), 1 + 2.0**-23)}, {})
    assert copies._exceeds_spread(own, {"weight": torch.full((4,), 1.001)}, {})
    assert copies._exceeds_spread(own, {"weight": torch.full((4,), math.nan)}, {})


FORKS_AFTER_FAKE_TENSORS = """
import os, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from distcheck.job.inside import single_process_group

single_process_group.install()
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
    ran = warm.run(FORKS_AFTER_FAKE_TENSORS, cwd=tmp_path, program="-c", timeout=120)
    assert ran.stdout == "7\n", ran.stderr


@pytest.mark.parametrize(
    ("losses", "first", "number", "noted"),
    [
        ((0, 2), 0, 0, 1),  # a loss after each of two forward passes, and one backward pass
        ((0, 2), 0, 1, 1),
        ((1, 1), 0, 0, None),  # a backward pass after each
        ((1, 1), 1, 1, None),
        ((0, 0), 0, 1, None),  # none of torch's
    ],
)
def test_with_which_pass_losses_were_noted(
    job: JobRecording, losses: tuple[int, ...], first: int, number: int, noted: int | None
) -> None:
    record = job.records[0, 0]
    (one,) = record.passes
    passes = tuple(msgspec.structs.replace(one, losses=one.losses * count) for count in losses)
    job.records[0, 0] = msgspec.structs.replace(record, passes=passes)
    assert BatchSource(job).noted_with(0, first, number) == noted
