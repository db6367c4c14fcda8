"""The one training loop. `verify` records it, `train` only watches the loss."""

import time
from collections.abc import Callable

import torch
from torch import nn

from distcheck import seeds
from distcheck.contract import Step
from distcheck.loading import LoadedStrategy
from distcheck.ranks.recorder import Observer
from distcheck.ranks.sharding import Shards
from distcheck.ranks.training import Ingredients

Progress = Callable[[int, str], None]  # (step, phase)


class Loop:
    """One rank's training: build, then step by step.

    Random streams: the model is built from one seed on every rank, as data-parallel training
    wants it; what a forward pass draws comes from a stream of each rank's own.
    """

    def __init__(
        self,
        ingredients: Ingredients,
        strategy: LoadedStrategy,
        observer: Observer,
        *,
        rank: int,
        progress: Progress,
    ) -> None:
        case = ingredients.case
        self._ingredients, self._strategy, self._observer = ingredients, strategy, observer
        self._rank, self._progress = rank, progress
        self._shards = Shards(
            ingredients.loaded,
            size=ingredients.samples.size(train=True),
            batch=case.batch,
            world=case.world,
            rank=rank,
            seed=case.seed,
        )
        progress(0, "build")
        self.model = ingredients.model()
        observer.attach(self.model)
        seeds.seed_everything(seeds.derive(case.seed, "rank", rank))
        self.wrapped: nn.Module = strategy.wrap(self.model)
        self._optimizer = ingredients.loaded.workload.optimizer(self.wrapped.parameters())
        observer.started(self.model, self._optimizer)

    def step(self, number: int) -> tuple[float, int, float]:
        """One step; returns the shard's mean loss, its size, and the seconds it took."""
        begun = time.perf_counter()
        case, progress = self._ingredients.case, self._progress
        stretch, ids = self._shards.read(number)
        step = Step(
            index=number,
            rank=self._rank,
            world_size=case.world,
            samples=len(ids),
            total_samples=stretch.count,
        )
        batch = self._ingredients.batch(ids, stretch.count)
        self._observer.reading(number, stretch.epoch, ids)

        progress(number, "forward")
        self._optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = self._ingredients.loaded.workload.loss(self.wrapped, batch)
        loss_value = float(loss.detach())
        scaled = self._strategy.scale_loss(loss, step)
        self._observer.scaled(loss, scaled)
        progress(number, "backward")
        scaled.backward()
        progress(number, "sync")
        self._strategy.sync(self.wrapped, step)
        self._observer.synced(number, self.model)

        progress(number, "update")
        self._optimizer.step()
        self._observer.updated(number, self.model, self._optimizer, loss_value)
        return loss_value, len(ids), time.perf_counter() - begun

    def close(self) -> None:
        """Lets the strategy end what it started."""
        self._strategy.close()
