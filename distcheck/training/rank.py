"""The jobs that a rank process can run: train and record, or only train."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
import xxhash

from distcheck.backends import name_of
from distcheck.contract import Contract
from distcheck.machine import devices, seeds
from distcheck.recordings.traces.layout import has_loss
from distcheck.recordings.traces.writer import TraceWriter
from distcheck.records.ledger import Ledger
from distcheck.training.building import Ingredients, open_ingredients
from distcheck.training.delays import RankDelays
from distcheck.training.epoch_positions import steps_per_epoch
from distcheck.training.jobs import (
    DIGEST,
    RECORD,
    TRAIN,
    DigestRequest,
    EpochFigures,
    RecordRequest,
    RunningLoss,
    TrainRequest,
)
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.loading import load_strategy
from distcheck.training.loop import Loop
from distcheck.training.recorder import LoopObserver, TraceRecorder
from distcheck.training.whole_tensors import is_distributed
from distcheck.workloads.datasets.synthetic import CachedSamples, SyntheticSamples
from distcheck.worlds import call_recorder, step_calls, surroundings
from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.local.child import require_working_directory
from distcheck.worlds.messages import LOADING
from distcheck.worlds.rendezvous import join


def _open(
    job: RecordRequest | DigestRequest | TrainRequest, fds: Descriptors, reporter: Reporter
) -> Ingredients:
    seeds.pin_determinism()
    device = devices.enter(job.case.device, int(os.environ["LOCAL_RANK"]))
    reporter.progress(0, "rendezvous")
    join(job.rendezvous, fds.get(STORE, -1))
    reporter.progress(0, LOADING)
    ingredients = open_ingredients(job.case, job.description, fds.get("data"), device)
    seeds.pin_default_dtype(job.case.dtype)
    _stand_in_for_cuda()
    return ingredients


@RECORD.does
def record(job: RecordRequest, fds: Descriptors, reporter: Reporter) -> tuple[Ledger, ...]:
    """Train and record; rank 0 returns the ledger of a first run's last step."""
    rank = job.rendezvous.rank
    if job.memory_seed is not None:
        surroundings.allocate(job.memory_seed)
    require_working_directory()
    ingredients = _open(job, fds, reporter)
    late = RankDelays()
    if job.delays:
        late.install()
        late.begin([delay for delay in job.delays if delay.rank == rank])
    load = partial(load_strategy, job.case.strategy, job.case.adaptation)
    writer = TraceWriter(fds["trace"], job.layout, rank, fds.get("baseline"))
    strategy = load()
    by_owners = strategy.contract.gradients == "owner"
    simulated = name_of(job.case.backend) == "simulated"
    calls = None
    if simulated or call_recorder.is_installed():
        calls = step_calls.start_recording_calls(rank, past_python=not simulated)
    recorder = TraceRecorder(
        writer,
        job.layout,
        ingredients.device,
        by_owners=by_owners,
        out_of_sight=strategy.contract.sync == "out-of-sight",
        full=strategy.full,
        calls=calls,
        ledger_of=-1 if rank or "baseline" in fds else job.case.steps - 1,
    )
    progress = late.watching(reporter.progress)
    loop = Loop(ingredients, strategy, recorder, rank=rank, progress=progress, load_again=load)
    for step in range(job.case.steps):
        loop.step(step)
    reporter.progress(job.case.steps, "close")
    ledger = recorder.ledger(loop.wrapped)
    loop.close()
    return ledger


@DIGEST.does
def digest(job: DigestRequest, fds: Descriptors, reporter: Reporter) -> tuple[str, ...]:
    """Run a rank of a world that is compared with itself under a different schedule."""
    case, rank = job.case, job.rendezvous.rank
    ingredients = _open(job, fds, reporter)
    samples: object = ingredients.samples
    if type(samples) is SyntheticSamples:
        again: Any = CachedSamples()
        ingredients = replace(ingredients, samples=again)
    strategy = load_strategy(case.strategy, case.adaptation)
    loop = Loop(ingredients, strategy, LoopObserver(), rank=rank, progress=reporter.progress)
    digests = []
    for step in range(case.steps):
        loss, _, _ = loop.step(step)
        digests.append(_digest_of(loop.model, loss))
    loop.close()
    return tuple(digests)


def _digest_of(model: torch.nn.Module, loss: float) -> str:
    """Return a digest of the bits of gradients, parameters and buffers, and of the loss."""
    hashed = xxhash.xxh3_64(repr(loss).encode())
    held: list[torch.Tensor] = []
    for parameter in model.parameters():
        held += [parameter.detach(), *([] if parameter.grad is None else [parameter.grad.detach()])]
    for tensor in [*held, *model.buffers()]:
        local: torch.Tensor = getattr(tensor, "to_local", lambda whole=tensor: whole)()
        hashed.update(local.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


@TRAIN.does
def train(job: TrainRequest, fds: Descriptors, reporter: Reporter) -> None:
    case, rank = job.case, job.rendezvous.rank
    ingredients = _open(job, fds, reporter)
    # Without a strategy, as in single-process training.
    strategy = LoadedStrategy(contract=Contract(), file="")
    if case.strategy:
        strategy = load_strategy(case.strategy, case.adaptation)
    loop = Loop(ingredients, strategy, LoopObserver(), rank=rank, progress=reporter.progress)
    size = ingredients.samples.size(train=True)
    per_epoch = steps_per_epoch(size, case.batch, loop.readers)
    for epoch in range(job.epochs):
        figures = _train_epoch(job, loop, epoch, per_epoch, reporter)
        # With sharded parameters, every forward pass is a collective.
        together = any(is_distributed(parameter) for parameter in loop.model.parameters())
        if loop.gather_buffers() and (rank == 0 or together):
            counts = list(_count_correct(ingredients, loop.model, reporter))
            correct, tested = (sum(column) for column in zip(*counts, strict=True))
            figures = msgspec.structs.replace(figures, correct=correct, tested=tested)
        reporter.say(msgspec.msgpack.encode(figures))
    loop.close()


def _train_epoch(
    job: TrainRequest, loop: Loop, epoch: int, per_epoch: int, reporter: Reporter
) -> EpochFigures:
    rank = job.rendezvous.rank
    steps = per_epoch if job.steps is None else min(job.steps, per_epoch)
    loss_sum, samples, spent, recent = 0.0, 0, [], []
    losses, sizes = list[float](), list[int]()
    for number in range(steps):
        loss, size, seconds = loop.step(epoch * per_epoch + number)
        spent.append(seconds)
        if has_loss(loss):  # only the last stage of a pipeline has it
            loss_sum, samples = loss_sum + loss * size, samples + size
            recent.append(loss)
        losses.append(loss)
        sizes.append(size if has_loss(loss) else 0)
        if rank == 0 and recent and job.log_every and (number + 1) % job.log_every == 0:
            mean = sum(recent) / len(recent)
            running = RunningLoss(epoch=epoch, step=number + 1, steps=steps, loss=mean)
            reporter.say(msgspec.msgpack.encode(running))
            recent = []
    return EpochFigures(
        rank=rank,
        epoch=epoch,
        loss_sum=loss_sum,
        samples=samples,
        step_s=tuple(spent),
        losses=tuple(losses),
        sizes=tuple(sizes),
        correct=0,
        tested=0,
    )


def _count_correct(
    ingredients: Ingredients, model: torch.nn.Module, reporter: Reporter
) -> Iterator[tuple[int, int]]:
    """Yield the number of correct answers and their total, per batch of the test split, in
    evaluation mode. With counted tokens, an answer is one token's.
    """
    size, batch = ingredients.samples.size(train=False), ingredients.case.batch
    model.eval()
    with torch.no_grad():
        for number, first in enumerate(range(0, size, batch)):
            reporter.progress(number, "test")
            ids = torch.arange(first, min(first + batch, size))
            part = ingredients.batch(ids, len(ids), train=False)
            right = model(part.inputs).argmax(-1) == part.labels
            if part.real is not None:
                right = right.reshape(len(ids), -1) & part.real
            yield int(right.sum()), part.tokens
    model.train()


class _Nothing:
    """An event or a stream on which all earlier work is complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Nothing()


def _stand_in_for_cuda() -> None:
    """Replace CUDA's events and streams if torch finds no GPU, for code that times itself with
    events, synchronizes the device, or uses streams. On a CPU, all work is complete when a call
    returns, so there is nothing to wait for.
    """
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = cuda.current_stream = cuda.default_stream = _Nothing
    cuda.synchronize = _Nothing()._nothing
    cuda.stream = contextlib.nullcontext
