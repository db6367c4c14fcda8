"""A strategy of a model-parallel layout: how what its ranks hold becomes the whole model.

The kind of code is seen when a copy of the model is wrapped, before the model itself:

    DTensors    parameters of the model itself; the recorder puts each together (`full_tensor()`)
    accessors   `full_parameters(model)` and `full_gradients(model)` of the strategy, by name
    pieces      anything else: numbered copies of the model show where each element went, see
                `sharded_parameters.py`

In the last two the model that is recorded is another one than what is trained.
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


def laid_out(base: LoadedStrategy, made: Any, *, what: str) -> LoadedStrategy:
    """The same strategy, with the whole model put together after every step. Raises UsageError
    for one of two accessors without the other.
    """
    has = [name for name in _ACCESSORS if callable(getattr(made, name, None))]
    if len(has) == 1:
        other = next(name for name in _ACCESSORS if name not in has)
        raise UsageError(f"{what} has {has[0]}(model) and no {other}(model); give both, or none")
    layout = _Accessed(base, made, what) if has else _Pieced(base, what)
    return dataclasses.replace(
        base.promising(one_group=True),
        wrap=layout.wrap,
        optimizer=layout.optimizer,
        sync=layout.sync,
        full=layout.full if isinstance(layout, _Accessed) else None,
        buffers=layout.buffers,
    )


def _wrapped(base: LoadedStrategy, model: nn.Module, what: str) -> nn.Module:
    """A ValueError of the strategy says that it cannot divide this model."""
    try:
        return base.wrap(model)
    except ValueError as error:
        raise UsageError(f"strategy {what} does not divide this model: {error}") from error


class _Buffers:
    """The buffers of a whole model, which ranks change in models of their own."""

    def __init__(self, whole: nn.Module, trained: nn.Module) -> None:
        self._whole, self._trained = whole, trained
        self._before = {name: buffer.clone() for name, buffer in whole.named_buffers()}

    def gather(self) -> bool:
        """Fills the whole model with those of the first rank that has changed them: the stage that
        has the layer, in the first data coordinate. Returns whether some rank has each.
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
    """Parameters that a rank holds as DTensors, or as pieces of its own making."""

    def __init__(self, base: LoadedStrategy, what: str) -> None:
        self._base, self._what = base, what
        self._pieces: ShardedParameters | None = None
        self._buffers: _Buffers | None = None

    def buffers(self) -> bool:
        """Puts them into the whole model; DTensors are in it."""
        return self._buffers is None or self._buffers.gather()

    def wrap(self, model: nn.Module) -> nn.Module:
        """What is trained; the model stays as it is, but for DTensors."""
        self._pieces = self._buffers = None
        if self._holds_dtensors(copy.deepcopy(model)):
            return self._base.wrap(model)
        mesh = self._base.contract.mesh(dist.get_world_size())
        assert mesh is not None
        undivided = (
            f"{self._what} promises the mesh {mesh}, and every rank holds every parameter whole: "
            "nothing is divided"
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
        """Whether any rank does; all of them ask. Raises UsageError where those are not all that is
        divided: what the others lack could not be put together.
        """
        before = {name: (p.shape, p.device) for name, p in model.named_parameters()}
        held = set(_wrapped(self._base, model, self._what).parameters())
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
                f"{self._what} holds DTensors, and divides the model in another way as well; give "
                "it full_parameters(model) and full_gradients(model)"
            )
        return bool(flags[0])

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        """Over what this rank holds."""
        if self._pieces is None:
            return self._base.optimizer(build, parameters)
        return OptimizerOverShards(self._base.optimizer(build, self._pieces.held), self._pieces)

    def sync(self, model: nn.Module, step: Step) -> None:
        """The strategy's own, then gradients together."""
        self._base.sync(model, step)
        if self._pieces is not None:
            self._pieces.write_gradients()


def _who_share_a_model(mesh: Mesh) -> dist.ProcessGroup:
    """The ranks of this one's data coordinate. Every rank makes every group, in one order."""
    groups: list[Any] = [dist.new_group(list(mesh.ranks_of(data))) for data in range(mesh.data)]
    mine: dist.ProcessGroup = groups[mesh.coordinate(dist.get_rank(), "data")]
    return mine


class _Accessed:
    """Parameters and gradients that the strategy's own accessors put together.

    What the optimizer keeps of its own is not asked for: the workload's optimizer goes the same
    steps on the whole model, from the gradients that were given, and its state is recorded.
    """

    def __init__(self, base: LoadedStrategy, made: Any, what: str) -> None:
        self._base, self._what = base, what
        self._parameters: Accessor = made.full_parameters
        self._gradients: Accessor = made.full_gradients
        self._model: nn.Module | None = None
        self._wrapped: nn.Module | None = None
        self._buffers: _Buffers | None = None
        self._held: dict[str, dict[str, torch.Tensor | None]] = {}

    def full(self, accessor: str) -> Mapping[str, torch.Tensor | None] | None:
        """What an accessor gave last, as it was written into the whole model; see
        `recorder.Full`.
        """
        return self._held.get(accessor)

    def wrap(self, model: nn.Module) -> nn.Module:
        """What is trained; the model is filled by the accessors."""
        self._model, trained = model, copy.deepcopy(model)
        self._wrapped = _wrapped(self._base, trained, self._what)
        self._buffers = _Buffers(model, trained)
        self._write_parameters()
        return self._wrapped

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        """Over what this rank holds, and besides over the whole model."""
        assert self._model is not None
        inner = self._base.optimizer(build, parameters)
        return _OverBoth(inner, build(self._model.parameters()), self._write_parameters)

    def buffers(self) -> bool:
        """Puts them into the whole model."""
        return self._buffers is None or self._buffers.gather()

    def sync(self, model: nn.Module, step: Step) -> None:
        """The strategy's own, then what its accessor gives of the gradients."""
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
        whole = accessor(self._wrapped)  # type: ignore[arg-type]
        if whole is None:
            return {}
        if isinstance(whole, Mapping):
            return whole
        raise UsageError(
            f"{self._what}: {name}(model) returned a {type(whole).__name__}; expected is a dict "
            "of parameter names and whole tensors"
        )

    def _check(self, name: str, value: Any, parameter: nn.Parameter) -> None:
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            return
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(
            f"{self._what}: full_parameters(model) gave {shape} for {name}; its whole tensor has "
            f"the shape {tuple(parameter.shape)}"
        )


class _OverBoth(OptimizerProxy):
    """The optimizer of what a rank holds, and the workload's own over the whole model."""

    def __init__(
        self, inner: torch.optim.Optimizer, whole: torch.optim.Optimizer, write: Callable[[], None]
    ) -> None:
        super().__init__(inner)
        self._whole, self._write = whole, write

    @property
    def state(self) -> Any:
        return self._whole.state

    def step(self) -> None:
        """Both; then the whole parameters are what the accessor gives."""
        self._inner.step()
        for one, other in zip(self._whole.param_groups, self._inner.param_groups, strict=True):
            one.update({key: value for key, value in other.items() if key != "params"})
        self._whole.step()
        self._write()
