"""Runs the script as a single process on the ranks' batches, each step from the recorded state.

Purpose: the results are the single-process reference of a job. The unmodified script runs again
under `hooks`, in a copy of the project, with a stand-in for its process group
(`single_process_group`). This listener decides at each event what the script sees, and records what
it computes.

A step has four stages.
1. Before the first batch or forward pass, `replay_tasks` forks copies of this process: one per
   additional rank if batches cannot be joined, and perturbed ones that measure the noise floor.
2. At each forward pass the recorded parameters and buffers are loaded (`_load_state`), and inputs,
   targets and RNG states are overwritten by the recorded ones (`batch_injection`).
3. When the last backward pass has ended, a copy writes its gradients and exits. The parent combines
   them into the reference gradients, `raw/` (`_take`).
4. In `optimizer.step()` the script's gradients are recorded (`step/`). Then the job's gradients and
   settings replace them, so that `after/` shows only errors of the update itself.

Invariants: every step starts from the recorded state, so an error in one step does not appear in
the next, and errors do not accumulate. The reference never reads the job's gradients to compute its
own; they only select one of the admissible `scales`, decide if tolerances must be measured again,
and replace the script's gradients after `raw/` is fixed. `spread/` is the change of a gradient, as
an L2 norm, if every parameter is perturbed by one ULP. It is measured at the first step, and at a
later one if the estimate from the first cannot explain a difference.

Example with two ranks, one parameter w, SGD with lr 0.1 and loss mean((w x - y)^2). Step 0 starts
from w = 1. Rank 0 has x, y = 1, 3: its local gradient is 2 (1 - 3) = -4. Rank 1 has x, y = 2, 0:
its local gradient is 2 * 2 * 2 = 8. The script divides by the world size after DDP's average, so
the recording has `raw/w` = `step/w` = 1 and `after/w` = 1 - 0.1 * 1 = 0.9.
- Batches joined: the script is given both rows in one batch. The loss is (4 + 4) / 2 = 4, its
  gradient is (-4 + 8) / 2 = 2, and `raw/w` = 2.
- By rank, if samples interact (BatchNorm): this process computes -4, a forked copy with the batch
  of rank 1 writes 8 and exits; with weights 0.5, 0.5 again `raw/w` = 2.
The script steps with 2, so `step/w` = 2, but the optimizer receives the recorded 1 and reaches
`after/w` = 0.9. Judging finds gradients 0.5x the reference and a correct update. Step 1 starts from
the recorded w = 0.9, and is judged by itself.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch.autograd.graph import get_gradient_edge

from distcheck.job.inside import choosing, ending, single_process_group, state, tensors, watching
from distcheck.job.inside.batch_injection import BatchInjector
from distcheck.job.inside.joining import joined
from distcheck.job.inside.listener import NullListener
from distcheck.job.inside.modules import Modules
from distcheck.job.inside.moved_gradients import with_moved_gradients
from distcheck.job.inside.parameters import Parameters
from distcheck.job.inside.rank import number_of_targets, numeric_settings
from distcheck.job.inside.replay_tasks import ReplayTasks
from distcheck.job.inside.terms import Heard, divisor_of_loss
from distcheck.job.settings import IN_TURN, JobSettings, ReplayedStep, ReplayResult, ReplayTask
from distcheck.recordings.jobs import reading, records
from distcheck.recordings.jobs.records import BEFORE_NOISE, StepRecord
from distcheck.recordings.recording import Kind


class Replayer(NullListener):
    """Listener that feeds the recorded data to a script and records the reference."""

    def __init__(self, settings: JobSettings, folder: Path) -> None:
        self._folder, self._settings = folder, settings
        job = with_moved_gradients(reading.read_recording(Path(settings.recording)))
        self._job = joined(job) if settings.joins else job
        self._hands = BatchInjector(self._job, settings, self._fail)
        self._copies = ReplayTasks(self._job, self._hands, settings, folder, self._fail)
        self._parameters = Parameters()
        self._raw: dict[str, torch.Tensor] = {}  # reference gradients of the step
        self._left: dict[str, torch.Tensor] = {}  # gradients that the script continues with
        self._seen: list[ReplayedStep] = []
        self._at = 0  # index of the recorded step
        self._begin()

    def _begin(self) -> None:
        self._begun = self._is_ready = self._changes = False
        self._hands.step = self._step if self._at < len(self._job.steps) else -1
        self._hands.begin_step()
        self._backwards = self._exchanges = 0
        self._made = -1  # steps made when a scaler's step was called
        self._loaded = set[str]()
        self._moving: torch.Generator | None = None
        self._modules = Modules()
        self._losses: dict[int, float] = {}  # by forward pass
        self._counts: dict[int, tuple[float, str]] = {}
        self._heard: list[Heard] = []
        self._classes = 0  # the most that a loss has with classes as targets
        self._candidate: dict[str, torch.Tensor] = {}  # gradients after backward
        self._before: dict[str, torch.Tensor] = {}  # gradients before a backward pass
        self._own: float | None = None  # factor of the script's own synchronization
        self._out: dict[str, torch.Tensor] = {}
        self._groups: tuple[dict[str, float], ...] = ()
        self._kept_settings: list[dict[str, Any]] = []
        self._clips: list[tuple[float, float]] = []

    @property
    def _step(self) -> int:
        return self._job.steps[self._at]

    @property
    def _mode(self) -> str:
        return self._hands.mode

    @property
    def _copy(self) -> ReplayTask | None:
        return self._hands.copy

    @property
    def _record(self) -> StepRecord:
        """The recorded step of the rank whose batches this process receives."""
        rank = max(0, self._copy.rank) if self._copy is not None else 0
        return self._job.records[rank, self._step]

    @property
    def _is_target(self) -> bool:
        """True if a copy is at the step whose gradients it computes."""
        return self._copy is not None and self._copy.step in (self._step, -1)

    @property
    def _is_perturbed(self) -> bool:
        """True if a copy's gradients depend on the parameters at the start of this step."""
        step = self._step if self._copy is None else self._copy.step
        earlier = () if step < 0 else self._job.records[0, step].earlier
        return self._is_target or self._step in {place for place, _ in earlier}

    # -- start of a step -------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Fork the copies of a step once, before its first batch or forward pass."""
        if self._begun or self._copy is not None:
            return
        self._begun = True
        self._copies.begin(self._step)

    def _fail(self, why: str) -> NoReturn:
        if self._copy is not None:
            sys.excepthook(RuntimeError, RuntimeError(why), None)  # notes it for the parent
            os._exit(1)
        self._write(why)
        ending.exit_process()

    def _write(self, failure: str = "") -> None:
        copies, times = self._copies, self._copies.times
        choice = msgspec.structs.replace(copies.choice, mode=self._mode, failure=failure)
        replayed = ReplayResult(
            **msgspec.structs.asdict(choice), steps=tuple(self._seen),
            unfolded=copies.merged_batch.why, pads=self._hands.batch_source.pads,
            scale=1.0 if times is None else times, reads=tuple(self._hands.reads),
            divides=self._hands.divides,
        )  # fmt: skip
        records.write_json(self._folder / "replayed.json", replayed)

    # -- batches and passes ----------------------------------------------------------------------

    def begins(self, loader: Any) -> None:
        """Disable the workers of a loader, because its batches are replaced."""
        loader.num_workers = loader.timeout = 0

    def iterates(self, loader: Any, iterator: Any) -> None:
        self._hands.iterates(loader, iterator)

    def length(self, loader: Any) -> int | None:
        return self._hands.length(loader)

    def is_over(self, iterator: Any) -> bool:
        """Return True if the epoch of a rank ended at this position."""
        return self._hands.is_over(iterator)

    def batch(self, iterator: Any, batch: Any) -> None:
        self._begin_step()
        self._hands.batch(iterator, batch)

    def makes(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters.number_of(optimizer)

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Load the recorded inputs and, at the first pass of a step, the recorded state."""
        self._begin_step()
        pairs = self._hands.source(self._hands.passes)
        if not self._hands.batch_source.has(self._step, pairs):
            if self._copy is not None:
                self._copies.forks.leave(self._copy, {"more": torch.ones(1)}, self._step)
            self._fail(
                f"step {self._step}: in a single process the script makes more forward passes"
            )
        self._parameters.add_root(model)
        self._load_state(self._hands.passes)
        everything = self._job.records.values()
        if not any(r.batches or any(one.inputs for one in r.passes) for r in everything):
            self._fail("no batch tensor was recorded that the replay could inject")
        self._hands.inputs(args, kwargs)
        single_process_group.doubles = (
            self._is_target and self._copy is not None and self._copy.doubles
        )
        if self._is_target and self._copies.merged_batch.reads_terms(self._copy):
            torch.autograd.set_detect_anomaly(mode=True, check_nan=False)  # keeps tracebacks
        makes_one = self._copy is not None and (self._copy.pairs or self._copy.longer)
        makes_one = makes_one or self._hands.has_own_order  # no rank's rows are together
        if self._settings.modules and not makes_one and (self._copy is None or self._is_target):
            place = next(n for n, one in enumerate(self._parameters.roots) if one is model)
            shapes = {rank: watching.shapes_at(self._job, rank, self._step) for rank, _ in pairs}
            self._modules.enters(model, place, pairs, shapes)

    def _load_state(self, place: int) -> None:
        """Load the recorded parameters and buffers that were not loaded yet in this step."""
        passes = self._job.records[0, self._step].passes
        each = max(1, len(passes))
        later = bool(passes) and passes[place % each].later
        if later and place and not passes[(place - 1) % each].later and place == self._hands.passes:
            self._loaded = set()  # they changed between these passes
        kind = "" if later or not any(one.later for one in passes) else "start/"
        moves = self._copy.draw if self._copy is not None and self._is_perturbed and not kind else 0
        if moves and self._moving is None:
            self._moving = torch.Generator().manual_seed(moves)
        own = self._parameters.by_name
        new = {name: tensor for name, tensor in own.items() if name not in self._loaded}
        kept = self._job.tensors(0, self._step)
        state.load_recorded_tensors(new, kept, f"{kind}before/", self._moving)
        if new:
            state.load_recorded_tensors(self._parameters.buffers(), kept, f"{kind}buffer/")
        self._loaded |= set(new)

    def target(self, computed: torch.Tensor, target: Any) -> None:
        self._hands.target(computed, target)
        if computed.dim() > 1 and isinstance(target, torch.Tensor) and target.dtype == torch.int64:
            self._classes = max(self._classes, computed.shape[1])

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        self._hands.computes_loss()
        counted = number_of_targets(name, target, ignored)
        self._heard.append((name, reduction, get_gradient_edge(value), counted))
        self._copies.merged_batch.heard(self._heard[-1])

    def collective(self, name: str, place: str, given: Any) -> None:
        """Count the collectives before backward."""
        size = max((t.numel() for t in tensors.leaves(given)), default=0)
        single_process_group.called = name
        self._exchanges += size > 1 and not self._backwards

    # -- backward passes -------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Record the loss; a copy with several passes in one batch writes its results and exits."""
        single_process_group.doubles = False
        self._parameters.add_others()
        self._load_state(max(0, self._hands.passes - 1))
        if self._is_target and self._copy is not None and self._copy.pairs:
            used = {n: t for n, t in self._parameters.of_fsdp2().items() if t is not None}
            trained = {**self._parameters.by_name, **used}  # the graph has the unsharded tensors
            taken = self._copies.merged_batch.take(self._copy, loss, trained)
            self._copies.forks.leave(self._copy, taken, self._step)
        self._backwards += 1
        if self._step in self._job.moved:  # the script moves them away after each pass
            self._before = state.gradients(self._parameters.by_name)
        self._hands.begins_backward()
        if loss.numel() == 1:
            place = self._hands.passes - 1
            self._losses[place] = self._losses.get(place, 0.0) + float(loss.detach())
            passes = self._record.passes
            rows = len(passes[place % len(passes)].rows) if passes else 0
            self._counts[place] = divisor_of_loss(loss, self._heard, rows)
        self._heard = []

    def backward_over(self) -> None:
        """After the last backward pass, exit a copy, or continue with the reference gradients."""
        expected = self._record.backwards * (self._job.world if self._mode == IN_TURN else 1)
        if self._is_ready or (self._backwards != expected and self._step not in self._job.moved):
            return
        found = state.gradients(self._parameters.by_name)
        if self._step in self._job.moved:
            for kept, sign in ((self._candidate, 1), (self._before, -1)):
                found = {n: g + sign * kept[n] if n in kept else g for n, g in found.items()}
        self._candidate = found
        if self._backwards != expected:
            return
        if self._copy is not None and self._mode:
            self._exit_copy()
        elif self._copy is None:
            self._take()

    def gradients_ready(self) -> None:
        """Measure the factor of the script's own synchronization, which is complete now."""
        if self._own is None and self._candidate:
            found = state.gradients(self._parameters.by_name)
            factor = state.factor_of(found, self._candidate)
            left = state.distance(found, self._candidate, factor) if factor else 1.0
            self._own = factor if left < 1e-6 else 0.0

    def _exit_copy(self) -> None:
        if not self._is_target or self._copy is None or self._is_ready:
            return
        self._is_ready = True  # a separate process continues
        watched = watching.packed_all(self._modules.taken())
        self._copies.forks.leave(self._copy, {**self._gradients_of_passes(), **watched}, self._step)

    def _gradients_of_passes(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the step's passes, and properties of their losses."""
        counts = {self._counts.get(place, (0.0, "")) for place in self._losses_of_step()}
        count, sums = counts.pop() if len(counts) == 1 else (0.0, "")
        about = {
            "loss": self._loss(),
            "passes": torch.tensor(float(self._hands.passes)),
            "count": torch.tensor(count),
            "classes": torch.tensor(self._classes),
            "exchanges": torch.tensor(self._exchanges),
            "sums": torch.tensor(choosing.SUMS.index(sums)),
            "own": torch.tensor(1.0 if self._own is None else self._own),
        }
        raw = {n: g / self._scale for n, g in self._candidate.items()}
        return {**raw, **about}

    def _losses_of_step(self) -> list[int]:
        """Return the passes on whose losses the step was trained."""
        passes = self._record.passes
        each = max(1, len(passes))
        return [place for place in self._losses if place >= 0 and passes[place % each].live]

    def _loss(self) -> torch.Tensor:
        total = sum(self._losses[place] for place in self._losses_of_step())
        return torch.tensor(total / self._scale, dtype=torch.float64)

    def _take(self) -> None:
        """Compute the reference gradients. They replace the script's gradients until the step."""
        self._is_ready = True
        computed = self._gradients_of_passes()
        own = {n: g for n, g in computed.items() if n not in state.NOT_GRADIENTS}
        recorded = {n: self._recorded(Kind.EXCHANGED, n) for n in own}
        theirs = {n: g for n, g in recorded.items() if g is not None and g.shape == own[n].shape}
        self._raw, self._out = self._copies.reference(self._step, computed, theirs)
        resumes = self._record.exchanged and bool(theirs)
        resumes = resumes and state.distance(theirs, self._raw) < choosing.SAME
        self._left = {**self._raw, **theirs} if resumes else self._raw
        if any(self._left[name] is not one for name, one in own.items()):
            scaled = {n: g * self._scale for n, g in self._left.items()}
            if self._step in self._job.moved:  # the script adds those of the earlier passes
                there = state.gradients(self._parameters.by_name)
                scaled = {
                    n: g - self._candidate[n] + there[n]
                    for n, g in scaled.items()
                    if n in self._candidate and n in there
                }
            state.put(self._parameters.by_name, scaled)
        self._draw_the_same_noise()

    def _draw_the_same_noise(self) -> None:
        """Set the RNG states of the first rank that drew random numbers between backward and step,
        as a privacy engine does, whose lowest rank alone adds noise.
        """
        for rank in range(self._job.world):
            held = self._job.tensors(rank, self._step)
            if BEFORE_NOISE in held:
                tensors.set_random_state(held[BEFORE_NOISE])
                return

    def _recorded(self, kind: Kind, name: str) -> torch.Tensor | None:
        """Return a gradient of the first rank whose optimizer has the parameter."""
        rank = next(iter(self._job.holders(self._step, name)), 0)
        return self._job.gradient(kind, rank, self._step, name)

    # -- the step --------------------------------------------------------------------------------

    def scales(self, scaler: Any) -> None:
        """Load the recorded loss scale."""
        if scaler.is_enabled() and self._record.scale is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": self._scale})

    @property
    def _scale(self) -> float:
        return self._record.scale or 1.0

    def clipped(self, kind: str, most: float, norm: Any, parameters: Any) -> None:
        if self._is_ready and isinstance(norm, torch.Tensor | float):
            self._clips.append((float(most), float(norm)))

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Remember the number of completed steps."""
        self._made = self._at
        self.gradients_ready()

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """Count a step even if the scaler skipped it."""
        if scaler.is_enabled() and self._made == self._at and self._raw:
            self._finish(optimizer, skipped=True)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer gradients and settings, then replace them by those of the job."""
        self.gradients_ready()
        if not self._candidate and self._hands.passes:
            self._candidate = state.gradients(self._parameters.by_name)  # not from a backward pass
        if self._copy is not None and self._is_target and self._candidate:
            self._exit_copy()
        if self._copy is None and self._hands.passes and not self._is_ready:
            self._take()
        if not self._raw and self._copy is None:
            return
        names = self._parameters.of_optimizer(optimizer)
        own = {name: self._parameters.by_name[name] for name in names}
        given = state.gradients(own)
        self._changes = any(not _are_equal(self._left.get(n), given.get(n)) for n in own)
        self._out |= {f"step/{n}": g for n, g in given.items()}
        self._groups = tuple(numeric_settings(group) for group in optimizer.param_groups)
        recorded = self._job.records[0, self._step].groups
        self._kept_settings = []
        for group, then in zip(optimizer.param_groups, recorded, strict=False):
            plain = {k: v for k, v in group.items() if isinstance(v, float | tuple)}
            self._kept_settings.append(plain)
            group.update({key: _recorded(key, value, then) for key, value in plain.items()})
        state.put(own, {n: self._recorded(Kind.GRADIENT, n) for n in own})

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the script's settings, and finish the step."""
        if not self._raw and self._copy is None:
            return
        for group, own in zip(optimizer.param_groups, self._kept_settings, strict=False):
            group.update(own)
        self._finish(optimizer, skipped=False)

    def _finish(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        if self._copy is None:
            self._save(self._parameters.of_optimizer(optimizer), skipped=skipped)
        self._at += 1
        steps = self._job.steps
        if self._at == len(steps) or not all(one.whole for one in self._job.at(steps[self._at])):
            ending.exit_process()
        self._begin()
        passes = self._record.passes
        if passes and not passes[0].batches:  # the script computes its inputs, from here on
            self._hands.set_random_streams(origin=True)
            if passes[0].drew:
                self._begin_step()
                self._hands.set_random_streams(origin=True)

    def _save(self, names: list[str], *, skipped: bool) -> None:
        raw = {n: g for n, g in self._raw.items() if n in names}
        self._out |= {f"raw/{n}": g for n, g in raw.items()}
        if not skipped:
            by_name = self._parameters.by_name
            self._out |= {f"after/{n}": tensors.unsharded_on_cpu(by_name[n]).clone() for n in names}
        for name in (*raw, "loss"):
            spread = self._copies.spreads.get(name, float("nan"))
            self._out[f"spread/{name}"] = torch.tensor(spread)
        self._out |= self._copies.watched.results(self._step, self._modules.taken())
        self._out.setdefault("loss", torch.tensor(float("nan"), dtype=torch.float64))
        tensors.write(self._out, self._folder / f"replay-{self._step:06d}.safetensors")
        losses = [self._losses[place] for place in self._losses_of_step()]
        self._seen.append(
            ReplayedStep(
                step=self._step,
                groups=self._groups,
                losses=tuple(loss for loss in losses if abs(loss) < float("inf")),
                draws=self._copies.draws,
                skipped=skipped,
                folded=self._copies.merged_batch.kind,
                changes=self._changes,
                clips=tuple(one for one in self._clips if math.isfinite(sum(one))),
            )
        )
        self._write()


def _recorded(key: str, value: Any, then: dict[str, float]) -> Any:
    """Return a recorded setting, or a tuple such as betas with the recorded elements."""
    if isinstance(value, tuple):
        return tuple(then.get(f"{key}[{place}]", one) for place, one in enumerate(value))
    return then.get(key, value)


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
