"""Strategies with a model-parallel layout: unshards the tensors that the ranks hold.

The kind of code is detected on a copy of the model, before the model itself is wrapped:

 DTensors    parameters of the model itself; the recorder unshards each (`full_tensor()`)
 accessors   `full_parameters(model)` and `full_gradients(model)` of the strategy, by name
 shards      anything else: numbered copies of the model show the place of each element, see
    `sharded_parameters.py`

With accessors and shards, the recorded model is not the trained one.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Build, Step
from distcheck.errors import UsageError
from distcheck.records.mesh import Mesh
from distcheck.training.adapters.sharded_parameters import OptimizerOverShards, ShardedParameters
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.optimizers import OptimizerProxy
from distcheck.training.whole_tensors import is_distributed

Accessor = Callable[[nn.Module], Mapping[str, torch.Tensor | None] | None]
_ACCESSORS = ("full_parameters", "full_gradients")


def with_unsharded_model(base: LoadedStrategy, made: Any, *, what: str) -> LoadedStrategy:
    """Return the strategy with the full model after every step. Raises UsageError."""
    has = [name for name in _ACCESSORS if callable(getattr(made, name, None))]
    if len(has) == 1:
        other = next(name for name in _ACCESSORS if name not in has)
        raise UsageError(
            f"{what} has {has[0]}(model) but no {other}(model); define both or neither"
        )
    layout = _Accessed(base, made, what) if has else _Pieced(base, what)
    return dataclasses.replace(
        base.with_contract(one_group=True),
        wrap=layout.wrap,
        optimizer=layout.optimizer,
        sync=layout.sync,
        full=layout.full if isinstance(layout, _Accessed) else None,
        buffers=layout.buffers,
    )


def _wrap_model(base: LoadedStrategy, model: nn.Module, what: str) -> nn.Module:
    """Wrap a model. Raises UsageError if the strategy cannot shard it (ValueError)."""
    try:
        return base.wrap(model)
    except ValueError as error:
        raise UsageError(f"strategy {what} does not shard this model: {error}") from error


class _Buffers:
    """The buffers of the full model, which ranks change in their own models."""

    def __init__(self, whole: nn.Module, trained: nn.Module) -> None:
        self._whole, self._trained = whole, trained
        self._before = {name: buffer.clone() for name, buffer in whole.named_buffers()}

    def gather(self) -> bool:
        """Copy the buffers of the first rank that changed them into the full model: the stage with
        the layer, in the first data coordinate. Return True if every buffer is on some rank.
        """
        trained = dict(self._trained.named_buffers())
        held = {
            name: trained[name].detach().cpu()
            for name, before in self._before.items()
            if name in trained and trained[name].shape == before.shape
        }
        changed = {n: b for n, b in held.items() if not torch.equal(b, self._before[n].cpu())}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (changed, sorted(held)))
        for name, buffer in self._whole.named_buffers():
            values = [changes[name] for changes, _ in everyone if name in changes]
            if values:
                buffer.copy_(values[0])
        return all(any(name in names for _, names in everyone) for name in self._before)


class _Pieced:
    """Parameters that a rank holds as DTensors, or in its own sharded form."""

    def __init__(self, base: LoadedStrategy, what: str) -> None:
        self._base, self._what = base, what
        self._pieces: ShardedParameters | None = None
        self._buffers: _Buffers | None = None

    def buffers(self) -> bool:
        """Gather the buffers into the full model; with DTensors they are there already."""
        return self._buffers is None or self._buffers.gather()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to train. The model itself stays unchanged, except for DTensors."""
        self._pieces = self._buffers = None
        if self._holds_dtensors(copy.deepcopy(model)):
            return self._base.wrap(model)
        mesh = self._base.contract.mesh(dist.get_world_size())
        assert mesh is not None
        undivided = (
            f"{self._what} promises the mesh {mesh}, but every rank holds every parameter whole: "
            "nothing is sharded"
        )
        pieces = ShardedParameters(
            model,
            what=self._what,
            undivided=undivided if mesh.divides else "",
            group=_who_share_a_model(mesh),
        )
        wrapped = pieces.train(self._base.wrap)
        self._pieces, self._buffers = pieces, _Buffers(model, pieces.trained)
        return wrapped

    def _holds_dtensors(self, model: nn.Module) -> bool:
        """Return True if any rank holds DTensors; a collective. Raises UsageError if the model is
        also sharded in another way, which could not be unsharded.
        """
        before = {name: (p.shape, p.device) for name, p in model.named_parameters()}
        held = set(_wrap_model(self._base, model, self._what).parameters())
        after = dict(model.named_parameters())
        has_dtensors = any(is_distributed(parameter) for parameter in held)
        divides_more = bool({*after.values()} - held) or any(
            name not in after or after[name].shape != shape for name, (shape, _) in before.items()
        )
        device = next((device for _, device in before.values()), None)
        flags = torch.tensor([has_dtensors, divides_more], dtype=torch.long, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        if bool(flags.all()):
            raise UsageError(
                f"{self._what} uses DTensors and also shards the model in a different way; define "
                "full_parameters(model) and full_gradients(model)"
            )
        return bool(flags[0])

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        if self._pieces is None:
            return self._base.optimizer(build, parameters)
        return OptimizerOverShards(self._base.optimizer(build, self._pieces.held), self._pieces)

    def sync(self, model: nn.Module, step: Step) -> None:
        """Run the strategy's sync, then unshard the gradients."""
        self._base.sync(model, step)
        if self._pieces is not None:
            self._pieces.write_gradients()


def _who_share_a_model(mesh: Mesh) -> dist.ProcessGroup:
    """Return the group of this data coordinate. Every rank creates every group, in order."""
    groups: list[Any] = [dist.new_group(list(mesh.ranks_of(data))) for data in range(mesh.data)]
    mine: dist.ProcessGroup = groups[mesh.coordinate(dist.get_rank(), "data")]
    return mine


class _Accessed:
    """Parameters and gradients that the strategy's own accessors unshard.

    There is no accessor for optimizer state: the workload's optimizer repeats the steps on the full
    model, from the given gradients, and its state is recorded.
    """

    def __init__(self, base: LoadedStrategy, made: Any, what: str) -> None:
        self._base, self._what = base, what
        self._parameters: Accessor = made.full_parameters
        self._gradients: Accessor = made.full_gradients
        self._model: nn.Module | None = None
        self._wrap_model: nn.Module | None = None
        self._buffers: _Buffers | None = None
        self._held: dict[str, dict[str, torch.Tensor | None]] = {}

    def full(self, accessor: str) -> Mapping[str, torch.Tensor | None] | None:
        """Return the last result of an accessor, as written to the full model; see
        `recorder.Full`.
        """
        return self._held.get(accessor)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to train; accessors fill the model itself."""
        self._model, trained = model, copy.deepcopy(model)
        self._wrap_model = _wrap_model(self._base, trained, self._what)
        self._buffers = _Buffers(model, trained)
        self._write_parameters()
        return self._wrap_model

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        """Return an optimizer of the parameters that this rank holds, and of the full model."""
        assert self._model is not None
        inner = self._base.optimizer(build, parameters)
        return _OverBoth(inner, build(self._model.parameters()), self._write_parameters)

    def buffers(self) -> bool:
        """Gather the buffers into the full model."""
        return self._buffers is None or self._buffers.gather()

    def sync(self, model: nn.Module, step: Step) -> None:
        """Run the strategy's sync, then read its gradient accessor."""
        self._base.sync(model, step)
        assert self._model is not None
        whole = self._read(self._gradients, "full_gradients")
        for name, parameter in self._model.named_parameters():
            value = whole.get(name)
            parameter.grad = None if value is None else value.detach().clone()
        named = self._model.named_parameters()
        self._held["full_gradients"] = {name: p.grad for name, p in named if name in whole}

    def _write_parameters(self) -> None:
        assert self._model is not None
        whole = self._read(self._parameters, "full_parameters")
        held: dict[str, torch.Tensor | None] = {}
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                value = whole.get(name)
                if value is not None:
                    self._check(name, value, parameter)
                    parameter.copy_(value)
                    held[name] = parameter
        self._held["full_parameters"] = held

    def _read(self, accessor: Accessor, name: str) -> Mapping[str, torch.Tensor | None]:
        whole = accessor(self._wrap_model)  # type: ignore[arg-type]
        if whole is None:
            return {}
        if isinstance(whole, Mapping):
            return whole
        raise UsageError(
            f"{self._what}: {name}(model) returned a {type(whole).__name__}; expected a dict "
            "from parameter names to whole tensors"
        )

    def _check(self, name: str, value: Any, parameter: nn.Parameter) -> None:
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            return
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(
            f"{self._what}: full_parameters(model) gave {shape} for {name}; the whole tensor has "
            f"the shape {tuple(parameter.shape)}"
        )


class _OverBoth(OptimizerProxy):
    """The optimizer of a rank's parameters, and the workload's own on the full model."""

    def __init__(
        self, inner: torch.optim.Optimizer, whole: torch.optim.Optimizer, write: Callable[[], None]
    ) -> None:
        super().__init__(inner)
        self._whole, self._write = whole, write

    @property
    def state(self) -> Any:
        return self._whole.state

    def step(self) -> None:
        """Step both; then the full parameters are read from the accessor."""
        self._inner.step()
        for one, other in zip(self._whole.param_groups, self._inner.param_groups, strict=True):
            one.update({key: value for key, value in other.items() if key != "params"})
        self._whole.step()
        self._write()
