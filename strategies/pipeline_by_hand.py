"""Pipeline parallelism with nothing but send and receive: GPipe, in one file.

Every rank has some of the layers, a stage. A micro-batch's activations go from stage to stage, and
their gradients come back the other way. A stage keeps its inputs and outputs until their gradient
arrives, and adds up the gradients of its parameters over the micro-batches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distcheck.contract import Batch, LossOf, Step, strategy

MICRO_BATCHES = 4


def send(tensor: torch.Tensor, rank: int) -> None:
    """Sends a tensor, after its shape: the receiver has to make room for it."""
    dist.send(torch.tensor([tensor.dim(), *tensor.shape, *[0] * (7 - tensor.dim())]), rank)
    dist.send(tensor.detach().contiguous(), rank)


def receive(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Receives what `send` has sent."""
    shape = torch.zeros(8, dtype=torch.int64)
    dist.recv(shape, rank)
    tensor = torch.empty(shape[1 : 1 + int(shape[0])].tolist(), dtype=dtype)
    dist.recv(tensor, rank)
    return tensor


@strategy(parallel={"pipeline": -1}, micro_batches=MICRO_BATCHES, workload="cnn")
class PipelineByHand:
    """A pipeline by hand, with one stage per rank."""

    stages = property(lambda self: dist.get_world_size())

    def wrap(self, model: nn.Module) -> nn.Module:
        """This rank's layers: its share of those with parameters, and what comes before them."""
        layers = list(model.children())
        heavy = [place for place, layer in enumerate(layers) if list(layer.parameters())]
        if not isinstance(model, nn.Sequential) or len(heavy) < self.stages:
            raise ValueError(
                f"{self.stages} stages need an nn.Sequential of at least {self.stages} layers with "
                f"parameters; this model is a {type(model).__name__} with {len(heavy)}"
            )
        ends = [heavy[len(heavy) * (n + 1) // self.stages - 1] + 1 for n in range(self.stages - 1)]
        cuts = [0, *ends, len(layers)]
        stage = dist.get_rank() % self.stages
        self._is_first, self._is_last = stage == 0, stage == self.stages - 1
        self._layers = nn.Sequential(*layers[cuts[stage] : cuts[stage + 1]])
        self._dtype = next(model.parameters()).dtype
        return self._layers

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor | None:
        """All forward passes, then all backward passes in the same order."""
        before, after = dist.get_rank() - 1, dist.get_rank() + 1
        passes: list[tuple[torch.Tensor, torch.Tensor]] = []
        total = torch.zeros((), dtype=self._dtype)
        for part in batch.split(MICRO_BATCHES):
            if self._is_first:
                inputs = part.inputs
            else:
                inputs = receive(before, self._dtype).requires_grad_()
            outputs = self._layers(inputs)
            if self._is_last:  # each micro-batch counts for its share of the samples
                outputs = loss_of.given(outputs, part) * (len(part.ids) / step.samples)
                total += outputs.detach()
            else:
                send(outputs, after)
            passes.append((inputs, outputs))
        for inputs, outputs in passes:
            outputs.backward(None if self._is_last else receive(after, self._dtype))
            if not self._is_first:
                assert inputs.grad is not None
                send(inputs.grad, before)
        return total if self._is_last else None


@strategy(parallel={"data": -1, "pipeline": 2}, micro_batches=MICRO_BATCHES, workload="mlp")
class DataPipeline(PipelineByHand):
    """Pairs of ranks are pipelines; each pair reads its own samples. World 4 is 2 x 2."""

    stages = property(lambda self: 2)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The pipeline's layers; the mesh says who has the same ones."""
        shape = (dist.get_world_size() // 2, 2)
        self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "pipeline"))
        return super().wrap(model)

    def sync(self, model: nn.Module, step: Step) -> None:
        """The mean over the ranks that have the same layers, weighted by their samples."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(step.weight / step.shards)
                dist.all_reduce(parameter.grad, group=self._mesh.get_group("data"))
