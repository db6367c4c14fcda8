"""Megatron-core's DistributedDataParallel, whose gradients are in `main_grad`.

$ distcheck verify --strategy examples/frameworks/with_megatron.py:initialize --world 2
PASS
"""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig


class Engine(DistributedDataParallel):
    def __init__(self, model, optimizer):
        torch.cuda.current_device = lambda: torch.device("cpu")  # its buffers' device
        parallel_state.initialize_model_parallel()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        super().__init__(config, DistributedDataParallelConfig(), model)
        self.optimizer = optimizer

    def backward(self, loss):
        loss.backward()
        self.finish_grad_sync()
        for parameter in self.module.parameters():  # as its optimizer does
            parameter.grad = parameter.main_grad

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.zero_grad_buffer()
        self.module.zero_grad()  # else the next backward adds to main_grad twice


def initialize(model, optimizer):
    return Engine(model, optimizer)
