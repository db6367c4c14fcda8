"""Records one rank's training: the values that the checks need, for each step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Batch
from distcheck.errors import UsageError
from distcheck.machine import devices, seeds
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.header import StepHeader, index_lines
from distcheck.recordings.traces.layout import OWNED_BY, TOGETHER, TraceLayout, memory_order
from distcheck.recordings.traces.writer import TraceWriter
from distcheck.records import TensorSpec
from distcheck.records.ledger import Ledger
from distcheck.training.building import can_train, recorded_parameters, state_tensors
from distcheck.training.leaf_hooks import LeafHook
from distcheck.training.optimizers import implementation_flags, innermost_optimizer
from distcheck.training.whole_tensors import as_dense, as_full_tensor, is_distributed
from distcheck.worlds.ledger import StepLedger
from distcheck.worlds.step_calls import Memory, StepCalls, storage_range

# Accessor of "full_parameters", "full_gradients" or "full_state": returns full tensors by name, if
# the strategy holds them outside the model and the optimizer; None if it does not. A missing name
# is not recorded, and so not compared; a value of None means a gradient of None.
Full = Callable[[str], Mapping[str, torch.Tensor | None] | None]


class CompleteOnEachRank(dict[str, torch.Tensor | None]):
    """Result of an accessor if each rank has complete tensors, so that nothing is unsharded."""


class LoopObserver:
    """Receives the events of the training loop, in this order; ignores them by default."""

    def attach(self, model: nn.Module) -> None:
        """Called once, before the strategy wraps the model."""

    def started(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Called once, before the first step."""

    def reading(self, step: int, epoch: int, ids: torch.Tensor) -> None:
        """Called when the shard is known, before any computation."""

    def counted(self, batch: Batch) -> None:
        """Called after the shard is read and its tokens are counted, on ranks with data."""

    def returned(self, ids: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Called in a layout with the model's output rows for some samples of the shard, from which
        a loss is computed. None if the output does not have one row for each sample.
        """

    def scaled(self, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Called before backward from `scaled`, which is computed from the mean `loss`."""

    def backward_over(self, stretches: int) -> None:
        """Called after the last backward, which split each batch into `stretches` parts."""

    def synced(self, step: int, model: nn.Module) -> None:
        """Called when the gradients are those that the optimizer will use."""

    def updated(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss: float
    ) -> None:
        """Called after the optimizer step."""


class GradientOwners:
    """The rank whose optimizer updates each of a model's parameters.

    Construction is a collective: when training begins or, for optimizers with all parameters on
    every rank, at the first step, when owners are the ranks that have gradients.

    ZeRO-2 reduces a gradient only to its owner: the remaining ranks hold their local gradient or
    none, which no step reads. The owner's gradient is therefore compared. Gradients of other ranks
    are recorded to locate a gradient that its owner lacks.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        named = list(model.named_parameters())
        groups = getattr(innermost_optimizer(optimizer), "param_groups", ())
        held = {id(p) for group in groups for p in group["params"]}
        self.of: dict[str, int] = {}
        self.is_open = True
        self._check(named, held, of_gradients=False)

    def close(self, model: nn.Module) -> None:
        """Make the ranks with a gradient owners of the parameters, unless owners are known."""
        if self.is_open:
            named = list(model.named_parameters())
            self._check(named, {id(p) for _, p in named if p.grad is not None}, of_gradients=True)

    def _check(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        held: Collection[int],
        *,
        of_gradients: bool,
    ) -> None:
        device = next((p.device for _, p in named), torch.device("cpu"))
        mine = torch.tensor([id(p) in held for _, p in named], dtype=torch.long, device=device)
        holders, owner = mine.clone(), mine * dist.get_rank()
        dist.all_reduce(holders)
        dist.all_reduce(owner)
        counts = dict(zip((name for name, _ in named), holders.tolist(), strict=True))
        if not of_gradients and min(counts.values()) == dist.get_world_size() > 1:
            return  # ranks with gradients will determine it
        self.is_open = False
        wrong = [f"{n} ({counts[n]})" for n, p in named if p.requires_grad and counts[n] != 1]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UsageError(
                'the strategy promises gradients="owner", so each parameter must be in the '
                "optimizer of exactly one rank; the numbers of ranks are: "
                f"{', '.join(wrong[:3])}{more}"
            )
        pairs = zip(named, owner.tolist(), strict=True)
        self.of = {name: int(o) for (name, _), o in pairs if counts[name] == 1}

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return this rank's gradients by name; None for a missing or partial gradient."""
        held: dict[str, torch.Tensor | None] = {}
        for name, parameter in model.named_parameters():
            if name in self.of:
                gradient = as_dense(parameter.grad)
                if gradient is not None and gradient.shape != parameter.shape:
                    gradient = None
                held[name] = None if gradient is None else gradient.to(parameter.dtype)
        return held


class TraceRecorder(LoopObserver):
    """Records into a trace.

    Local gradients are observed by hooks on the parameters. They are registered before the strategy
    receives the model, so the gradients are those that backward produced on this rank alone, even
    if a strategy synchronizes during backward. If the code makes torch drop hooks (`leaf_hooks`),
    they are restored before the next backward. The order in which hooks fire is the order in which
    gradients became ready, from which DDP forms its buckets.

    full          provides tensors that are held elsewhere; DTensors are always unsharded
    by_owners     True: record a gradient with the rank whose optimizer updates the parameter
    out_of_sight  True: hooks observe no local gradients
    calls         provides the lines that communicated each gradient
    ledger_of     the step whose collectives are recorded in the ledger; -1: none
    """

    def __init__(
        self,
        writer: TraceWriter,
        layout: TraceLayout,
        device: torch.device,
        *,
        by_owners: bool = False,
        out_of_sight: bool = False,
        full: Full | None = None,
        calls: StepCalls | None = None,
        ledger_of: int = -1,
    ) -> None:
        self._full = full
        self._ledger, self._ledger_of = StepLedger(), ledger_of
        self._reduced_twice: dict[str, tuple[str, str]] = {}
        self._calls = calls
        self._model: nn.Module | None = None
        self._left: dict[str, Memory | None] = {}  # memory of gradients after backward
        self._by_owners, self._out_of_sight = by_owners, out_of_sight
        self._owners: GradientOwners | None = None
        self._writer, self._layout, self._device = writer, layout, device
        self._step = self._epoch = 0
        self._ids: list[int] = []
        self._rng_state = self._library_states = b""
        self._loss_factor = 1.0
        self._real: tuple[int, int] | None = None
        self._settings = 0
        self._stretches = 1
        self._ready: list[int] = []
        self._hooks: dict[int, LeafHook] = {}
        self._unseen: set[int] = set()
        self._returned: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def attach(self, model: nn.Module) -> None:
        """Register the hooks, also on frozen parameters that may train later: a parameter accepts a
        hook only while it trains, and keeps it.
        """
        self._model = model  # a resumed run has a new one
        self._hooks.clear()
        for index, (_, parameter) in enumerate(recorded_parameters(model)):
            trains = parameter.requires_grad
            if trains or can_train(parameter):
                self._hooks[index] = LeafHook(
                    parameter.requires_grad_(True), partial(self._local_gradient, index)
                )
                parameter.requires_grad_(trains)

    def started(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Record the initial state: slot 0."""
        self._owners = GradientOwners(model, optimizer) if self._by_owners else None
        self._record_state(0, model, optimizer)

    def reading(self, step: int, epoch: int, ids: torch.Tensor) -> None:
        """Open a step; save the RNG states with which the forward pass starts."""
        self._step, self._epoch, self._ids = step, epoch, ids.tolist()
        self._rng_state = devices.rng_state(self._device)
        self._library_states = seeds.library_rng_states()
        self._settings = seeds.result_settings()
        self._ready.clear()
        self._loss_factor = 1.0
        self._real = None
        self._returned.clear()
        self._put_hooks_back()
        if self._calls is not None:
            self._calls.begin()
        if step == self._ledger_of:
            self._ledger.begin()

    def counted(self, batch: Batch) -> None:
        """Record the tokens and positions, if the workload counts them."""
        if batch.real is not None:
            self._real = batch.tokens, batch.real.numel()

    def returned(self, ids: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Keep the outputs until the step ends: a strategy may process its shard in parts."""
        self._returned.append((ids, rows))

    def scaled(self, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Record the factor exactly as backward will apply it."""
        self._put_hooks_back()  # the forward pass may have sent parameters
        if scaled is not loss:
            factor = torch.autograd.grad(scaled, loss, retain_graph=True, allow_unused=True)[0]
            self._loss_factor = float("nan") if factor is None else float(factor)

    def backward_over(self, stretches: int) -> None:
        """Record the hooks that torch dropped since they were restored. If no hook was called,
        local gradients are the results of torch.autograd.grad().
        """
        self._stretches = stretches
        lost = (index for index, hook in self._hooks.items() if not hook.is_read)
        if not self._ready:
            for hook in self._hooks.values():
                hook.asked()
        self._unseen = {index for index in lost if index not in self._ready}
        if self._calls is not None and self._model is not None:
            self._left = {
                name: storage_range(p.grad) for name, p in recorded_parameters(self._model)
            }

    def synced(self, step: int, model: nn.Module) -> None:
        """Record the synchronized gradients, and local gradients without a hook call as absent.
        Gradients that no hook can observe are not recorded.
        """
        if step == self._ledger_of and self._calls is not None and self._stretches == 1:
            memory = {name: storage_range(p.grad) for name, p in recorded_parameters(model)}
            self._reduced_twice = self._calls.reduced_twice(memory)
        self._ledger.pause()  # without the communication that unshards gradients for the trace
        held = self._held("full_gradients")
        gradients = {name: parameter.grad for name, parameter in recorded_parameters(model)}
        if self._owners is not None:
            self._owners.close(model)
            gradients = self._owners.gradients(model)
        elif held is not None:
            gradients = dict(held)
        self._put_lines(step, model, gradients)
        for index, spec in enumerate(self._layout.model.parameters):
            gradient = gradients.get(spec.name)
            if index not in self._ready and index not in self._unseen:
                self._writer.put(Kind.LOCAL_GRADIENT, step, index, None)
            if held is None or spec.name in held:
                order = TOGETHER if _is_together(gradient, held) else 0
                if self._owners is not None:
                    order = OWNED_BY + self._owners.of.get(spec.name, dist.get_rank())
                self._writer.put(Kind.GRADIENT, step, index, as_full_tensor(gradient), order=order)
        if step == self._ledger_of:
            self._ledger.begin()

    def _put_lines(
        self, step: int, model: nn.Module, gradients: Mapping[str, torch.Tensor | None]
    ) -> None:
        if self._calls is None:
            return
        lie = {
            spec.name: (self._left.get(spec.name), storage_range(gradients.get(spec.name)))
            for spec in self._layout.model.parameters
        }
        sizes = {spec.name: spec.elements for spec in self._layout.model.parameters}
        ways = self._calls.ways(
            lie, sizes, lambda: map(storage_range, chain(model.parameters(), model.buffers()))
        )
        self._left = {}
        if ways is not None:
            known = {name: after is not None for name, (_, after) in lie.items()}
            lines = index_lines(known, ways.given, ways.perhaps, ways.reducing)
            self._writer.put_lines(step, lines)

    def updated(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss: float
    ) -> None:
        """Record the state after the step, slot `step + 1`, and close the step."""
        self._ledger.pause()
        self._record_state(step + 1, model, optimizer)
        for index, spec in enumerate(self._layout.outputs):
            self._writer.put(Kind.OUTPUT, step, index, self._table_of_outputs(spec))
        tokens, positions = self._real or (None, 0)
        header = StepHeader(
            ids=tuple(self._ids),
            loss=loss,
            loss_factor=self._loss_factor,
            epoch=self._epoch,
            rng_state=self._rng_state,
            ready_order=tuple(self._ready),
            stretches=self._stretches,
            tokens=tokens,
            positions=positions,
            library_states=self._library_states,
            settings=self._settings,
            implementation=implementation_flags(optimizer),
        )
        self._writer.put_header(step, header)

    def ledger(self, model: nn.Module) -> tuple[Ledger, ...]:
        """Return the ledger, if one was requested and torch recorded the calls."""
        found = self._ledger.taken(
            self._ledger_of, model.parameters(), [model], self._reduced_twice
        )
        return () if found is None else (found,)

    def _table_of_outputs(self, spec: TensorSpec) -> torch.Tensor | None:
        """Return the model's outputs, one row per position of the shard; None if the rank computed
        no loss. Outputs without a row for every sample give a table without rows.
        """
        if not self._returned:
            return None
        table = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        nothing, known = table[:0], dict[int, torch.Tensor]()
        for ids, rows in self._returned:
            if rows is None or rows.shape[1:] != table.shape[1:] or rows.dtype != table.dtype:
                return nothing
            known |= dict(zip(ids.tolist(), rows.cpu(), strict=True))
        if not known.keys() >= set(self._ids):
            return nothing
        for place, number in enumerate(self._ids):
            table[place] = known[number]
        return table

    def _put_hooks_back(self) -> None:
        for hook in self._hooks.values():
            hook.put_back()

    def _local_gradient(self, index: int, gradient: torch.Tensor) -> None:
        if self._out_of_sight:
            return
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if index in self._ready:  # a second backward within the step accumulates
            before = self._writer.read_back(Kind.LOCAL_GRADIENT, self._step, index)
            gradient = before.to(gradient.device) + gradient
        else:
            self._ready.append(index)
        self._writer.put(Kind.LOCAL_GRADIENT, self._step, index, gradient)

    def _record_state(self, slot: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model_layout = self._layout.model
        held = self._held("full_parameters")
        tensors: dict[str, torch.Tensor | None] = dict(
            recorded_parameters(model) if held is None else held
        )
        for index, spec in enumerate(model_layout.parameters):
            parameter = tensors.get(spec.name)
            if held is None or parameter is not None:
                order = TOGETHER if _is_together(parameter, held) else _order_of(parameter)
                self._writer.put(
                    Kind.PARAMETER, slot, index, as_full_tensor(parameter), order=order
                )
        tensors = dict(model.named_buffers())
        for index, spec in enumerate(model_layout.buffers):
            buffer = tensors.get(spec.name)
            self._writer.put(Kind.BUFFER, slot, index, buffer, order=_order_of(buffer))
        held = self._held("full_state")
        tensors = dict(state_tensors(model, optimizer, model_layout) if held is None else held)
        for index, spec in enumerate(model_layout.optimizer):
            state = tensors.get(spec.name)
            if held is None or slot == 0 or state is not None:
                order = TOGETHER if _is_together(state, held) else 0
                self._writer.put(Kind.OPTIMIZER, slot, index, as_full_tensor(state), order=order)

    def _held(self, accessor: str) -> Mapping[str, torch.Tensor | None] | None:
        return None if self._full is None else self._full(accessor)


def _is_together(
    tensor: torch.Tensor | None, held: Mapping[str, torch.Tensor | None] | None
) -> bool:
    """Return True if ranks unsharded the tensor: by an accessor, or as a DTensor with a distinct
    shard on every rank of the world.
    """
    if held is not None:
        return not isinstance(held, CompleteOnEachRank)
    if tensor is None or not is_distributed(tensor):
        return False
    of_it: Any = tensor
    alone = all(not placement.is_replicate() for placement in of_it.placements)
    return alone and of_it.device_mesh.size() == dist.get_world_size()


def _order_of(tensor: torch.Tensor | None) -> int:
    """Return the memory order of a rank's tensor; 0 if unknown, as for a DTensor."""
    if tensor is None or tensor.layout is not torch.strided or is_distributed(tensor):
        return 0
    return memory_order(tensor.shape, tensor.stride())
