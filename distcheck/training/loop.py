"""The training loop. `verify` records it; `train` only observes the loss.

Every rank has the indices of its DistributedSampler. A step takes as many of them as the rank has
positions in the step's part of the epoch. The shards of a step over all ranks are therefore exactly
the batch that one process would read, even if the batch is not divisible by the world size. In that
case shard sizes differ by one, and the sampler's padding is never read. Ranks without data are
skipped: the remaining ranks are numbered from 0 as if they were all.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from distcheck.contract import Batch, Step
from distcheck.errors import UsageError
from distcheck.machine import seeds
from distcheck.machine.compat import has_step_hooks
from distcheck.training.building import Ingredients, restore_checkpoint, take_checkpoint
from distcheck.training.epoch_positions import EpochSegment, epoch_segment_of_step
from distcheck.training.loaded import LoadedStrategy, LoadedWorkload
from distcheck.training.losses import LossOfShard, OwnBackward
from distcheck.training.recorder import LoopObserver
from distcheck.worlds.messages import SETTING_UP


class ShardReader:
    """One rank's view of the data set, step by step. With rank None, it reads nothing."""

    def __init__(
        self,
        loaded: LoadedWorkload,
        *,
        size: int,
        batch: int,
        world: int,
        rank: int | None,
        seed: int,
    ) -> None:
        self._sampler = loaded.sampler
        self._size, self._batch, self._world, self._rank = size, batch, world, rank
        self._seed = seeds.derive(seed, "data order") % 2**31
        self._epoch, self._order = -1, list[int]()

    def read(self, step: int) -> tuple[EpochSegment, torch.Tensor]:
        """Return the step's part of the epoch, and this rank's dataset indices, int64 [n]."""
        stretch = epoch_segment_of_step(step, size=self._size, batch=self._batch, world=self._world)
        if self._rank is None:
            return stretch, torch.empty(0, dtype=torch.int64)
        if stretch.epoch != self._epoch:
            self._epoch = stretch.epoch
            self._order = list(self._epoch_order(stretch.epoch, self._rank))
        ids = stretch.pick(self._order, self._world, self._rank)
        return stretch, torch.tensor(ids, dtype=torch.int64)

    def _epoch_order(self, epoch: int, rank: int) -> Sequence[int]:
        if self._sampler is not None:
            return self._sampler(self._size, self._world, rank, self._seed, epoch)
        return _order_of_all(self._size, self._seed, epoch)[rank :: self._world]


@lru_cache(maxsize=2)  # ranks that share a process compute it once
def _order_of_all(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    sampler: DistributedSampler[int] = DistributedSampler(
        range(size),  # type: ignore[arg-type]
        num_replicas=1,
        rank=0,
        shuffle=True,
        seed=seed,
    )
    sampler.set_epoch(epoch)
    return tuple(sampler)


Progress = Callable[[int, str], None]  # (step, phase)


class Loop:
    """One rank's training: builds model and optimizer, then runs step by step.

    RNG streams: the model is built from one seed on every rank, as data-parallel training requires.
    Random numbers of a forward pass come from a separate stream per rank.
    """

    def __init__(
        self,
        ingredients: Ingredients,
        strategy: LoadedStrategy,
        observer: LoopObserver,
        *,
        rank: int,
        progress: Progress,
        load_again: Callable[[], LoadedStrategy] | None = None,
    ) -> None:
        case, self._training = ingredients.case, ingredients.training
        self._ingredients, self._strategy, self._observer = ingredients, strategy, observer
        self._rank, self._progress = rank, progress
        self._mesh = strategy.contract.mesh(case.world)
        self._has_data = rank in case.with_data
        position = case.with_data.index(rank) if self._has_data else None
        self.readers = len(case.with_data)
        if self._mesh is not None:
            position, self.readers = self._mesh.coordinate(rank, "data"), self._mesh.data
        self._shards = ShardReader(
            ingredients.loaded,
            size=ingredients.samples.size(train=True),
            batch=case.batch,
            world=self.readers,
            rank=position,
            seed=case.seed,
        )
        self._load_again = load_again
        self._stretches = 1  # parts into which the strategy's own backward splits a batch
        scale = self._training.loss_scale
        self._scaler = torch.amp.GradScaler(
            ingredients.device.type, init_scale=scale or 1.0, enabled=scale is not None
        )
        progress(0, SETTING_UP if strategy.engine else "build")
        self._build()
        observer.started(self.model, self._optimizer)

    def _build(self) -> None:
        ingredients = self._ingredients
        seeds.pin_determinism()  # user files were loaded before
        self.model = ingredients.model()
        self._observer.attach(self.model)
        ingredients.apply_initial_changes(self.model, self._rank)
        seeds.seed_everything(seeds.derive(ingredients.case.seed, "rank", self._rank))
        names = [name for name, _ in self.model.named_parameters()]
        build = partial(ingredients.optimizer, one_group=self._strategy.contract.one_group)
        self._strategy.builds(build)
        self.wrapped: nn.Module = self._strategy.wrap(self.model)
        _refuse_other_names(f"strategy {ingredients.case.strategy!r}", names, self.model)
        if self.wrapped is not self.model and ingredients.case.adaptation.without_data:
            raise UsageError(
                f"--without-data is for code that is called after backward; "
                f"{ingredients.case.strategy} wraps the model in a {type(self.wrapped).__name__}, "
                "whose forward pass a rank without data never runs"
            )
        self._optimizer = self._strategy.optimizer(build, self.wrapped.parameters())

    def _resume(self, number: int) -> None:
        """Rebuild everything, as a restarted script does, and load a checkpoint. Each rank restores
        its own optimizer state, so sharded state stays sharded.
        """
        assert self._load_again is not None, "only a run that is recorded resumes"
        self._progress(number, "resume")
        kept = take_checkpoint(self.model, self._optimizer, self._ingredients.device)
        self._strategy.close()
        self._strategy = self._load_again()
        self._build()
        restore_checkpoint(kept, self.model, self._optimizer, self._ingredients.device)

    def step(self, number: int) -> tuple[float, int, float]:
        """Run one step. Return the shard's mean loss, the number of samples (or tokens, if these
        are counted) that the loss covers, and the seconds that the step took.
        """
        begun = time.perf_counter()
        case, progress = self._ingredients.case, self._progress
        if number == self._training.resume_before:
            self._resume(number)
        stretch, ids = self._shards.read(number)
        self._ingredients.prepare(self.model, number)
        self._ingredients.schedule(self._optimizer, number)
        self._observer.reading(number, stretch.epoch, ids)

        progress(number, "forward")
        batch = self._ingredients.batch(ids, stretch.count) if self._has_data else None
        tokens = 0 if batch is None else batch.tokens
        step = Step(
            index=number,
            rank=self._rank,
            world_size=case.world,
            samples=len(ids),
            total_samples=stretch.count,
            ranks_with_data=self.readers,
            tokens=tokens,
        )
        self._clear(step)
        self._strategy.begun(self.wrapped, step)
        if batch is not None:
            self._observer.counted(batch)
            if number and self._training.evaluates:
                self._evaluate(batch)
            first = number == 0 and self._strategy.contract.sync != "out-of-sight"
            first = first and not self._strategy.engine  # an engine may hold them elsewhere
            before = _lengths(self.model) if first else None
            loss_value = self._backward(batch, step)
            if before is not None:
                _refuse_steps_in_backward(f"strategy {case.strategy!r}", before, self.model)
        else:
            loss_value = self._stand_by(step)
        self._observer.backward_over(self._stretches)
        progress(number, "sync")
        self._synchronize(step)
        self._observer.updated(number, self.model, self._optimizer, loss_value)
        return loss_value, tokens, time.perf_counter() - begun

    def _clear(self, step: Step) -> None:
        """Clear gradients like a training loop. A wrapper with its own zero_grad() may hold
        gradients as views of its buffers, which setting them to None would detach.
        """
        zero_grad = type(self.wrapped).zero_grad
        if self._strategy.zero_grad is not None:
            self._strategy.zero_grad(self.wrapped, step)
        elif self.wrapped is not self.model and zero_grad is not nn.Module.zero_grad:
            self.wrapped.zero_grad()
        else:
            self._optimizer.zero_grad(set_to_none=not self._training.keeps_gradients)

    def _evaluate(self, batch: Batch) -> None:
        """Run the model in evaluation mode, as scripts do between two steps, on every rank."""
        trained = self.wrapped.training
        self.wrapped.eval()
        with torch.no_grad():
            self.wrapped(batch.inputs)
        self.wrapped.train(trained)

    def _synchronize(self, step: Step) -> None:
        """Synchronize and update. Code that takes the optimizer's step itself, or synchronizes
        within it, has its final gradients when torch's own optimizer begins.
        """
        number, update = step.index, self._strategy.update
        if update == "loop":
            self._strategy.sync(self.wrapped, step)
            if self._scaler.is_enabled():
                self._scaler.unscale_(self._optimizer)
            if not self._exchanges_in_hooks:
                self._observer.synced(number, self.model)
            self._progress(number, "update")
            max_norm, clip = self._training.clip_norm, self._strategy.clip
            if max_norm is not None and clip is not None:
                clip(self.wrapped, max_norm)
            elif max_norm is not None:
                nn.utils.clip_grad_norm_(self.wrapped.parameters(), max_norm)
            if self._exchanges_in_hooks:
                register = self._optimizer.register_step_pre_hook
                with self._final_where_it_begins(number, register) as steps:
                    self._scaler.step(self._optimizer)
                if not steps:  # a step skipped by the scaler runs no hook
                    self._observer.synced(number, self.model)
            else:
                self._scaler.step(self._optimizer)
            self._scaler.update()
            return
        inner: Any = getattr(self._optimizer, "optim", self._optimizer)
        before_update: Any = getattr(self._optimizer, "before_update", None)
        register = before_update or inner.register_step_pre_hook
        with self._final_where_it_begins(number, register) as steps:
            self._strategy.sync(self.wrapped, step)
            if update == "optimizer":
                self._progress(number, "update")
                self._optimizer.step()
        if len(steps) > 1:
            raise RuntimeError(
                f"the strategy called optimizer.step() {len(steps)} times in step {number}: it "
                "must call it once, after all parameters are synchronized (a call inside a loop "
                "over the parameters uses gradients that are not synchronized yet)"
            )
        if not steps:
            raise UsageError(
                "torch's optimizer took 0 steps instead of one: the strategy has to call its "
                "step() once in every step on every rank; if one rank steps for all and sends "
                "its parameters, pass --as steps-inside"
            )

    @property
    def _exchanges_in_hooks(self) -> bool:
        """True if the strategy has no sync() and registered pre-step hooks on the optimizer:
        gradients are final once these have run.
        """
        return has_step_hooks(self._optimizer) and not self._strategy.has_sync

    @contextlib.contextmanager
    def _final_where_it_begins(
        self, number: int, register: Callable[[Callable[..., None]], Any]
    ) -> Iterator[list[int]]:
        """Record gradients when an optimizer's first step begins, after hooks that were registered
        before; yield a list with an entry for each step begun.
        """
        steps: list[int] = []

        def begins(*_: object) -> None:
            steps.append(number)
            if len(steps) == 1:
                self._observer.synced(number, self.model)

        hook = register(begins)
        try:
            yield steps
        finally:
            hook.remove()

    def _backward(self, batch: Batch, step: Step) -> float:
        """Compute the shard's gradients, and return its mean loss."""
        saw = self._observer.returned if self._mesh is not None else None
        loss_of = LossOfShard(self._ingredients.loaded.workload.loss, self.wrapped, saw)
        if self._strategy.backward is not None:
            self._progress(step.index, "backward")
            # The scaler creates its factor when it is first requested.
            one = torch.ones((), device=self._ingredients.device)
            backward = OwnBackward(
                self._strategy.backward,
                self._training.accumulate,
                self._sync_only_last,
                loss_scale=float(self._scaler.scale(one)) if self._scaler.is_enabled() else 1.0,
                may_lack=self._mesh is not None,
            )
            loss_value, self._stretches = backward.run(loss_of, batch, step)
            return loss_value
        parts = batch.split(self._training.accumulate)
        if len(parts) == 1:
            return float(self._backward_one(loss_of(batch), step))
        mean_loss: torch.Tensor | None = None
        for part in parts:
            with self._sync_only_last(part is parts[-1]):
                share = part.share_of(batch)
                mean_part = self._backward_one(loss_of(part) * share, step)
            mean_loss = mean_part if mean_loss is None else mean_loss + mean_part
        assert mean_loss is not None, "a shard needs at least one sample"
        return float(mean_loss)

    def _stand_by(self, step: Step) -> float:
        """Replace forward and backward on a rank without data: it sees the step like the others,
        and has zero gradients, like a server that has allocated them. Returns NaN for no loss.
        """
        nothing = torch.zeros((), device=self._ingredients.device)
        self._scaler.scale(self._strategy.scale_loss(nothing, step))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return math.nan

    def _backward_one(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        case = self._ingredients.case
        factors = {
            "mean/world": 1 / step.shards,
            "sum/global": step.samples / step.total_samples,
            "tokens": max(1, step.tokens),
        }
        kind, start = self._strategy.contract.loss_given(case.loss), loss
        if kind in factors:
            start = loss * factors[kind]
        scaled = self._strategy.scale_loss(start.clone(), step)  # it may work in place
        self._observer.scaled(start, scaled)
        self._progress(step.index, "backward")
        self._scaler.scale(scaled).backward()
        return loss.detach()

    @contextlib.contextmanager
    def _sync_only_last(self, last: bool) -> Iterator[None]:
        """Enable gradient synchronization of a wrapped model only in the `last` backward."""
        no_sync = getattr(self.wrapped, "no_sync", None)
        sharded = getattr(self.wrapped, "set_requires_gradient_sync", None)
        if sharded is not None:
            sharded(last)
        with no_sync() if no_sync is not None and not last else contextlib.nullcontext():
            yield

    def gather_buffers(self) -> bool:
        """Gather the buffers of all ranks into the model; return True if it then has all."""
        return self._strategy.buffers()

    def close(self) -> None:
        """Let the strategy release its resources."""
        self._strategy.close()


# Code whose training cannot be compared may be correct, so it is refused before a verdict.
# Parameters are compared by name, and gradients after backward: weight_norm replaces the model's
# parameters, and hooks may step during backward and drop the gradients.


def _refuse_other_names(strategy: str, before: list[str], model: nn.Module) -> None:
    """Raise UsageError if a model has parameters under new names in place of its own."""
    after = [name for name, _ in model.named_parameters()]
    gone = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    if gone and new:
        raise UsageError(
            f"{strategy} replaced parameters of the model: {gone[0]} is gone, and {new[0]} is new "
            f"({len(gone)} are gone in all). Parameters are compared by name: build such a model "
            "in a workload (--workload FILE.py:NAME), and pass the code that synchronizes it"
        )


def _lengths(model: nn.Module) -> list[float]:
    """Return the norms of trained parameters, to detect changes; none of DTensors or 8 bits."""
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype.itemsize > 1]
    with torch.no_grad():
        return [float(p.norm()) for p in trained if not hasattr(p, "full_tensor")]


def _refuse_steps_in_backward(strategy: str, before: list[float], model: nn.Module) -> None:
    """Raise UsageError if backward changed parameters and left no gradient at all, as hooks do that
    take the optimizer's step.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(p.grad is not None for p in trained) or not trained or _lengths(model) == before:
        return
    raise UsageError(
        f"{strategy} updates the parameters in backward and leaves no gradients to record; "
        "remove the step and the zero_grad() from its hooks, and pass the part that "
        "synchronizes: the loop performs the optimizer step after backward"
    )
