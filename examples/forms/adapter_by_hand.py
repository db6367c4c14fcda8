"""Code that no form fits, and the three lines beside it that make a strategy of it.

It wants gradients by name, a compressor, and hands back what only it does:

$ distcheck verify --strategy examples/forms/adapter_by_hand.py:exchange --world 4
refused: unknown parameters compressor, on_done; pass --arg compressor=VALUE

$ distcheck verify --strategy examples/forms/adapter_by_hand.py:sync --world 4
PASS
"""

import torch.distributed as dist


def exchange(named_gradients, compressor, on_done):
    """Code as its author wrote it."""
    for name, gradient in named_gradients:
        packed = compressor(gradient)
        dist.all_reduce(packed)
        on_done(name, packed / dist.get_world_size())


# The adapter: `step` has index, rank, world_size, samples, total_samples, weight.
def sync(model, step):
    gradients = [(name, p.grad) for name, p in model.named_parameters()]
    exchange(gradients, lambda g: g, lambda name, g: setattr(model.get_parameter(name), "grad", g))
