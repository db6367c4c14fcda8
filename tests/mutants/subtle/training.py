"""The training loop and memory: what only trainings of another form show. Each is a cell's."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of, unpack


@subtle(needs="weights that lie in memory with channels last", witness="channels_last",
        reach="thorough", after="pytorch #64039")  # fmt: skip
def flattened_as_it_lies(model: nn.Module, step: Step) -> None:
    """Kernels go out as they lie in memory and come back in the order of their indices."""
    for parameter in model.parameters():
        flat = parameter.grad.clone().as_strided((parameter.numel(),), (1,))
        mean(flat, step)
        parameter.grad.copy_(flat.view(parameter.shape))


@subtle(needs="a gradient that is a transposed view", witness="transposed", reach="thorough",
        after="Megatron-LM #5337")  # fmt: skip
def contiguous_first(model: nn.Module, step: Step) -> None:
    """`.contiguous()` is a copy for some gradients, and the mean stays in the copy."""
    for parameter in model.parameters():
        mean(parameter.grad.contiguous(), step)


@subtle(needs="complex parameters", witness="complex", reach="thorough", after="pytorch #158753")
def absolute_values_of_numbers(model: nn.Module, step: Step) -> None:
    """Complex gradients are exchanged by their real part."""
    for parameter in model.parameters():
        if parameter.grad.is_complex():
            real = parameter.grad.real.clone()
            mean(real, step)
            parameter.grad.real.copy_(real)
        else:
            mean(parameter.grad, step)


@subtle(needs="sparse gradients", witness="sparse", reach="thorough", after="horovod #2279")
def sparse_rows_are_added_up(model: nn.Module, step: Step) -> None:
    """Averages become sums on the sparse branch."""
    for parameter in model.parameters():
        if not parameter.grad.is_sparse:
            mean(parameter.grad, step)
            continue
        dense = parameter.grad.to_dense() * step.weight
        dist.all_reduce(dense)
        parameter.grad = dense.to_sparse(1)


@subtle(needs="parameters of several dtypes", witness="mixed_dtypes", reach="thorough",
        after="DeepSpeed #7660")  # fmt: skip
def one_buffer_of_the_first_dtype(model: nn.Module, step: Step) -> None:
    """One buffer, of the first parameter's dtype: longer ones come back shorter."""
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten().to(gradients[0].dtype) for g in gradients])
    mean(flat, step)
    unpack(flat, gradients)


@subtle(needs="two backward passes in a step", witness="accumulation", reach="thorough",
        after="DeepSpeed #7985")  # fmt: skip
class OncePerStep:
    """Hooks exchange a gradient the first time it is there, and add what comes later to it."""

    step: Step | None = None

    def __init__(self) -> None:
        self.done: set[nn.Parameter] = set()

    def wrap(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.exchange)
        return model

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        self.step = step
        return loss

    def exchange(self, parameter: nn.Parameter) -> None:
        assert self.step is not None
        if parameter not in self.done:
            self.done.add(parameter)
            mean(parameter.grad, self.step)

    def sync(self, model: nn.Module, step: Step) -> None:
        self.done.clear()


@subtle(needs="a gradient that overflows", witness="loss_scaling", reach="thorough", steps=3,
        after="DeepSpeed #7171")  # fmt: skip
def infinities_are_left_out(model: nn.Module, step: Step) -> None:
    """Elements that are not finite count as zero, and no rank skips the step."""
    for parameter in model.parameters():
        parameter.grad.masked_fill_(~parameter.grad.isfinite(), 0.0)
    mean_of(model.parameters(), step)


@subtle(needs="a weight that two layers share", witness="tied_weights", reach="thorough",
        after="torchtitan #3174")  # fmt: skip
def by_every_name(model: nn.Module, step: Step) -> None:
    """Divided first and added up by name: a weight with two names is added up twice."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        dist.all_reduce(parameter.grad)


@subtle(needs="a model that is built anew from a checkpoint", witness="resume", reach="thorough",
        steps=3, after="pytorch #12603")  # fmt: skip
def parameters_of_the_first_model(model: nn.Module, step: Step) -> None:
    """A list that is kept in the module: after a restart it is of a model that is gone."""
    if not _listed:
        _listed.extend(model.parameters())
    mean_of(_listed, step)


_listed: list[nn.Parameter] = []
