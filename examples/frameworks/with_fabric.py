"""Lightning Fabric: `setup`, `backward`, `no_backward_sync`.

$ distcheck verify --strategy examples/frameworks/with_fabric.py:initialize --world 2
PASS
"""

import torch.distributed as dist
from lightning.fabric import Fabric


class Engine:
    def __init__(self, model, optimizer):
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
        self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(model, optimizer)

    def __call__(self, inputs):
        return self.model(inputs)

    def backward(self, loss):
        self.fabric.backward(loss)

    def step(self):
        self.optimizer.step()

    def no_sync(self):
        return self.fabric.no_backward_sync(self.model)


def initialize(model, optimizer):
    return Engine(model, optimizer)
