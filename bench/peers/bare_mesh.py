"""Bare VGG11 training in a 2 x 2 mesh: two pipelines of two stages, nothing recorded.

    torchrun --nproc-per-node 4 bare_mesh.py STEPS

Each pipeline reads half of the batch, in four micro-batches; ranks with the same layers average
their gradients. Prints the seconds that the slowest rank spent in the steps, nothing else.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bare_training import BATCH, vgg11
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

MICRO_BATCHES = 4


def network() -> nn.Module:
    """VGG11 as a chain. ReLU does not write in place: where a stage begins with one, its inputs are
    leaves of the graph.
    """
    chain = vgg11()
    for module in chain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return chain


class Workload:
    """The same network, loss and optimizer, as `--workload bare_mesh.py:workload` takes them."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """A chain of layers."""
        return network()

    def loss(self, model: nn.Module, batch: object) -> torch.Tensor:
        """Cross-entropy, the mean over the samples."""
        return F.cross_entropy(model(batch.inputs), batch.labels)  # type: ignore[attr-defined]

    def optimizer(self, parameters: object) -> torch.optim.Optimizer:
        """The course's settings."""
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)  # type: ignore[arg-type]


workload = Workload()


def send(tensor: torch.Tensor, rank: int) -> None:
    """Its shape, then the tensor."""
    dist.send(torch.tensor([tensor.dim(), *tensor.shape, *[0] * (7 - tensor.dim())]), rank)
    dist.send(tensor.detach().contiguous(), rank)


def receive(rank: int) -> torch.Tensor:
    """What `send` has sent."""
    shape = torch.zeros(8, dtype=torch.int64)
    dist.recv(shape, rank)
    tensor = torch.empty(shape[1 : 1 + int(shape[0])].tolist())
    dist.recv(tensor, rank)
    return tensor


def train_step(layers: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """All forward passes of this stage, then all backward passes."""
    rank, first = dist.get_rank(), dist.get_rank() % 2 == 0
    passes = []
    for part, wanted in zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
        inputs = part if first else receive(rank - 1).requires_grad_()
        outputs = layers(inputs)
        if first:
            send(outputs, rank + 1)
        else:
            outputs = F.cross_entropy(outputs, wanted) * (len(part) / len(images))
        passes.append((inputs, outputs))
    for inputs, outputs in passes:
        outputs.backward(receive(rank + 1) if first else None)
        if not first:
            send(inputs.grad, rank - 1)


def main(steps: int) -> None:
    """Trains and prints the seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    torch.manual_seed(0)
    model = network()
    whole = list(model.children())
    heavy = [place for place, layer in enumerate(whole) if list(layer.parameters())]
    cut = heavy[len(heavy) // 2 - 1] + 1
    layers = nn.Sequential(*(whole[cut:] if dist.get_rank() % 2 else whole[:cut]))
    optimizer = workload.optimizer(layers.parameters())
    images, labels = torch.randn(BATCH // 2, 3, 32, 32), torch.randint(0, 10, (BATCH // 2,))
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        train_step(layers, images, labels)
        for parameter in layers.parameters():
            parameter.grad /= 2
            dist.all_reduce(parameter.grad, group=mesh.get_group("data"))
        optimizer.step()
    spent = torch.tensor([time.perf_counter() - begun])
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(float(spent), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads can abort a rank that ends while its peers are ending


if __name__ == "__main__":
    main(int(sys.argv[1]))
