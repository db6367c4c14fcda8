"""An object beside the model, made once, with a method to call after backward.

$ distcheck verify --strategy examples/forms/beside_the_model.py:Reducer --world 4
PASS

Its buffers are filled when it is made: they hold the first step's gradients for ever.

$ distcheck verify --strategy examples/forms/beside_the_model.py:CapturesTooEarly --world 4
FAIL stale-gradient
"""

import torch
import torch.distributed as dist


class Reducer:
    def __init__(self, model, world_size):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.world_size = world_size

    def reduce_gradients(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.world_size


class CapturesTooEarly:
    def __init__(self, model):
        self.params = list(model.parameters())
        self.buffers = None

    def sync_gradients(self):
        if self.buffers is None:
            self.buffers = [torch.clone(p.grad) for p in self.params]
            for buffer in self.buffers:
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()
        for p, buffer in zip(self.params, self.buffers):
            p.grad.copy_(buffer)
