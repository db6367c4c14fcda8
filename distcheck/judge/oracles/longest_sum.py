"""Counts, in a forward pass, the terms per sample that are summed in an element of a gradient.

A layer that is applied at many positions of a sample (a convolution at every pixel, a linear layer
at every token, a recurrent layer at every step) adds a term for each position. So does a layer that
is called several times. Only torch's layers are counted, not parameters that a module of a
different class uses directly.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from distcheck.machine.compat import Conv, ConvTranspose, NormBase, tree_leaves


class LongestSum:
    """Context that counts the positions of a sample at which layers are applied."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        self._samples = samples
        self._counted: defaultdict[nn.Module, int] = defaultdict(int)
        self._model, self._hooks = model, list[Any]()

    def __enter__(self) -> "LongestSum":
        for module in self._model.modules():
            if output_features(module):
                self._hooks.append(module.register_forward_hook(self._count))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def terms(self) -> int:
        """The largest number of terms per sample; 0 if no layer was counted."""
        return max(self._counted.values(), default=0)

    def _count(self, module: nn.Module, inputs: tuple[Any, ...], made: Any) -> None:
        seen = inputs if isinstance(module, ConvTranspose) else made
        tensors = [leaf for leaf in tree_leaves(seen) if isinstance(leaf, torch.Tensor)]
        if tensors:
            rows = self._samples * output_features(module)
            self._counted[module] += -(-tensors[0].numel() // rows)


def output_features(module: nn.Module) -> int:
    """Return output features per position (transposed convolution: input); 0: uncounted."""
    if isinstance(module, Conv):
        return module.in_channels if isinstance(module, ConvTranspose) else module.out_channels
    if isinstance(module, nn.Linear | nn.Bilinear):
        return module.out_features
    if isinstance(module, nn.RNNBase):
        return (module.proj_size or module.hidden_size) * (1 + module.bidirectional)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.embedding_dim
    if isinstance(module, NormBase):
        return module.num_features if module.affine else 0
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return 0 if module.weight is None else module.weight.numel()
    return module.num_channels if isinstance(module, nn.GroupNorm) and module.affine else 0
