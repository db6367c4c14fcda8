"""A function that is called once, before training: it registers hooks that synchronise.

$ distcheck verify --strategy examples/forms/hook_installer.py:install_hooks --world 4
PASS

A hook that reduces a copy and returns nothing changes nothing:

$ distcheck verify --strategy examples/forms/hook_installer.py:installs_without_return --world 4
FAIL missing-sync
"""

import torch.distributed as dist


def install_hooks(model):
    def hook(grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()

    for p in model.parameters():
        p.register_hook(hook)


def installs_without_return(model):
    def hook(grad):
        mean = grad / dist.get_world_size()
        dist.all_reduce(mean)

    for p in model.parameters():
        p.register_hook(hook)
