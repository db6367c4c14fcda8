"""Precision of single tensors: most of an exchange is exact, and a part of it is not."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of

DEEP, LARGE, TWINS = ".witnesses:Deep", ".witnesses:Large", ".witnesses:Twins"
TINY, STEEP = ".witnesses:Tiny", ".witnesses:Steep"


def _short(gradient: torch.Tensor, step: Step, dtype: torch.dtype) -> None:
    shortened = gradient.to(dtype)
    mean(shortened, step)
    gradient.copy_(shortened)


@subtle(needs="an embedding", after="DeepSpeed #7660")
def embeddings_in_bfloat16(model: nn.Module, step: Step) -> None:
    """Embeddings are large, and go in bfloat16."""
    short = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():
        if parameter in short:
            _short(parameter.grad, step, torch.bfloat16)
        else:
            mean(parameter.grad, step)


@subtle(needs="a normalizing layer", after="DeepSpeed #7660")
def norms_in_half(model: nn.Module, step: Step) -> None:
    """Norms have few elements, for which half precision is thought to do."""
    norms = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
    short = {p for m in model.modules() if isinstance(m, norms) for p in m.parameters()}
    for parameter in model.parameters():
        if parameter in short:
            _short(parameter.grad, step, torch.float16)
        else:
            mean(parameter.grad, step)


@subtle(needs="a tensor over 2^20 elements", witness=LARGE, after="fairscale #795")
def large_ones_in_bfloat16(model: nn.Module, step: Step) -> None:
    """Tensors over 2^20 elements go in bfloat16, to save time."""
    for parameter in model.parameters():
        if parameter.numel() > 1 << 20:
            _short(parameter.grad, step, torch.bfloat16)
        else:
            mean(parameter.grad, step)


@subtle(needs="a deep model", witness=DEEP)
def the_65th_in_half(model: nn.Module, step: Step) -> None:
    """The second bucket of 64 tensors was made with another dtype."""
    for number, parameter in enumerate(model.parameters()):
        if number >= 64:
            _short(parameter.grad, step, torch.float16)
        else:
            mean(parameter.grad, step)


@subtle(needs="a matrix that is square", witness=TWINS, after="pytorch #57410")
def square_ones_in_half(model: nn.Module, step: Step) -> None:
    """Square matrices are attention's, and go as autocast has them."""
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]:
            _short(parameter.grad, step, torch.float16)
        else:
            mean(parameter.grad, step)


@subtle(needs="a model with float64 parameters", witness=".witnesses:Plain", dtype="float64",
        after="DeepSpeed #7660")  # fmt: skip
def everything_is_float32(model: nn.Module, step: Step) -> None:
    """The buffer is float32, whatever the gradient's dtype."""
    for parameter in model.parameters():
        _short(parameter.grad, step, torch.float32)


@subtle(needs="gradients below 1e-8", witness=TINY, after="horovod #3505")
def noise_is_cut_off(model: nn.Module, step: Step) -> None:
    """What is below 1e-8 is set to zero, so that it compresses."""
    for parameter in model.parameters():
        parameter.grad[parameter.grad.abs() < 1e-8] = 0
    mean_of(model.parameters(), step)


@subtle(needs="gradients over 1,000", witness=STEEP, after="DeepSpeed #1801")
def spikes_are_clamped(model: nn.Module, step: Step) -> None:
    """Each rank clamps its gradients to 1,000 before they go out."""
    for parameter in model.parameters():
        parameter.grad.clamp_(-1000, 1000)
    mean_of(model.parameters(), step)


@subtle(
    needs="a model with float64 parameters",
    witness=".witnesses:Plain",
    dtype="float64",
    after="pytorch #149768",
)
def adds_an_epsilon(model: nn.Module, step: Step) -> None:
    """Divided by W + 1e-8, against a division by zero that cannot be."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(step.world_size + 1e-8)


@subtle(needs="any model", witness=".witnesses:Plain", after="DeepSpeed #5555")
def last_head_is_off_by_1e_5(model: nn.Module, step: Step) -> None:
    """One parameter's factor was typed in with five digits."""
    parameters = list(model.parameters())
    mean_of(parameters, step)
    parameters[-1].grad.mul_(1.00001)


@subtle(needs="an average over many elements of unlike size", after="pytorch #57410")
def scaled_to_sixteen_bits(model: nn.Module, step: Step) -> None:
    """A layer's norm parameters are rounded to 16 bits of their largest element."""
    for parameter in model.parameters():
        mean(parameter.grad, step)
        if parameter.ndim == 1 and parameter.numel() == 8:
            quantum = parameter.grad.abs().max() / 2**15
            if quantum > 0:
                parameter.grad.div_(quantum).round_().mul_(quantum)
