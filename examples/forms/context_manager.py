"""A context manager around backward: with averaged_gradients(model): loss.backward()

$ distcheck verify --strategy examples/forms/context_manager.py:averaged_gradients --world 4
PASS

Its twin of a class leaves out the division:

$ distcheck verify --strategy examples/forms/context_manager.py:SummedGradients --world 4
FAIL missing-division
"""

from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def averaged_gradients(model):
    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    handles = [p.register_post_accumulate_grad_hook(average) for p in model.parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class SummedGradients:
    def __init__(self, model):
        self.model = model

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
