"""A network that is cut into stages, wrongly: by torch's schedules, and by send and receive."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from distcheck.contract import Batch, LossOf, Step, strategy

from . import mutant

_PARTS = 4


def _stage(model: nn.Module, stage: int, stages: int) -> nn.Sequential:
    layers = list(model.children())
    middle = (len(layers) + 1) // 2
    cuts = [0, middle, len(layers)]
    assert stages == 2
    return nn.Sequential(*layers[cuts[stage] : cuts[stage + 1]])


class _Scheduled:
    """GPipe; each micro-batch's loss counts `share`, and torch may scale as well."""

    share, scales = 1.0, False

    def wrap(self, model: nn.Module) -> nn.Module:
        layers = _stage(model, dist.get_rank(), dist.get_world_size())
        self.stage = PipelineStage(layers, dist.get_rank(), 2, torch.device("cpu"))
        return layers

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor | None:
        def loss(outputs: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            part = Batch(
                inputs=batch.inputs[at], labels=batch.labels[at], ids=batch.ids[at], total=_PARTS
            )
            return loss_of.given(outputs, part) * self.share

        schedule = ScheduleGPipe(
            self.stage, n_microbatches=_PARTS, loss_fn=loss, scale_grads=self.scales
        )
        if dist.get_rank() == 0:
            schedule.step(batch.inputs)
            return None
        losses: list[torch.Tensor] = []
        schedule.step(target=torch.arange(step.samples), losses=losses)
        return torch.stack(losses).mean() / self.share


@mutant(caught="gradients full batch float32", world=2)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class NeverDividesByMicroBatches(_Scheduled):
    """Each micro-batch's mean loss counts fully, and torch is asked not to scale."""


@mutant(caught="gradients full batch float32", world=2, seldom=True)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class DividesByMicroBatchesTwice(_Scheduled):
    """The loss is divided, and torch scales gradients as well."""

    share, scales = 1 / _PARTS, True


class _ByHand:
    """Send and receive; what a mutant does otherwise is a method or an attribute of its own."""

    detaches = False

    def wrap(self, model: nn.Module) -> nn.Module:
        self.layers = _stage(model, dist.get_rank() % 2, 2)
        self.first = dist.get_rank() % 2 == 0
        self.peer = dist.get_rank() + (1 if self.first else -1)
        return self.layers

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor | None:
        parts = batch.split(_PARTS)
        if self.first:
            outputs = [self.layers(part.inputs) for part in parts]
            for output in self.sent(outputs):
                dist.send(output.detach(), self.peer)
            self.receive_gradients(outputs, step)
            return None
        total, inputs = torch.zeros(()), []
        for part in parts:
            received = torch.empty(len(part.ids), *self.shape(batch))
            dist.recv(received, self.peer)
            inputs.append(received if self.detaches else received.requires_grad_())
            loss = loss_of.given(self.made(self.layers(inputs[-1])), part)
            share = len(part.ids) / step.samples
            (loss * share).backward()
            total += loss.detach() * share
        for one in inputs if not self.detaches else ():
            dist.send(one.grad, self.peer)
        return self.returned(total, loss)

    def shape(self, batch: Batch) -> tuple[int, ...]:
        return (next(iter(self.layers.parameters())).shape[1],)

    def sent(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return outputs

    def made(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def returned(self, total: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return total

    def receive_gradients(self, outputs: list[torch.Tensor], step: Step) -> None:
        received = [torch.empty_like(output) for output in outputs]
        for one in received if not self.detaches else ():
            dist.recv(one, self.peer)
        self.run_backward(outputs, received, step)

    def run_backward(
        self, outputs: list[torch.Tensor], received: list[torch.Tensor], step: Step
    ) -> None:
        for output, gradient in zip(outputs, received, strict=True):
            output.backward(gradient)


@mutant(caught="gradients full batch float32", world=2, seldom=True)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class NothingComesBack(_ByHand):
    """Activations are received as constants, and no gradient is sent back."""

    detaches = True

    def run_backward(self, *_: Any) -> None:
        pass


@mutant(caught="gradients full batch float32", world=2, seldom=True)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class LosesTheLastMicroBatch(_ByHand):
    """The first stage runs no backward for the last micro-batch."""

    def run_backward(
        self, outputs: list[torch.Tensor], received: list[torch.Tensor], step: Step
    ) -> None:
        super().run_backward(outputs[:-1], received[:-1], step)


@mutant(caught="gradients full batch float32", world=2, seldom=True)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class GradientsOfOtherMicroBatches(_ByHand):
    """Gradients arrive in one order, and are used in the other."""

    def run_backward(
        self, outputs: list[torch.Tensor], received: list[torch.Tensor], step: Step
    ) -> None:
        super().run_backward(outputs, received[::-1], step)


@mutant(
    caught="gradients full batch float32, loss full batch float32, outputs full batch float32",
    world=2,
    seldom=True,
)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class ActivationsOfOtherMicroBatches(_ByHand):
    """A buffer is sent before it is filled: each micro-batch gets the one before."""

    def sent(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [outputs[0], *outputs[:-1]]


@mutant(caught="gradients full batch float32", world=2, step=1, seldom=True)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class KeepsTheLastStepsGradient(_ByHand):
    """The first stage adds this step's gradients to the last step's."""

    def run_backward(
        self, outputs: list[torch.Tensor], received: list[torch.Tensor], step: Step
    ) -> None:
        super().run_backward(outputs, received, step)
        own = [parameter.grad.clone() for parameter in self.layers.parameters()]
        if step.index:
            for parameter, before in zip(self.layers.parameters(), self.before, strict=True):
                parameter.grad += before
        self.before = own


@mutant(caught="loss full batch float32", world=2, seldom=True)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class ReturnsTheLastMicroBatchsLoss(_ByHand):
    """Gradients are right; the loss is one micro-batch's."""

    def returned(self, total: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return last


@mutant(
    caught="gradients full batch float32, agreement", world=2, workload=".small:TiedChain",
    steps=1, seldom=True,
)  # fmt: skip
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class TiedAcrossStages(_ByHand):
    """One weight is in both stages, and each stage keeps its own gradient of it."""


class _TwoPipelines(_ByHand):
    def wrap(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        self.group = mesh.get_group("data")
        return super().wrap(model)

    def average(self, step: Step) -> None:
        for parameter in self.layers.parameters():
            parameter.grad /= step.shards
            dist.all_reduce(parameter.grad, group=self.group)


@mutant(caught="gradients full batch float32, agreement", steps=1, seldom=True)
@strategy(parallel={"data": 2, "pipeline": 2}, micro_batches=_PARTS)
class OneStageIsNotAveraged(_TwoPipelines):
    """The pipelines average their last stage, and not their first."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if not self.first:
            self.average(step)


@mutant(caught="outputs full batch float32", world=2, steps=1, seldom=True)
@strategy(parallel={"pipeline": 2}, micro_batches=_PARTS)
class TakesTheLogarithmTwice(_ByHand):
    """The last stage returns log-probabilities, and cross-entropy takes their log-softmax again."""

    def made(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.log_softmax(1)
