"""Optimizers in each of torch's implementations, with an exchange before their step."""

import torch.distributed as dist

from . import right


def _average(model, step):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(step.weight)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(step.world_size)


class _Implemented:
    """The workload's optimizer, in another of torch's implementations."""

    fused = foreach = False

    def optimizer(self, build, parameters):
        made = build(parameters)
        for group in made.param_groups:
            group.update(fused=self.fused, foreach=self.foreach)
        return made

    def sync(self, model, step):
        _average(model, step)


@right
class FusedOptimizer(_Implemented):
    """One kernel for all tensors; it rounds in another order."""

    fused = True


@right
class ForeachOptimizer(_Implemented):
    """Lists of tensors."""

    foreach = True


@right
class ForLoopOptimizer(_Implemented):
    """Tensor by tensor."""


@right
class HookedStep(_Implemented):
    """Hooks around the step of foreach kernels."""

    foreach = True

    def optimizer(self, build, parameters):
        made = super().optimizer(build, parameters)
        made.register_step_pre_hook(lambda *_: None)
        made.register_step_post_hook(lambda *_: None)
        return made
