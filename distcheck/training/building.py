"""Builds the model, data and optimizer of a case, identically in every rank and every reference."""

import copy
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from distcheck.contract import Batch, Samples, Training
from distcheck.errors import UsageError
from distcheck.machine import devices, seeds
from distcheck.recordings.traces.layout import BYTES, CPU_RNG_STATE_BYTES
from distcheck.records import Case, ModelLayout, TensorSpec
from distcheck.records.expected_events import Happening, TokensPerSampleDiffer
from distcheck.records.odd_ranks import grouped
from distcheck.training.adapters.forms import trained_with
from distcheck.training.loaded import LoadedWorkload
from distcheck.training.loading import load_trained, load_workload
from distcheck.training.optimizers import (
    group_numbers,
    is_torchs_own,
    restore_state_value,
    tensors_and_numbers,
)
from distcheck.workloads.datasets import SYNTHETIC
from distcheck.workloads.datasets.arrays import ArraySamples
from distcheck.workloads.datasets.synthetic import SyntheticSamples


@dataclass(frozen=True)
class Ingredients:
    """A case's workload and samples, opened in this process. `settings` are the determinism
    settings after loading the workload's file (`seeds.result_settings`).
    """

    case: Case
    loaded: LoadedWorkload
    samples: Samples
    dtype: torch.dtype
    device: torch.device
    settings: int = 0

    def model(self) -> nn.Module:
        """Return the model in its initial state, built on the CPU: bit-identical in every process
        and, except for the cast, in every dtype.
        """
        seeds.seed_everything(seeds.derive(self.case.seed, "model"))
        # A default dtype set by the strategy's file would change the random numbers.
        with seeds.under(self.settings):
            model = self.loaded.workload.model(
                sample_shape=self.samples.shape, classes=self.samples.classes
            )
        own_dtypes = getattr(self.loaded.workload, "own_dtypes", False)
        model = model.to(self.device, None if own_dtypes else self.dtype).train()
        if self.case.initial:
            load_initial(model, self.case.initial)
        return model

    @property
    def training(self) -> Training:
        """The workload's `Training`. Raises UsageError for an invalid value."""
        training = getattr(self.loaded.workload, "training", Training())
        if not isinstance(training, Training):
            raise UsageError(
                f"workload {self.case.workload}: its training is {training!r}; expected a "
                "distcheck.contract.Training(...)"
            )
        try:
            return msgspec.convert(msgspec.to_builtins(training), Training)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"workload {self.case.workload}: its training is {training!r}, which the loop "
                f"does not support: {error}"
            ) from None

    @property
    def must_happen(self) -> tuple[Happening, ...]:
        """The events that the workload declares as required, and those that counting tokens
        implies. Raises UsageError for an invalid value.
        """
        declared = getattr(self.loaded.workload, "must_happen", ())
        of_tokens = (TokensPerSampleDiffer(),) if counts_tokens(self.loaded.workload) else ()
        try:
            return of_tokens + msgspec.convert(msgspec.to_builtins(declared), tuple[Happening, ...])
        except (msgspec.ValidationError, TypeError) as error:
            raise UsageError(
                f"workload {self.case.workload}: its must_happen is {declared!r}; expected a "
                f"tuple of events of distcheck.records.expected_events: {error}"
            ) from None

    def apply_initial_changes(self, model: nn.Module, rank: int) -> None:
        """Apply the workload's changes to a rank's model before the strategy receives it.
        References start from the values of rank 0 after these changes.
        """
        self._call_workload("hand_over", model, rank)

    def prepare(self, model: nn.Module, step: int) -> None:
        """Apply the workload's changes to its model before a step, in ranks and references."""
        self._call_workload("before_step", model, step)

    def optimizer(
        self, parameters: Iterable[Any], *, one_group: bool = False
    ) -> torch.optim.Optimizer:
        """Return the workload's optimizer, with its groups of `parameters`. Existing groups are
        passed unchanged, and so are parameters that must stay in one group.
        """
        workload, listed = self.loaded.workload, list(parameters)
        if self.makes_groups and not one_group and not any(isinstance(p, dict) for p in listed):
            listed = workload.groups(listed)  # type: ignore[attr-defined]
        return workload.optimizer(listed)

    @property
    def makes_groups(self) -> bool:
        """Return True if the workload defines parameter groups."""
        return hasattr(self.loaded.workload, "groups")

    def schedule(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Apply the workload's changes to its optimizer, in ranks and references."""
        self._call_workload("schedule", optimizer, step)

    def _call_workload(self, name: str, *arguments: object) -> None:
        method = getattr(self.loaded.workload, name, None)
        if method is not None:
            method(*arguments)

    def batch(self, ids: torch.Tensor, total: int, *, train: bool = True) -> Batch:
        """Return the samples `ids` [n] of a split, as part of a step of `total` samples."""
        inputs, labels = self.samples.read(ids, train=train, dtype=self.dtype)
        inputs, labels = inputs.to(self.device), labels.to(self.device)
        batch = Batch(inputs=inputs, labels=labels, ids=ids, total=total)
        return with_token_mask(self.loaded.workload, self.case.workload, batch)


def counts_tokens(workload: Any) -> bool:
    """Return True if the workload declares the positions that its loss covers."""
    return hasattr(workload, "tokens")


def with_token_mask(workload: Any, name: str, batch: Batch) -> Batch:
    """Return the batch with a mask [n, positions] of the positions that the loss covers, if the
    workload declares them. Raises UsageError for any other result.
    """
    if not counts_tokens(workload):
        return batch
    real = workload.tokens(batch)
    rows = len(batch.ids)
    if not isinstance(real, torch.Tensor) or real.dtype is not torch.bool:
        kind = str(real.dtype) if isinstance(real, torch.Tensor) else type(real).__name__
        raise UsageError(
            f"workload {name}: tokens(batch) returned {kind}; expected a bool tensor [n, "
            "positions] that is True if the loss includes a position"
        )
    if real.dim() < 1 or real.shape[0] != rows:
        raise UsageError(
            f"workload {name}: tokens(batch) returned the shape {tuple(real.shape)} for {rows} "
            "samples; it must return a bool tensor [n, positions]"
        )
    return replace(batch, real=real.reshape(rows, -1))


def open_ingredients(
    case: Case, description: bytes, data_fd: int | None, device: torch.device | None = None
) -> Ingredients:
    """Open a case's workload and samples for a device (default CPU). Raises UsageError."""
    trained = trained_with(case.adaptation.form) == case.workload
    loaded = load_trained(case.strategy, case.adaptation) if trained else None
    loaded = loaded or load_workload(case.workload)
    settings = seeds.result_settings()
    samples: Samples
    if loaded.own_samples is not None:
        samples = loaded.own_samples()
    elif case.data == SYNTHETIC:
        samples = SyntheticSamples()
    else:
        assert data_fd is not None, f"{case.data} was not prepared"
        samples = ArraySamples(data_fd, description)
    size = samples.size(train=True)
    if size < case.batch:
        raise UsageError(
            f"batch {case.batch} is larger than the data set: {case.data} has {size} samples"
        )
    device = device or torch.device("cpu")
    return Ingredients(case, loaded, samples, getattr(torch, case.dtype), device, settings)


def recorded_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters in a trace: all, including frozen ones; tied ones once."""
    return list(model.named_parameters())


def names_sharing_storage(model: nn.Module) -> set[str]:
    """Return the names of parameters that are views of the same storage."""
    storages: dict[int, set[str]] = {}
    for name, parameter in recorded_parameters(model):
        if type(parameter.data) is torch.Tensor and parameter.numel():
            storages.setdefault(parameter.untyped_storage().data_ptr(), set()).add(name)
    return set().union(*(names for names in storages.values() if len(names) > 1))


def can_train(parameter: nn.Parameter) -> bool:
    """Return True if a parameter can have a gradient: integers and 8-bit floats cannot."""
    return parameter.dtype.itemsize > 1 and (
        parameter.is_floating_point() or parameter.is_complex()
    )


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, layout: ModelLayout
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by name, as a trace records it; numbers become tensors."""
    tensors, numbers = tensors_and_numbers(model, optimizer)
    if layout.numbers:
        numbers |= group_numbers(optimizer)
    return tensors | numbers


@dataclass(frozen=True)
class Checkpoint:
    """A rank's checkpoint with the contents that a script saves: model, optimizer, RNG state."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    rng_state: bytes
    library_states: bytes


def take_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Checkpoint:
    """Return a copy of the complete state. A sharded optimizer is first consolidated on every rank
    in turn, as ZeroRedundancyOptimizer requires.
    """
    consolidate = getattr(optimizer, "consolidate_state_dict", None)
    if consolidate is None:
        state = copy.deepcopy(optimizer.state_dict())
    else:
        for rank in range(dist.get_world_size()):
            consolidate(to=rank)
            if rank == dist.get_rank():
                state = copy.deepcopy(optimizer.state_dict())
    return Checkpoint(
        copy.deepcopy(model.state_dict()),
        state,
        devices.rng_state(device),
        seeds.library_rng_states(),
    )


def restore_checkpoint(
    kept: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    model.load_state_dict(kept.model)
    optimizer.load_state_dict(kept.optimizer)
    devices.set_rng_state(kept.rng_state, device, CPU_RNG_STATE_BYTES)
    seeds.set_library_states(kept.library_states)


def describe_model(ingredients: Ingredients, model: nn.Module) -> ModelLayout:
    """Return the layout of a trace of this model, including optimizer state.

    The state's shapes are known only after a step, so a step is made with zero gradients, also for
    frozen parameters if the workload may unfreeze them. For optimizers outside torch, two further
    steps with nonzero gradients show which numbers of their groups change. The remaining numbers
    (rates, betas) belong to the workload and are not in a trace. Raises UsageError for a tensor
    that a trace cannot hold, and for an optimizer that rejects dense gradients.
    """
    workload = ingredients.loaded.workload
    optimizer = ingredients.optimizer(model.parameters())
    built = {name: number.item() for name, number in group_numbers(optimizer).items()}
    may_unfreeze = hasattr(workload, "before_step")
    for parameter in model.parameters():
        if parameter.requires_grad or (may_unfreeze and can_train(parameter)):
            parameter.grad = torch.zeros_like(parameter)
    changing = set[str]()
    for number in range(1 if is_torchs_own(optimizer) else 3):
        if number:
            _give_gradients(optimizer)
        _take_step(ingredients, optimizer)
        now = group_numbers(optimizer)
        changing |= {n for n, value in now.items() if n not in built or value.item() != built[n]}
    tensors, numbers = tensors_and_numbers(model, optimizer)
    numbers |= {n: value for n, value in group_numbers(optimizer).items() if n in changing}
    try:
        return ModelLayout(
            parameters=tuple(_spec(name, p) for name, p in recorded_parameters(model)),
            buffers=tuple(_spec(name, b) for name, b in model.named_buffers()),
            optimizer=tuple(_spec(name, t) for name, t in (tensors | numbers).items()),
            numbers=tuple(numbers),
        )
    except UsageError as error:
        raise UsageError(f"workload {ingredients.case.workload}: {error}") from None


def _take_step(ingredients: Ingredients, optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except (RuntimeError, TypeError) as error:  # SparseAdam; LBFGS, which needs a closure
        if not is_torchs_own(optimizer):
            raise
        raise UsageError(
            f"workload {ingredients.case.workload}: {type(optimizer).__name__} does not step "
            f"with only dense gradients, which references use: {error}"
        ) from None


def _give_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set gradients between -1 and 1 for all parameters that have one or train."""
    for group in getattr(optimizer, "param_groups", ()):  # user-defined ones may have none
        for parameter in group["params"]:
            if parameter.requires_grad or parameter.grad is not None:
                numbers = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
                parameter.grad = numbers.to(parameter.dtype)


def update_is_repeatable(ingredients: Ingredients, model: nn.Module, layout: ModelLayout) -> bool:
    """Return True if the workload's optimizer takes a bit-identical step after it is rebuilt from
    the state in a trace, as torch's optimizers do. Return False for an optimizer with further
    state, or with random numbers.
    """
    build = ingredients.optimizer
    if is_torchs_own(build(model.parameters())):
        return True
    models = [ingredients.model(), ingredients.model()]
    optimizer = build(models[0].parameters())
    for _ in range(2):
        _give_gradients(optimizer)
        optimizer.step()
    with torch.no_grad():
        for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
            two.copy_(one)
    again = build(models[1].parameters())
    state, parameters = (
        state_tensors(models[0], optimizer, layout),
        dict(recorded_parameters(models[1])),
    )
    for spec in layout.optimizer:
        if spec.name in state:
            is_number = spec.name in layout.numbers
            restore_state_value(again, parameters, spec.name, state[spec.name], is_number=is_number)
    for each in (optimizer, again):
        _give_gradients(each)
        try:
            each.step()
        except Exception:
            return False
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return all(torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in pairs)


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise UsageError(
            f"{name} is of dtype {dtype}, which is not supported; supported are {', '.join(BYTES)}"
        )
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype)


def load_initial(model: nn.Module, file: str) -> None:
    """Load a saved trace's initial parameters and buffers. Raises UsageError if absent."""
    try:
        if not stat.S_ISREG(os.lstat(file).st_mode):
            raise ValueError("it is not a regular file")
        with safe_open(file, "pt") as recorded, torch.no_grad():
            # Ranks with bit-identical tensors share one.
            held = grouped(recorded.keys(), lambda key: str(key).partition("/")[2])
            for kind, tensors in (
                ("parameter", model.named_parameters()),
                ("buffer", model.named_buffers()),
            ):
                for name, tensor in tensors:
                    key = min(held[f"{kind}/{name}"])
                    in_pairs = (*tensor.shape, 2) if tensor.is_complex() else None
                    shape = tuple(recorded.get_slice(key).get_shape())
                    if shape not in (tuple(tensor.shape), in_pairs):
                        raise ValueError(f"{name} has the shape {shape}")
                    initial = recorded.get_tensor(key)
                    if tensor.is_complex() and not initial.is_complex():
                        initial = torch.view_as_complex(initial)
                    if (initial.shape, initial.dtype) != (tensor.shape, tensor.dtype):
                        raise ValueError(
                            f"{name} is {initial.dtype} of shape {tuple(initial.shape)}"
                        )
                    tensor.copy_(initial)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the recorded initial state {file} does not match the model: "
            f"{type(error).__name__}: {error}"
        ) from error
