"""Another gradient on purpose: it fails until it is said by which design it differs.

(A model of one bucket for PowerSGD: on gloo torch's hook exchanges several in whatever order they come.)

$ distcheck verify --strategy torch.distributed.algorithms.ddp_comm_hooks.default_hooks:bf16_compress_hook --accept low-precision:bf16 --world 4
PASS

$ distcheck verify --strategy torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook:powerSGD_hook --arg state=@examples/forms/lossy_designs.py:TwoDirections --accept low-rank:2 --workload mlp --world 4
PASS

$ distcheck verify --strategy examples/forms/lossy_designs.py:eight_bits --accept quantized:8 --world 4
PASS

$ distcheck verify --strategy examples/forms/lossy_designs.py:eight_bits_summed --accept quantized:8 --world 4
FAIL missing-division

$ distcheck verify --strategy examples/forms/lossy_designs.py:LocalSGD --accept local-sgd:2 --steps 6 --world 4
PASS
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState


class TwoDirections(PowerSGDState):
    def __init__(self):
        super().__init__(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def eight_bits_summed(model):
    """Whole numbers from -127 to 127, and what one of them is worth."""
    for parameter in model.parameters():
        quantum = parameter.grad.abs().max() / 127
        whole = (parameter.grad / quantum).round().to(torch.int8)
        everyone = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        quanta = [torch.empty_like(quantum) for _ in everyone]
        dist.all_gather(everyone, whole)
        dist.all_gather(quanta, quantum)
        parameter.grad = sum(q * w.to(q.dtype) for q, w in zip(quanta, everyone, strict=True))


def eight_bits(model):
    eight_bits_summed(model)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


class LocalSGD:
    """Every rank steps by itself; parameters are averaged after every second step."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0
        self.param_groups = optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    dist.all_reduce(parameter.data)
                    parameter.data /= dist.get_world_size()
