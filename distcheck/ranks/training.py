"""Building what is trained, alike in every rank and in every reference."""

from dataclasses import dataclass

import torch
from torch import nn

from distcheck import datasets, seeds
from distcheck.contract import Batch, Samples
from distcheck.errors import UsageError
from distcheck.loading import LoadedWorkload, load_workload
from distcheck.records import Case, ModelLayout, TensorSpec

DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Ingredients:
    """A case's workload and samples, opened in this process."""

    case: Case
    loaded: LoadedWorkload
    samples: Samples
    dtype: torch.dtype

    def model(self) -> nn.Module:
        """The model in its initial state: the same bits in every process."""
        seeds.seed_everything(seeds.derive(self.case.seed, "model"))
        model = self.loaded.workload.model(
            sample_shape=self.samples.shape, classes=self.samples.classes
        )
        return model.to(self.dtype).train()

    def batch(self, ids: torch.Tensor, total: int) -> Batch:
        """The samples `ids` [n] of the training split, as part of a step of `total` samples."""
        inputs, labels = self.samples.read(ids, train=True, dtype=self.dtype)
        return Batch(inputs=inputs, labels=labels, ids=ids, total=total)


def open_ingredients(case: Case, description: bytes, data_fd: int | None) -> Ingredients:
    """Loads a case's workload and its samples. Raises UsageError where they do not fit."""
    loaded = load_workload(case.workload)
    samples = (
        loaded.own_samples()
        if loaded.own_samples is not None
        else datasets.open_samples(case.data, description, data_fd)
    )
    size = samples.size(train=True)
    if size < case.batch:
        raise UsageError(
            f"batch {case.batch} is larger than the data set: {case.data} has {size} samples"
        )
    return Ingredients(case, loaded, samples, getattr(torch, case.dtype))


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a trace records: every one, frozen ones included; tied ones once."""
    return list(model.named_parameters())


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's tensors, as `<parameter>/<state key>`, in a fixed order."""
    found = []
    for name, parameter in trainable(model):
        state = optimizer.state.get(parameter, {})
        found += [
            (f"{name}/{key}", value)
            for key, value in sorted(state.items())
            if isinstance(value, torch.Tensor)
        ]
    return found


def describe_model(ingredients: Ingredients, model: nn.Module) -> ModelLayout:
    """What a trace of this model will hold, the optimizer's state included.

    The state's shape is only known after a step, so one is taken, with gradients of zero.
    """
    optimizer = ingredients.loaded.workload.optimizer(model.parameters())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return ModelLayout(
        parameters=tuple(_spec(name, p) for name, p in trainable(model)),
        buffers=tuple(_spec(name, b) for name, b in model.named_buffers()),
        optimizer=tuple(_spec(name, t) for name, t in state_tensors(model, optimizer)),
    )


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
    )
