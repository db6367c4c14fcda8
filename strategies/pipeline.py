"""Pipeline parallelism by torch.distributed.pipelining: each rank has some of the layers.

The batch is cut into micro-batches, which go through the stages one behind the other. GPipe runs
all forward passes, then all backward passes. 1F1B begins the backward pass of a micro-batch as soon
as its forward pass has ended, so that fewer activations are kept.

Each micro-batch's mean loss counts for its share of the samples, so what torch would divide by
their number is not divided again (`scale_grads=False`).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from distcheck.contract import Batch, LossOf, Step, strategy

MICRO_BATCHES = 4  # torch wants them of one size: a shard must be divisible by their number


def chain_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a chain, one after the other. A network of `features` and a linear
    `classifier`, as VGG11, is such a chain, with a flatten between them.
    """
    parts = dict(model.named_children())
    if isinstance(model, nn.Sequential):
        return list(parts.values())
    if list(parts) != ["features", "classifier"]:
        return []
    features, classifier = parts.values()
    is_linear = isinstance(features, nn.Sequential) and isinstance(classifier, nn.Linear)
    return [*features.children(), nn.Flatten(), classifier] if is_linear else []


def layers_of(model: nn.Module, stage: int, stages: int) -> nn.Sequential:
    """A stage's part of a chain of layers: its share of those with parameters, and what comes after
    each. So no later stage begins with a ReLU, which could not work in place on what was received.
    Raises ValueError where there are fewer layers than stages.
    """
    layers = chain_of(model)
    heavy = [place for place, layer in enumerate(layers) if list(layer.parameters())]
    if len(heavy) < stages:
        raise ValueError(
            f"{stages} stages need an nn.Sequential of at least {stages} layers with parameters; "
            f"this model is a {type(model).__name__} with {len(heavy)} in a chain"
        )
    begins = [heavy[len(heavy) * n // stages] for n in range(1, stages)]
    cuts = [0, *begins, len(layers)]
    return nn.Sequential(*layers[cuts[stage] : cuts[stage + 1]])


@strategy(parallel={"pipeline": -1}, micro_batches=MICRO_BATCHES, workload="cnn")
class GPipe:
    """A pipeline (GPipe): all forward passes, then all backward passes."""

    schedule: type[PipelineScheduleSingle] = ScheduleGPipe

    def wrap(self, model: nn.Module) -> nn.Module:
        """This rank's layers."""
        rank, world = dist.get_rank(), dist.get_world_size()
        layers = layers_of(model, rank, world)
        device = next(model.parameters()).device
        self._stage = PipelineStage(layers, rank, world, device)
        return layers

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor | None:
        """Forward and backward of all micro-batches; the last stage has the loss."""

        def share_of_loss(outputs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            part = Batch(
                inputs=batch.inputs[places],
                labels=batch.labels[places],
                ids=batch.ids[places],
                total=batch.total,
            )
            return loss_of.given(outputs, part) * (len(part.ids) / step.samples)

        schedule = self.schedule(
            self._stage, n_microbatches=MICRO_BATCHES, loss_fn=share_of_loss, scale_grads=False
        )
        if self._stage.is_first:
            schedule.step(batch.inputs)
        elif not self._stage.is_last:
            schedule.step()
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.arange(step.samples), losses=losses)
            return torch.stack(losses).sum()
        return None


@strategy(parallel={"pipeline": -1}, micro_batches=MICRO_BATCHES, workload="cnn")
class OneForwardOneBackward(GPipe):
    """A pipeline (1F1B): forward and backward passes alternate once the pipeline is full."""

    schedule = Schedule1F1B
