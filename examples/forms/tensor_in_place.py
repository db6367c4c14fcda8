"""A collective of one tensor, in place or returning a new one; it is applied to every gradient.

$ distcheck verify --strategy examples/forms/tensor_in_place.py:mean_ --world 4
PASS

$ distcheck verify --strategy examples/forms/tensor_in_place.py:mean --world 4
PASS

One that adds up and leaves the division to its caller is said to be a sum:

$ distcheck verify --strategy examples/forms/tensor_in_place.py:all_reduce_async --as tensor-sum --world 4
PASS

One that splits the tensor fails on a scalar, and is called on a vector of all gradients:

$ distcheck verify --strategy examples/forms/tensor_in_place.py:mean_in_pieces_ --as flat-mean --world 4
PASS

The result is rounded to sixteen bits on its way:

$ distcheck verify --strategy examples/forms/tensor_in_place.py:mean_in_half --world 4
FAIL low-precision
"""

import torch
import torch.distributed as dist


def mean_(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def mean(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def all_reduce_async(tensor):
    return dist.all_reduce(tensor, async_op=True)


def mean_in_pieces_(tensor):
    for piece in torch.chunk(tensor, 8):
        mean_(piece)


def mean_in_half(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.to(torch.bfloat16)
    dist.all_reduce(half)
    return half.to(tensor.dtype) / dist.get_world_size()
