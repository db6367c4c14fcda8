"""Hugging Face accelerate: `prepare`, `accumulate`, its own backward.

$ distcheck verify --strategy examples/frameworks/with_accelerate.py:initialize --world 2
PASS
"""

from accelerate import Accelerator


class Engine:
    def __init__(self, model, optimizer):
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def __call__(self, inputs):
        return self.model(inputs)

    def backward(self, loss):
        self.accelerator.backward(loss)

    def step(self):
        self.optimizer.step()

    def no_sync(self):
        return self.accelerator.no_sync(self.model)


def initialize(model, optimizer):
    return Engine(model, optimizer)
