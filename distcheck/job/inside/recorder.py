"""Records a training script step by step, in each rank of the job."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.autograd.graph import get_gradient_edge

from distcheck.job.inside import arrangement, hooks, rank, tensors
from distcheck.job.inside.grad_accumulation import GradAccumulation
from distcheck.job.inside.listener import NullListener
from distcheck.job.inside.loaders import Loaders
from distcheck.job.inside.modules import Modules
from distcheck.job.inside.op_log import OpLog
from distcheck.job.inside.parameters import Parameters
from distcheck.job.inside.state import ExtraState
from distcheck.job.inside.step_file import ParameterAfterStep, StepFile
from distcheck.job.inside.terms import Heard, terms_of
from distcheck.job.settings import JobSettings
from distcheck.recordings.jobs import records
from distcheck.recordings.jobs.records import (
    MOST_LINES,
    ClipCall,
    CollectiveCall,
    ForwardPass,
    LossCall,
    LossTerm,
)
from distcheck.worlds.callers import line_of_script
from distcheck.worlds.ledger import StepLedger
from distcheck.worlds.step_calls import StepCalls, storage_range

_numbers = itertools.count()


class PendingLosses:
    """The losses since the last backward pass. Earlier losses are included if no backward pass has
    visited them, as in a pipeline that first runs several forward passes.
    """

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self._calls: list[LossCall] = []
        self._places: dict[int, int] = {}  # index in the lists, by number
        self._reached: set[int] = set()
        self._done: set[int] = set()

    def hear(self, name: str, reduction: str, counted: int, target: str, value: Any) -> None:
        """Record a loss over `counted` targets, and install a hook that reports when backward
        visits it.
        """
        heard = next(_numbers)
        self._places[heard] = len(self._calls)
        number = float(value.detach()) if value.numel() == 1 else float("nan")
        self._calls.append(
            LossCall(name=name, reduction=reduction, counted=counted, value=number, target=target)
        )
        self.heard.append((name, reduction, get_gradient_edge(value), counted))
        value.grad_fn.register_prehook(lambda _: hooks.emit("reaches", heard))

    def begin(self) -> None:
        self._reached = set()

    def reaches(self, heard: int) -> None:
        if heard in self._places:
            self._reached.add(self._places[heard])

    @property
    def is_over(self) -> bool:
        """True if a backward pass has visited every loss."""
        return len(self._done) == len(self._calls)

    def of_backward(self, one: ForwardPass) -> tuple[tuple[LossCall, ...], tuple[LossTerm, ...]]:
        """Return the losses from which a backward pass started, and its terms, which refer to these
        losses by index.
        """
        kept = sorted(self._reached)
        self._done |= self._reached
        places = {place: number for number, place in enumerate(kept, len(one.losses))}
        terms = (replace(term, call=places.get(term.call, -1)) for term in one.terms)
        return (*one.losses, *(self._calls[place] for place in kept)), tuple(terms)


def new_pass_record(
    file: StepFile, model: torch.nn.Module, given: Sequence[torch.Tensor], loaders: Loaders,
    drew: bool,
) -> ForwardPass:  # fmt: skip
    """Return the record of a starting pass, with the model's input tensors."""
    autocast = next((d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)), "")
    return ForwardPass(
        inputs=tuple(file.add_data(t) for t in given),
        rows=tensors.digests_of_samples([*given]) if given else (),
        batches=loaders.for_pass([*given]),
        live=False,
        later=file.has_restarted,
        random=tensors.random_digests(),
        drew=drew,
        exchanges=rank.ddp_synchronizes(model),
        exchange_s=rank.exchange_seconds(model),
        autocast=str(torch.get_autocast_dtype(autocast)) if autocast else "",
    )


def move_loss_to_visited_pass(
    passes: list[ForwardPass], before: ForwardPass | None, reached: Sequence[int]
) -> None:
    """If several forward passes come before the first backward pass, as in a pipeline, move the
    loss of the last pass (previously `before`) to the only pass that backward visited.
    """
    last = passes[-1]
    if len(reached) != 1 or reached[0] == len(passes) - 1 or before is None:
        return
    if last.loss is not None:
        about: dict[str, Any] = {"losses": last.losses, "terms": last.terms, "drew": last.drew}
        loss = last.loss - (before.loss or 0.0)
        passes[reached[0]] = replace(passes[reached[0]], loss=loss, unread=last.unread, **about)
    passes[-1] = before


class RecordedLines:
    """Source lines of each kind in `recordings.jobs.records.LINES`, without duplicates."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[str, None]] = {}

    def note(self, kind: str) -> None:
        """Record the script's current line."""
        lines = self._heard.setdefault(kind, {})
        if len(lines) < MOST_LINES:
            lines[line_of_script()] = None

    def taken(self) -> dict[str, tuple[str, ...]]:
        return {kind: tuple(lines) for kind, lines in self._heard.items()}


class Recorder(NullListener):
    """Listener that records a script. One step at a time is in memory."""

    def __init__(self, settings: JobSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self.steps_over = 0  # completed steps
        self.parameters = Parameters()
        self.loaders = Loaders()
        for heard in ("iterates", "samples_from", "fetches", "fetched"):
            setattr(self, heard, getattr(self.loaders, heard))
        self._added = GradAccumulation()
        self._ends = (settings.from_step, settings.from_step + settings.steps - 1)
        self._apart = True  # no step has communicated
        self._left = -1  # bytes of whole tensors that may still be written
        self._rank, self._world, self._runs = 0, 1, False
        self._keeps = True  # whole state instead of projections
        self._reached: dict[int, set[tuple[int, int]]] = {}  # forward passes, by backward pass
        self._through: set[tuple[int, int]] = set()  # forward passes of the running backward pass
        self._of_step: dict[int, int] = {}  # by optimizer: last backward pass before its last step
        self._origin: torch.Tensor | None = None
        self._last: dict[str, ParameterAfterStep] = {}  # parameters after the last step
        self._begin_step()

    def _begin_step(self) -> None:
        self._file: StepFile | None = None
        self._passes: list[ForwardPass] = []
        self._roots: list[torch.nn.Module] = []  # the models of these passes
        self._opaque: list[tuple[int, int]] = []  # passes whose output has no graph
        self._losses = PendingLosses()
        self._clips: list[ClipCall] = []
        self._calls: list[CollectiveCall] = []
        self._lines = RecordedLines()
        self._backwards, self._evaluations = 0, 0
        self._before: ForwardPass | None = None  # the last pass, before a backward pass
        self._raw: dict[str, torch.Tensor] = {}
        self._exchanged: frozenset[str] = frozenset()  # names in `_raw` whose gradients are reduced
        self._looked, self._is_scaled = False, False
        self._after_backward: torch.Tensor | None = None  # RNG states
        self._at_step: dict[str, torch.Tensor] | None = None
        self._groups: tuple[dict[str, float], ...] = ()
        self._scale: float | None = None
        self._not_finite: list[str] = []
        self._made = -1  # completed steps when a scaler's step was called
        self._ops = OpLog() if self._settings.ops else None
        self._modules = Modules(ops=self._ops)
        self._held = ExtraState(self.parameters, self._added, notes=self._settings.kept)
        self._exchange = StepCalls()  # all-reduces of gradients since the last backward pass
        self._twice: dict[str, tuple[str, str]] = {}
        self._ledger = StepLedger()
        if self._is_last and self.steps_over > self._ends[0]:
            self._ledger.begin()

    @property
    def _is_last(self) -> bool:
        return self.steps_over == self._ends[1] and self._rank == 0

    @property
    def _active(self) -> bool:
        return self._ends[0] <= self.steps_over <= self._ends[1]

    def batch(self, iterator: Any, batch: Any) -> None:
        if self.steps_over <= self._ends[1]:
            self.loaders.batch(iterator, batch)
            self._lines.note("loader")
            self._origin = tensors.random_state()

    def length(self, loader: Any) -> None:
        self.loaders.number(loader)

    # -- forward passes --------------------------------------------------------------------------

    def makes(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters.number_of(optimizer)

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Record the inputs, and the state before the first forward pass of a step.

        The state is recorded again after a dry run: a pass that left no gradient but changed
        parameters or buffers.
        """
        if not self._active:
            return
        is_new = not any(model is one for one in self.parameters.roots)
        file = self._open_step(self.parameters.add_root(model))
        buffers = self.parameters.buffers(model) if is_new else {}
        looks = self._passes and not self.parameters.hold()
        if looks and (file.differ(self.parameters.by_name) or file.differ(buffers, "buffer")):
            file.restart()
            self._take_state(file, list(self.parameters.by_name))
        given, random = tensors.inputs_of((args, kwargs)), tensors.random_state()
        inputs = {f"input {place} of a forward pass": one for place, one in enumerate(given)}
        self._not_finite += tensors.not_finite(inputs)
        self._roots.append(model)
        drew = tensors.has_drawn(self._origin, random)
        self._passes.append(new_pass_record(file, model, given, self.loaders, drew))
        number, origin = len(self._passes) - 1, random if self._origin is None else self._origin
        file.add(f"random/{number}", random)
        file.add(f"origin/{number}", origin)
        hooks.log_ops(self._ops)
        if self._settings.modules:
            place = next(n for n, one in enumerate(self.parameters.roots) if one is model)
            self._modules.enters(model, place, [(0, number)], {})

    def autocasts(self, context: Any) -> None:
        self._held.autocasts()

    def leaves(self, model: torch.nn.Module, result: Any) -> None:
        """Record whether forward has drawn random numbers, and hook the backward pass through its
        output.
        """
        if not self._passes:
            return
        for name, used in self.parameters.of_fsdp2(model).items():
            self._added.watch(name, self.parameters.by_name[name], used)
        key = (self.steps_over, len(self._passes) - 1)
        self._change_pass(-1, draws=tensors.random_digests() != self._passes[-1].random)
        self._origin = tensors.random_state()
        nodes = {t.grad_fn for t in tensors.leaves(result) if t.grad_fn is not None}
        for node in nodes:
            node.register_prehook(lambda _: hooks.emit("reaches", key))
        several = result if isinstance(result, tuple | list) else (result,)
        has_graph = not all(isinstance(t, torch.Tensor) and not t.requires_grad for t in several)
        if has_graph and not nodes:
            self._opaque.append(key)

    def evaluates(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Mark batches that are used for evaluation."""
        if self._active:
            self.loaders.evaluated(tensors.inputs_of((args, kwargs)))

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        if self._file is not None and value.grad_fn is not None:
            is_data = isinstance(target, torch.Tensor) and not target.requires_grad
            kept = self._file.add_data(target) if is_data else ""
            self._losses.hear(
                name, reduction, rank.number_of_targets(name, target, ignored), kept, value
            )

    # -- backward passes -------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Record the loss, and start recording gradients."""
        if not self._active:
            return
        self._open_step(self.parameters.add_others())
        self._lines.note("backward")
        self._raw, self._looked = {}, False
        self._note_twice()
        self._losses.begin()
        self._backwards += 1
        self._added.may_exchange = any(one.exchanges is not False for one in self._passes[:-1])
        self._added.begin()
        self._through = set(self._opaque)
        self._runs = True
        self._before = self._passes[-1] if self._passes else None
        if self._passes and loss.numel() == 1:
            self._not_finite += tensors.not_finite({"the loss": loss})
            terms, unread = terms_of(loss, self._losses.heard)
            one, again = self._passes[-1], self._passes[-1].loss is not None
            self._change_pass(
                -1,
                loss=float(loss.detach()) + (one.loss or 0.0),
                drew=one.drew or tensors.has_drawn(self._origin, tensors.random_state()),
                terms=() if again else terms,
                unread="several backward passes have begun there" if again else unread,
            )

    def reaches(self, place: Any) -> None:
        """Record that a backward pass visits a forward pass or a loss."""
        if self._runs and isinstance(place, int):
            self._losses.reaches(place)
        elif self._runs:
            self._through.add(place)

    def gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Record a contribution to a parameter's gradient."""
        if self._file is not None:
            self._added.add(name, gradient)

    def backward_over(self) -> None:
        """Record the backward pass's losses, and reduced gradients if DDP has synchronized."""
        if not self._runs:
            return
        self._runs = False
        self._reached[self._added.backward] = self._through
        if self._passes:
            losses, terms = self._losses.of_backward(self._passes[-1])
            self._change_pass(-1, losses=losses, terms=terms)
            reached = [number for step, number in self._through if step == self.steps_over]
            move_loss_to_visited_pass(self._passes, self._before, reached)
        self._losses = PendingLosses() if self._losses.is_over else self._losses
        self._opaque = []
        for step, number in self._through:
            if step == self.steps_over and self._passes[number].exchanges:
                wrapped = rank.ddp_in(self._roots[number])
                names = self.parameters.names_of(wrapped.parameters())
                # The script may add cleared gradients before its step.
                names = [name for name in names if name not in self._added.cleared]
                self._raw |= self.parameters.gradients(names)
                adds = rank.ranks_that_ddp_averages(wrapped)
                given = [self.parameters.by_name[name].grad for name in names]
                self._exchange.hear("all_reduce", given, 0, adds, type(wrapped).__name__)
        self._exchanged = frozenset(self._raw)
        self._after_backward = tensors.random_state()

    def gradients_ready(self) -> None:
        """Record the remaining gradients when the script first uses them."""
        if self._file is not None and not self._looked:
            others = [name for name in self.parameters.by_name if name not in self._raw]
            self._raw |= self.parameters.gradients(others)
            self._looked = True

    def clipped(self, kind: str, most: float, norm: Any, parameters: Any) -> None:
        if self._file is None:
            return
        self._lines.note("clip")
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        names = self.parameters.names_of(given)
        names = [] if len(names) == len(self.parameters.by_name) else names
        passes, scaled = len(self._passes), self._is_scaled
        self._clips.append(
            rank.clip_of(kind, most, norm, passes=passes, scaled=scaled, names=names)
        )

    # -- the step --------------------------------------------------------------------------------

    def scales(self, scaler: Any) -> None:
        self._is_scaled = bool(scaler.is_enabled() and scaler.get_scale() != 1.0)

    def unscales(self, optimizer: Any) -> None:
        """Record that gradients are no longer scaled."""
        self._is_scaled = False

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Record the loss scale."""
        if self._active and scaler.is_enabled():
            self._scale = float(scaler.get_scale())
            self._made = self.steps_over
            self.gradients_ready()

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """Count a step even if the scaler skipped it."""
        if self._active and scaler.is_enabled() and self._made == self.steps_over:
            self.steps(optimizer)
            self._finish(optimizer, skipped=True)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer gradients and the settings."""
        if not self._active:
            return
        names = self._names_of(optimizer)
        if self._file is None and not self._added.backwards_of(
            names, self._last_step_pass(optimizer)
        ):
            return  # a step without gradients, as before a schedule starts
        file = self._open_step([])
        self._lines.note("step")
        state = self._after_backward
        if state is not None and tensors.has_drawn(state, tensors.random_state()):
            file.add(records.BEFORE_NOISE, state)
        if not self._evaluations:
            file.note_written({name: self.parameters.by_name[name] for name in names})
        self.gradients_ready()
        self._at_step = self.parameters.gradients(names, self._raw)
        self._groups = tuple(rank.numeric_settings(group) for group in optimizer.param_groups)
        self._evaluations += 1
        self._held.note_optimizer(optimizer, file)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the parameters after the step, and write it."""
        if not self._active:
            self.steps_over += 1
            self._end_if_over()
            return
        if self._at_step is None and self._file is not None:
            self.steps(optimizer)
        if self._at_step is not None:
            self._finish(optimizer, skipped=False)

    def collective(self, name: str, place: str, given: Any) -> None:
        if self._file is not None and len(self._calls) < records.MOST_CALLS:
            elements = max((t.numel() for t in tensors.leaves(given)), default=0)
            self._calls.append(CollectiveCall(name, place, elements, self._backwards > 0))
            if name == "all_reduce" and self._backwards:
                adds = rank.ranks_that_add(*given)
                self._exchange.hear(name, tensors.leaves(given), 0, adds, place)

    def _note_twice(self) -> None:
        """Record the gradients that were reduced twice since the last backward pass."""
        held = self._exchange.has_calls and self.parameters.by_name
        memory = {name: storage_range(p.grad) for name, p in (held or {}).items()}
        self._twice |= self._exchange.reduced_twice(memory)
        self._exchange.begin()

    def _finish(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        file, names = self._file, self._names_of(optimizer)
        if file is None:
            return
        others = [name for name in self.parameters.left_out() if name in self._added.local]
        keep = self._keeps or bool(others)
        for name in names:
            file.add_after(name, self.parameters.by_name[name], keep=keep)
        by = 1.0 / self._scale if self._scale else 1.0
        given = self._at_step or {}
        self._added.forget(name for name in names if name not in given)
        self._added.write({*names, *others}, file, by)
        raw, wrong = {n: self._raw[n] for n in names if n in self._raw}, tensors.not_finite(given)
        file.add_gradients("raw", raw, by)
        file.add_gradients("step", given, 1.0)
        number = self.parameters.number_of(optimizer)
        backwards = self._added.backwards_of(names, self._last_step_pass(optimizer))
        live = {key for one in backwards for key in self._reached.get(one, ())}
        for place in range(len(self._passes)):
            self._change_pass(place, live=(self.steps_over, place) in live)
        called = [root for root, one in zip(self._roots, self._passes, strict=True) if one.live]
        file.compare_only(self.parameters.used(called))
        file.add_modules(self._modules.taken().get(0))
        self._note_twice()
        trained = [self.parameters.by_name[name] for name in names]
        ledger = self._ledger.taken(self.steps_over, trained, self.parameters.roots, self._twice)
        file.ops = None if self._ops is None else self._ops.taken()
        hooks.log_ops(None)
        self._left -= file.write(
            self._left,
            rank=self._rank,
            world=self._world,
            optimizer=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            number=number,
            groups=self._groups,
            passes=tuple(self._passes),
            earlier=tuple(sorted(key for key in live if key[0] < self.steps_over)),
            backwards=self._backwards,
            carried=any(one <= self._of_step.get(number, -1) for one in backwards),
            exchanged=bool(raw) and self._exchanged.issuperset(raw),
            batches=self.loaders.take(file),
            iterations=self.loaders.take_iterations(),
            clips=tuple(self._clips),
            calls=tuple(self._calls),
            lines=self._lines.taken(),
            not_finite=tuple((*self._not_finite, *wrong) if wrong and not skipped else ()),
            scale=self._scale,
            skipped=skipped,
            ledger=ledger if self._is_last else None,
            batchnorm=rank.normalizes_by_local_batch(self.parameters),
            averages=rank.digests_of_averages(self.parameters)
            if self.steps_over in self._ends
            else {},
            **self._held.about,
        )
        self._of_step[number], self._last = self._added.backward, file.after
        self._added.stepped(names)
        self.steps_over += 1
        self._apart &= self._world > 1 and file.is_unchanged(raw)
        if self._ends[1] < self.steps_over <= self._settings.most:
            of_step = (self._folder, self._rank, self._world, self.steps_over)
            if rank.all_independent(*of_step, apart=self._apart):
                self._ends = (self._ends[0], self.steps_over)
        self._begin_step()
        self._origin = tensors.random_state()
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self.steps_over > self._ends[1] and not self._settings.keep_going:
            rank.finish_rank(self._folder, self._rank, self._world, self.loaders.datasets)

    # -- state of this process -------------------------------------------------------------------

    def _open_step(self, new: list[str]) -> StepFile:
        """Return the current step's file, created if necessary; record `new` parameters in it."""
        divided = self.parameters.of_fsdp2() if new else {}
        for name in new:  # fully_shard's gradients arrive in another tensor
            if name not in divided:
                self._added.watch(name, self.parameters.by_name[name])
        if self._file is not None:
            self._take_state(self._file, new)
            return self._file
        self._rank, self._world = rank.rank_and_world_size()
        if self._left < 0:
            self._left = self._settings.budget // self._world
            axes = arrangement.axes_of(self.parameters, self._world, self._settings.mesh)
            self._keeps = self._rank == 0 or any(one.kind != "data" for one in axes)
            self._apart &= all(one.kind == "data" for one in axes)
            rank.write_rank_record(self._folder, self._rank, self._world, self.parameters, axes)
        folder = records.rank_folder(self._folder, self._rank)
        self._file = StepFile(folder, self.steps_over, self._last)
        self._take_state(self._file, list(self.parameters.by_name))
        self._held.begin()
        if self._is_last and self.steps_over == self._ends[0]:
            self._ledger.begin()
        return self._file

    def _take_state(self, file: StepFile, names: list[str]) -> None:
        if not names:
            return
        for name in names:
            file.add_state(f"before/{name}", self.parameters.by_name[name], keep=self._keeps)
        for name, buffer in self.parameters.buffers().items():
            if file.digest(f"buffer/{name}") is None:
                file.add_state(f"buffer/{name}", buffer, keep=self._keeps)

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        if new := self.parameters.add_others():
            self._open_step(new)
        return self.parameters.of_optimizer(optimizer)

    def _last_step_pass(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of the last backward pass before the optimizer's last step."""
        return self._of_step.get(self.parameters.number_of(optimizer), -1)

    def _change_pass(self, place: int, **changes: Any) -> None:
        self._passes[place] = replace(self._passes[place], **changes)
