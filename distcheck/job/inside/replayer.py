"""Runs the script as one process with the ranks' batches, each step from the recorded state.

What a step reaches is written beside the recording: gradients when the last backward pass is over
(`raw/`), those that the optimizer is given (`step/`), and the parameters after a step in which the
optimizer was given the recorded gradients and settings (`after/`), so that one difference is not
found again as the next one. What the script does to gradients between backward and the step is done
to the recorded ones, where DistributedDataParallel had left those. `spread/` holds how far
gradients move, as a norm, when every parameter moves by one ULP: measured at the first step, and
wherever what that says is not enough.
"""

import math
import os
from pathlib import Path
from typing import Any, NoReturn

import torch

from distcheck.job.inside import choosing, ending, single_process_group, state, tensors, watching
from distcheck.job.inside.batch_injection import BatchInjector
from distcheck.job.inside.joining import joined
from distcheck.job.inside.listener import NullListener
from distcheck.job.inside.modules import Modules
from distcheck.job.inside.parameters import Parameters
from distcheck.job.inside.rank import numbers_of, targets_of
from distcheck.job.inside.replay_tasks import ReplayTasks
from distcheck.job.inside.terms import Heard, count_of
from distcheck.job.settings import IN_TURN, JobSettings, Replayed, ReplayedStep, ReplayTask
from distcheck.recordings.jobs import reading, records
from distcheck.recordings.jobs.records import StepRecord
from distcheck.recordings.recording import Kind


class Replayer(NullListener):
    """Hears of a script through `hooks`, and hands it what the ranks had."""

    def __init__(self, settings: JobSettings, folder: Path) -> None:
        self._folder, self._settings = folder, settings
        job = reading.read(Path(settings.recording))
        self._job = joined(job) if settings.joins else job
        self._hands = BatchInjector(self._job, settings, self._fail)
        self._copies = ReplayTasks(self._job, self._hands, settings, folder, self._fail)
        self._parameters = Parameters()
        self._raw: dict[str, torch.Tensor] = {}  # gradients of the last backward passes
        self._left: dict[str, torch.Tensor] = {}  # what the script goes on with after them
        self._seen: list[ReplayedStep] = []
        self._at = 0  # the place among the recorded steps
        self._begin()

    def _begin(self) -> None:
        self._begun = self._is_ready = self._changes = False
        self._hands.step = self._step if self._at < len(self._job.steps) else -1
        self._hands.begin_step()
        self._backwards = 0
        self._made = -1  # steps that were over when a scaler was asked for one
        self._loaded = set[str]()
        self._moving: torch.Generator | None = None
        self._modules = Modules(lambda rank: watching.shapes_at(self._job, rank, self._step))
        self._losses: dict[int, float] = {}  # by forward pass
        self._counts: dict[int, tuple[float, str]] = {}
        self._heard: list[Heard] = []
        self._candidate: dict[str, torch.Tensor] = {}  # gradients when backward was over
        self._own: float | None = None  # what the script's own exchange multiplied them by
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
        """The step as the rank has it whose batches this process gets."""
        rank = max(0, self._copy.rank) if self._copy is not None else 0
        return self._job.records[rank, self._step]

    @property
    def _is_target(self) -> bool:
        """Whether a copy is at the step whose gradients it computes."""
        return self._copy is not None and self._copy.step in (self._step, -1)

    @property
    def _is_perturbed(self) -> bool:
        """Whether a copy's gradients depend on the parameters that this step begins with."""
        step = self._step if self._copy is None else self._copy.step
        earlier = () if step < 0 else self._job.records[0, step].earlier
        return self._is_target or self._step in {place for place, _ in earlier}

    # -- a step begins ---------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Forks the copies of a step, once, before its first batch or forward pass."""
        if self._begun or self._copy is not None:
            return
        self._begun = True
        self._copies.begin(self._step)

    def _fail(self, why: str) -> NoReturn:
        if self._copy is not None:
            os._exit(1)
        self._write(why)
        ending.leave()

    def _write(self, failure: str = "") -> None:
        copies, times = self._copies, self._copies.times
        replayed = Replayed(
            mode=self._mode, why=copies.choice.why, steps=tuple(self._seen), failure=failure,
            unfolded=copies.merged_batch.why, pads=self._hands.batch_source.pads,
            scale=1.0 if times is None else times, scales=copies.choice.scales,
            reads=tuple(self._hands.reads), interacts=copies.choice.interacts,
            joins=copies.choice.joins,
        )  # fmt: skip
        records.write_json(self._folder / "replayed.json", replayed)

    # -- batches and passes ----------------------------------------------------------------------

    def begins(self, loader: Any) -> None:
        """No worker is started: what it would read is replaced."""
        loader.num_workers = loader.timeout = 0

    def iterates(self, loader: Any, iterator: Any) -> None:
        self._hands.iterates(loader, iterator)

    def length(self, loader: Any) -> int | None:
        return self._hands.length(loader)

    def is_over(self, iterator: Any) -> bool:
        """Whether a rank's epoch ended here."""
        return self._hands.is_over(iterator)

    def batch(self, iterator: Any, batch: Any) -> None:
        self._begin_step()
        self._hands.batch(iterator, batch)

    def makes(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters.number_of(optimizer)

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Puts the recorded state in at the first pass of a step, and the recorded inputs."""
        self._begin_step()
        pairs = self._hands.source(self._hands.passes)
        if not self._hands.batch_source.has(self._step, pairs):
            if self._copy is not None:
                self._copies.forks.leave(self._copy, {"more": torch.ones(1)}, self._step)
            self._fail(f"step {self._step}: as one process the script makes more forward passes")
        self._parameters.add_root(model)
        self._load_state(self._hands.passes)
        everything = self._job.records.values()
        if not any(r.batches or any(one.inputs for one in r.passes) for r in everything):
            self._fail("no tensor of a batch was seen that the replay could hand out")
        self._hands.inputs(args, kwargs)
        single_process_group.doubles = (
            self._is_target and self._copy is not None and self._copy.doubles
        )
        makes_one = self._copy is not None and (self._copy.pairs or self._copy.longer)
        if self._settings.modules and not makes_one and (self._copy is None or self._is_target):
            place = next(n for n, one in enumerate(self._parameters.roots) if one is model)
            self._modules.enters(model, place, pairs)

    def _load_state(self, place: int) -> None:
        """Puts in what parameters were before a pass, those of which that was not done yet."""
        passes = self._job.records[0, self._step].passes
        each = max(1, len(passes))
        later = bool(passes) and passes[place % each].later
        if later and place and not passes[(place - 1) % each].later and place == self._hands.passes:
            self._loaded = set()  # they had changed in between
        kind = "" if later or not any(one.later for one in passes) else "start/"
        moves = self._copy.draw if self._copy is not None and self._is_perturbed and not kind else 0
        if moves and self._moving is None:
            self._moving = torch.Generator().manual_seed(moves)
        own = self._parameters.by_name
        new = {name: tensor for name, tensor in own.items() if name not in self._loaded}
        kept = self._job.tensors(0, self._step)
        state.load(new, kept, f"{kind}before/", self._moving)
        if new:
            state.load(self._parameters.buffers(), kept, f"{kind}buffer/")
        self._loaded |= set(new)

    def target(self, computed: torch.Tensor, target: Any) -> None:
        self._hands.target(computed, target)

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        self._hands.computes_loss()
        self._heard.append((name, reduction, value, targets_of(name, target, ignored)))
        self._copies.merged_batch.heard(self._heard[-1])

    # -- backward passes -------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Notes the loss; a copy with several passes in one batch is done."""
        single_process_group.doubles = False
        self._parameters.add_others()
        self._load_state(max(0, self._hands.passes - 1))
        if self._is_target and self._copy is not None and self._copy.pairs:
            taken = self._copies.merged_batch.take(self._copy, loss, self._parameters.by_name)
            self._copies.forks.leave(self._copy, taken, self._step)
        self._backwards += 1
        self._hands.begins_backward()
        if loss.numel() == 1:
            place = self._hands.passes - 1
            self._losses[place] = self._losses.get(place, 0.0) + float(loss.detach())
            passes = self._record.passes
            rows = len(passes[place % len(passes)].rows) if passes else 0
            self._counts[place] = count_of(loss, self._heard, rows)
        self._heard = []

    def backward_over(self) -> None:
        """A copy writes its gradients and ends; the parent goes on with the reference's."""
        expected = self._record.backwards * (self._job.world if self._mode == IN_TURN else 1)
        if self._backwards != expected or self._is_ready:
            return
        self._candidate = state.gradients(self._parameters.by_name)
        if self._copy is not None and self._mode:
            self._leave()
        elif self._copy is None:
            self._take()

    def gradients_ready(self) -> None:
        """Something looks at the gradients: the script's own exchange is over, if it has one."""
        if self._own is None and self._candidate:
            found = state.gradients(self._parameters.by_name)
            factor = state.factor_of(found, self._candidate)
            left = state.distance(found, self._candidate, factor) if factor else 1.0
            self._own = factor if left < 1e-6 else 0.0

    def _leave(self) -> None:
        """A copy's end: what it has computed, and how."""
        if not self._is_target or self._copy is None or self._is_ready:
            return
        self._is_ready = True  # where it is a process, it goes on
        watched = watching.packed_all(self._modules.taken())
        self._copies.forks.leave(self._copy, {**self._computed(), **watched}, self._step)

    def _computed(self) -> dict[str, torch.Tensor]:
        """The gradients of the step's passes, and what their losses are."""
        counts = {self._counts.get(place, (0.0, "")) for place in self._losses_of_step()}
        count, sums = counts.pop() if len(counts) == 1 else (0.0, "")
        about = {
            "loss": self._loss(),
            "passes": torch.tensor(float(self._hands.passes)),
            "count": torch.tensor(count),
            "sums": torch.tensor(choosing.SUMS.index(sums)),
            "own": torch.tensor(1.0 if self._own is None else self._own),
        }
        raw = {n: g / self._scale for n, g in self._candidate.items()}
        return {**raw, **about}

    def _losses_of_step(self) -> list[int]:
        """The passes whose loss the step was trained on."""
        passes = self._record.passes
        each = max(1, len(passes))
        return [place for place in self._losses if place >= 0 and passes[place % each].live]

    def _loss(self) -> torch.Tensor:
        total = sum(self._losses[place] for place in self._losses_of_step())
        return torch.tensor(total / self._scale, dtype=torch.float64)

    def _take(self) -> None:
        """The reference's gradients, for what the script does with them until the next step."""
        self._is_ready = True
        computed = self._computed()
        own = {n: g for n, g in computed.items() if n not in state.NOT_GRADIENTS}
        recorded = {n: self._recorded(Kind.EXCHANGED, n) for n in own}
        theirs = {n: g for n, g in recorded.items() if g is not None and g.shape == own[n].shape}
        self._raw, self._out = self._copies.reference(self._step, computed, theirs)
        resumes = self._record.exchanged and bool(theirs)
        resumes = resumes and state.distance(theirs, self._raw) < choosing.SAME
        self._left = {**self._raw, **theirs} if resumes else self._raw
        if any(self._left[name] is not one for name, one in own.items()):
            scaled = {n: g * self._scale for n, g in self._left.items()}
            state.put(self._parameters.by_name, scaled)

    def _recorded(self, kind: Kind, name: str) -> torch.Tensor | None:
        """A gradient of the first rank whose optimizer has the parameter."""
        rank = next(iter(self._job.holders(self._step, name)), 0)
        return self._job.gradient(kind, rank, self._step, name)

    # -- the step --------------------------------------------------------------------------------

    def scales(self, scaler: Any) -> None:
        """Puts the recorded loss scale in."""
        if scaler.is_enabled() and self._record.scale is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": self._scale})

    @property
    def _scale(self) -> float:
        return self._record.scale or 1.0

    def clipped(self, kind: str, most: float, norm: Any, parameters: Any) -> None:
        """Notes how much clipping allows, and what it has found."""
        if self._is_ready and isinstance(norm, torch.Tensor | float):
            self._clips.append((float(most), float(norm)))

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Notes how many steps were made before."""
        self._made = self._at
        self.gradients_ready()

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """A step that the scaler skips is a step."""
        if scaler.is_enabled() and self._made == self._at and self._raw:
            self._finish(optimizer, skipped=True)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes what the optimizer is given, and gives it what it was given in the job."""
        self.gradients_ready()
        if not self._candidate and self._hands.passes:
            self._candidate = state.gradients(self._parameters.by_name)  # by no backward pass
        if self._copy is not None and self._is_target and self._candidate:
            self._leave()
        if self._copy is None and self._hands.passes and not self._is_ready:
            self._take()
        if not self._raw and self._copy is None:
            return
        names = self._parameters.of_optimizer(optimizer)
        own = {name: self._parameters.by_name[name] for name in names}
        given = state.gradients(own)
        self._changes = any(not _same(self._left.get(n), given.get(n)) for n in own)
        self._out |= {f"step/{n}": g for n, g in given.items()}
        self._groups = tuple(numbers_of(group) for group in optimizer.param_groups)
        recorded = self._job.records[0, self._step].groups
        self._kept_settings = []
        for group, then in zip(optimizer.param_groups, recorded, strict=False):
            plain = {k: v for k, v in group.items() if isinstance(v, float) and k in then}
            self._kept_settings.append(plain)
            group.update({key: then[key] for key in plain})
        state.put(own, {n: self._recorded(Kind.GRADIENT, n) for n in own})

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the parameters, and gives the script its own settings back."""
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
            ending.leave()
        self._begin()
        passes = self._record.passes
        if passes and not passes[0].batches:  # the script makes its inputs itself, from here on
            self._hands.set_random_streams(origin=True)
            if passes[0].drew:
                self._begin_step()
                self._hands.set_random_streams(origin=True)

    def _save(self, names: list[str], *, skipped: bool) -> None:
        raw = {n: g for n, g in self._raw.items() if n in names}
        self._out |= {f"raw/{n}": g for n, g in raw.items()}
        if not skipped:
            by_name = self._parameters.by_name
            self._out |= {f"after/{n}": tensors.whole(by_name[n]).clone() for n in names}
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


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
