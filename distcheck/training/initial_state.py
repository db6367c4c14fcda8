"""The state of a recorded run as the one that a model begins with."""

import os
import stat

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from distcheck.errors import UsageError


def load_initial(model: nn.Module, file: str) -> None:
    """Give a model the parameters and buffers that the ranks of a saved trace began with, and read
    no others. Raises UsageError if the file does not have them.
    """
    try:
        if not stat.S_ISREG(os.lstat(file).st_mode):
            raise ValueError("it is not a regular file")
        with safe_open(file, "pt") as recorded, torch.no_grad():
            held: dict[str, list[str]] = {}  # ranks that began with the same bits share one tensor
            for key in recorded.keys():  # noqa: SIM118
                held.setdefault(key.partition("/")[2], []).append(key)
            for kind, tensors in (
                ("parameter", model.named_parameters()),
                ("buffer", model.named_buffers()),
            ):
                for name, tensor in tensors:
                    key = min(held[f"{kind}/{name}"])
                    in_pairs = (*tensor.shape, 2) if tensor.is_complex() else None
                    shape = tuple(recorded.get_slice(key).get_shape())
                    if shape not in (tuple(tensor.shape), in_pairs):
                        raise ValueError(f"{name} has the shape {shape}")
                    initial = recorded.get_tensor(key)
                    if tensor.is_complex() and not initial.is_complex():
                        initial = torch.view_as_complex(initial)
                    if (initial.shape, initial.dtype) != (tensor.shape, tensor.dtype):
                        raise ValueError(
                            f"{name} is {initial.dtype} of shape {tuple(initial.shape)}"
                        )
                    tensor.copy_(initial)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the recorded initial state {file} does not go with the model: "
            f"{type(error).__name__}: {error}"
        ) from error
