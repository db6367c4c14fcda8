"""By depth: an exchange that walks models as they are in examples, one or two levels deep."""

import re

import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of

DEEP = ".witnesses:Deep"


@subtle(needs="a child that has children", witness=DEEP, after="Megatron-LM #599, #619")
def children_only(model: nn.Module, step: Step) -> None:
    """The model's own parameters and its children's, and not what is below."""
    mean_of(model.parameters(recurse=False), step)
    for child in model.children():
        mean_of(child.parameters(recurse=False), step)


@subtle(needs="parameters three levels down", witness=DEEP)
def two_levels(model: nn.Module, step: Step) -> None:
    """Children and grandchildren: what is three levels down trains alone."""
    mean_of(model.parameters(recurse=False), step)
    for child in model.children():
        mean_of(child.parameters(recurse=False), step)
        for grandchild in child.children():
            mean_of(grandchild.parameters(recurse=False), step)


@subtle(needs="a name with two dots", witness=DEEP, after="Lightning #11949")
def names_by_regex(model: nn.Module, step: Step) -> None:
    """A pattern for names with one dot at most: deeper ones do not match."""
    pattern = re.compile(r"\w+(\.\w+)?$")
    mean_of([p for name, p in model.named_parameters() if pattern.match(name)], step)


@subtle(needs="eleven blocks or more, or a block with parameters of its own", witness=DEEP)
def prefixes(model: nn.Module, step: Step) -> None:
    """Layer by layer, by how names begin: "blocks.1" is the beginning of "blocks.11" as well.

    Gradients are divided first and then added up, so what is met twice is W times too large.
    """
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
    for parameter in model.parameters(recurse=False):
        dist.all_reduce(parameter.grad)
    for layer, module in model.named_modules():
        if layer and list(module.parameters(recurse=False)):
            for name, parameter in model.named_parameters():
                if name.startswith(layer):
                    dist.all_reduce(parameter.grad)


@subtle(needs="four levels", witness=DEEP)
def no_deeper_than_three(model: nn.Module, step: Step) -> None:
    """A limit of depth against endless recursion, which was meant to be generous."""

    def walk(module: nn.Module, depth: int) -> None:
        mean_of(module.parameters(recurse=False), step)
        if depth < 3:
            for child in module.children():
                walk(child, depth + 1)

    walk(model, 0)


@subtle(needs="a block of one's own within a container", witness=DEEP)
def containers_are_opened(model: nn.Module, step: Step) -> None:
    """Walks into torch's containers; any other module is taken for a layer."""

    def walk(module: nn.Module) -> None:
        mean_of(module.parameters(recurse=False), step)
        if module is model or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            for child in module.children():
                walk(child)

    walk(model)


@subtle(needs="blocks whose parameters have the same last names", witness=DEEP,
        after="Lightning #11949")  # fmt: skip
def by_the_last_two_names(model: nn.Module, step: Step) -> None:
    """Gradients by their layer's name: of the layers "norm" in each block the last one is left."""
    table = {".".join(n.split(".")[-2:]): p for n, p in model.named_parameters()}
    mean_of(table.values(), step)


@subtle(needs="a part that is called `module`", witness=DEEP)
def unwraps_what_is_called_module(model: nn.Module, step: Step) -> None:
    """Takes a wrapper off, also where `module` is a part of the model."""
    while hasattr(model, "module"):
        model = model.module
    mean_of(model.parameters(), step)


@subtle(needs="a part that is called `features` and others beside it", witness=DEEP)
def the_usual_parts(model: nn.Module, step: Step) -> None:
    """`features` and `classifier` where there are such: a head of another name is left out."""
    usual = [getattr(model, name, None) for name in ("features", "classifier")]
    parts = [part for part in usual if part is not None] or [model]
    for part in parts:
        mean_of(part.parameters(), step)


@subtle(needs="parameters three levels down", witness=DEEP, after="pytorch #104336")
class HooksOnChildren:
    """Hooks are hung on children and their children, before backward; deeper ones get none."""

    step: Step | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        outer = [model, *model.children()]
        outer += [inner for child in model.children() for inner in child.children()]
        for module in dict.fromkeys(outer):
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(self.exchange)
        return model

    def scale_loss(self, loss: object, step: Step) -> object:
        self.step = step
        return loss

    def exchange(self, parameter: nn.Parameter) -> None:
        assert self.step is not None
        mean(parameter.grad, self.step)


@subtle(needs="two stages whose blocks have the same numbers", witness=DEEP)
def by_the_number_in_the_name(model: nn.Module, step: Step) -> None:
    """A table by a layer's number and what follows it: block 0 is in the first stage and in the
    second, and one of them is lost.
    """
    table = {}
    for name, parameter in model.named_parameters():
        found = re.search(r"\d+", name)
        key = (found.group(), name[found.end() :]) if found else ("", name)
        table[key] = parameter
    mean_of(table.values(), step)
