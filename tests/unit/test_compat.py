"""Each private name of torch is there in the torch that is installed, and holds what is read."""

import torch
from torch import nn

from distcheck.machine import compat


def test_every_name_is_there() -> None:
    module = nn.Linear(1, 1)
    assert all(hasattr(module, name) for name in compat.OF_MODULES)
    assert all(hasattr(module.weight, name) for name in compat.OF_TENSORS)
    optimizer = torch.optim.SGD(module.parameters())
    assert all(hasattr(optimizer, name) for name in compat.OF_OPTIMIZERS)
    assert all(issubclass(kind, compat.BatchNorm) for kind in (nn.BatchNorm2d, nn.SyncBatchNorm))
    assert compat.tree_leaves([1, {"a": (2, 3)}]) == [1, 2, 3]


def test_hooks_are_seen_when_they_are_registered() -> None:
    module = nn.Linear(1, 1)
    assert not compat.hooks_of(module)
    assert not compat.hooks_of(module.weight)
    module.register_forward_hook(print)
    module.register_forward_pre_hook(print)
    module.register_full_backward_hook(print)
    module.register_full_backward_pre_hook(print)
    assert {kind for kind, _ in compat.hooks_of(module)} == set(compat.OF_MODULES)
    module.weight.register_hook(print)
    module.weight.register_post_accumulate_grad_hook(print)
    assert {kind for kind, _ in compat.hooks_of(module.weight)} == set(compat.OF_TENSORS)


def test_hooks_before_a_step_are_seen() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert not compat.has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(print)
    assert compat.has_step_hooks(optimizer)
    handle.remove()
    assert not compat.has_step_hooks(optimizer)
