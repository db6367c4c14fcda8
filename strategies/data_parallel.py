"""torch's DataParallel: one process, and every GPU that it sees takes a part of each batch.

The oldest way, and no group of ranks: in a world of one, what one machine computes is what its
GPUs must add up to. Every forward pass copies the model to all of them, and backward adds their
gradients up on the first.
"""

import torch.distributed as dist
from torch import nn

from distcheck.contract import strategy


@strategy(sync="during-backward", device="cuda")
class DataParallel:
    """Wraps the model; forward scatters, backward gathers."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Raises ValueError in a world of several ranks, each of which would take every GPU."""
        if dist.get_world_size() != 1:
            raise ValueError("data_parallel is one process with several GPUs: give --world 1")
        return nn.DataParallel(model)
