"""Names that a script sets when it is run, and that its functions take from the module.

Usual ones are filled in:

$ distcheck verify --strategy examples/forms/free_names.py:average_gradients --world 4
PASS

Others are given:

$ distcheck verify --strategy examples/forms/free_names.py:average_over_copies --set copies=@world_size --world 4
PASS

$ distcheck verify --strategy examples/forms/free_names.py:average_over_copies --set copies=8 --world 4
FAIL wrong-divisor

$ distcheck verify --strategy examples/forms/free_names.py:average_over_copies --world 4
refused: uses copies, which its module does not define; pass --set copies=VALUE
"""

import argparse

import torch.distributed as dist


def average_gradients(model):
    if world_size == 1:
        return
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= args.world_size


def average_over_copies(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= copies


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int)
    args = parser.parse_args()
    world_size = args.world_size
    copies = args.world_size
