"""By kind: an exchange that knows the modules and parameters of one kind of model."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of


@subtle(needs="a module that is neither linear nor a convolution, with parameters")
def layers_by_type(model: nn.Module, step: Step) -> None:
    """Only linear layers and 2-d convolutions are exchanged: embeddings and norms train alone.

    A second look for parameters that belong to no such layer stops at the model itself.
    """
    mean_of(model.parameters(recurse=False), step)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            mean_of(module.parameters(), step)


@subtle(needs="a normalizing layer", after="Megatron-LM #1446")
def norms_are_left_to_the_sequence_group(model: nn.Module, step: Step) -> None:
    """LayerNorm and GroupNorm wait for an exchange in another group, which does not exist."""
    elsewhere = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.GroupNorm)
        for parameter in module.parameters()
    }
    mean_of([p for p in model.parameters() if p not in elsewhere], step)


@subtle(needs="an embedding with dense gradients")
def embeddings_are_sparse(model: nn.Module, step: Step) -> None:
    """Embeddings take the sparse path, which has nothing for a gradient that is dense."""
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    taken = {id(weight) for weight in embeddings}
    mean_of([p for p in model.parameters() if id(p) not in taken], step)
    for weight in embeddings:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()
            mean(weight.grad.values(), step)


@subtle(needs="an embedding of which ranks use other rows", after="horovod #2279")
def rows_that_this_rank_used(model: nn.Module, step: Step) -> None:
    """Of an embedding, a rank writes back the rows that it used itself: other ranks' are lost."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                used = parameter.grad.abs().sum(1) != 0
                whole = parameter.grad.clone()
                mean(whole, step)
                parameter.grad[used] = whole[used]
            else:
                mean(parameter.grad, step)


@subtle(needs="an embedding whose row 0 is a word")
def row_0_is_padding(model: nn.Module, step: Step) -> None:
    """The first row of an embedding is taken for padding, whose gradient is zero."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            mean(parameter.grad[1:] if isinstance(module, nn.Embedding) else parameter.grad, step)


@subtle(needs="a parameter of three or of five dimensions")
def shapes_of_images(model: nn.Module, step: Step) -> None:
    """Numbers, vectors, matrices and 2-d kernels: a kernel of 1 or 3 dimensions has no case."""
    for parameter in model.parameters():
        if parameter.ndim <= 1 or parameter.ndim == 2:
            mean(parameter.grad, step)
        elif parameter.ndim == 4:
            mean(parameter.grad.view(len(parameter), -1), step)


@subtle(needs="a module with both parameters and children: attention, or one of its own")
def leaf_modules(model: nn.Module, step: Step) -> None:
    """Parameters of modules without children, and of the model: attention's are on neither."""
    mean_of(model.parameters(recurse=False), step)
    for module in model.modules():
        if module is not model and not list(module.children()):
            mean_of(module.parameters(), step)


@subtle(needs="a parameter of a submodule that is not called weight or bias")
def weights_and_biases(model: nn.Module, step: Step) -> None:
    """Submodules have a weight and a bias: `in_proj_weight` is called otherwise."""
    mean_of(model.parameters(recurse=False), step)
    for module in model.modules():
        for name in ("weight", "bias"):
            parameter = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter):
                mean(parameter.grad, step)


@subtle(needs="a 1x1 convolution", after="Megatron-LM #5337")
def pointwise_is_a_matrix(model: nn.Module, step: Step) -> None:
    """A 1x1 kernel is exchanged as a matrix that is a copy, and never copied back."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient.ndim == 4 and gradient.shape[2:] == (1, 1):
            gradient = gradient[:, :, 0, 0].clone(memory_format=torch.contiguous_format)
        mean(gradient, step)


@subtle(needs="a vector of one element", after="horovod #2375")
def one_element_is_a_flag(model: nn.Module, step: Step) -> None:
    """What has the shape (1,) is taken for a flag and not for a parameter."""
    mean_of([p for p in model.parameters() if p.shape != (1,)], step)


@subtle(needs="attention with fused projections", after="torchtitan #2387")
def projections_are_sharded(model: nn.Module, step: Step) -> None:
    """Names with "proj" are a tensor-parallel group's, also where there is none."""
    mean_of([p for name, p in model.named_parameters() if "proj" not in name], step)


@subtle(needs="a transposed convolution")
def transposed_kernels(model: nn.Module, step: Step) -> None:
    """Kernels of transposed convolutions are turned by a copy, which gets the mean."""
    turned = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvTransposeNd)]
    weights = {id(module.weight) for module in turned}
    for parameter in model.parameters():
        gradient = parameter.grad
        mean(gradient.transpose(0, 1).contiguous() if id(parameter) in weights else gradient, step)


@subtle(needs="a module that is not in torch.nn's first list: PReLU, attention")
def known_layers(model: nn.Module, step: Step) -> None:
    """A table of layers that have parameters, without PReLU and attention."""
    known = ("Linear", "Conv", "Norm", "Embedding")
    mean_of(model.parameters(recurse=False), step)
    for module in model.modules():
        if any(word in type(module).__name__ for word in known):
            mean_of(module.parameters(), step)


@subtle(needs="a parameter whose first dimension is 1 and that has three")
def first_dimension_is_the_batch(model: nn.Module, step: Step) -> None:
    """[1, n, d] is taken for a batch of one activation that is broadcast, not for positions."""
    for parameter in model.parameters():
        if parameter.ndim == 3 and len(parameter) == 1:
            dist.broadcast(parameter.grad, 0)
        else:
            mean(parameter.grad, step)
