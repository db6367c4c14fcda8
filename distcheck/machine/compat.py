"""Names of torch that have no public counterpart: one place to mend when a release moves one."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # what all of its kinds derive from
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["BatchNorm", "TorchDispatchMode", "has_step_hooks", "hooks_of", "tree_leaves"]

OF_MODULES = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks",)


def hooks_of(owner: nn.Module | torch.Tensor) -> set[tuple[str, int]]:
    """The hooks on a module or a tensor, each with its kind."""
    kinds = OF_MODULES if isinstance(owner, nn.Module) else OF_TENSORS
    return {(kind, key) for kind in kinds for key in getattr(owner, kind, None) or ()}


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run before an optimizer's step; people's own may have no place for them."""
    return any(getattr(optimizer, kind, None) for kind in OF_OPTIMIZERS)
