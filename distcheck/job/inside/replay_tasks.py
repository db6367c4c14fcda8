"""Runs copies of a replay: separate runs of a step that compute each rank's gradients, measure the
noise floor, or merge several passes into one.

If the script uses a GPU, which a fork cannot use, each copy is a separate process. It runs the
script from the beginning in a copy of the folder, and has the same role at every step. Every step
starts from the recorded state, so copies do not wait for each other: a copy writes its results,
loads the recorded state, and continues. Nondeterminism of GPU kernels, including autotuning, is
then part of the measured differences.
"""

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from distcheck.job import running, settings
from distcheck.job.copying import ProjectCopy
from distcheck.job.inside import choosing, state, tensors
from distcheck.job.inside.batch_injection import BatchInjector
from distcheck.job.inside.batch_source import ALL
from distcheck.job.inside.forks import Forks, Written, exit_description
from distcheck.job.inside.marking import MARK
from distcheck.job.inside.merged_batch import MergedBatch, limit_memory
from distcheck.job.inside.watching import ModulesOfCopies
from distcheck.job.settings import BY_RANK, JobSettings, ReferenceChoice, ReplayTask
from distcheck.judge.divergence.noise_floor import PERTURBED_RUNS, norm_of, tolerance
from distcheck.machine import devices
from distcheck.machine.numerics import unit_roundoff
from distcheck.recordings.jobs.reading import JobRecording

_PATIENCE_S = 300.0  # for a copy's next step: it may have to start Python and tune kernels

Key = tuple[ReplayTask, str]


@dataclass
class _Copy:
    """A process that is started or pending. Its folder contains its settings and results."""

    folder: Path
    process: "subprocess.Popen[bytes] | None" = None
    begun: float = 0.0

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_over(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def result(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.safetensors"

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder / "folder", ignore_errors=True)


class Processes:
    """Starts copies, as many at a time as fit if each uses `gpu_bytes` of GPU memory like a rank of
    the job; reads their results.
    """

    def __init__(self, folder: Path, asked: JobSettings, gpu_bytes: int) -> None:
        self._folder, self._asked, self._gpu_bytes = folder, asked, gpu_bytes
        self._project = Path(asked.project)
        # Each copy is watched under its own rank.
        self._environment = {k: v for k, v in os.environ.items() if k != MARK}
        self._here = Path.cwd().relative_to(self._project)
        self._copies: dict[Key, _Copy] = {}
        self.why: dict[ReplayTask, str] = {}  # reasons of failed copies
        if asked.task is None:  # before the script writes anything
            shutil.copytree(self._project, folder / "clean", symlinks=True)

    def run(
        self, tasks: Sequence[ReplayTask], step: int, mode: str, *, reads: bool = True
    ) -> "ReplayTask | Written":
        """Return the results of the copies at a step (None for failed ones), and end all other
        copies. The copy of a rank does the same in every mode.
        """
        keys = [(msgspec.structs.replace(r, step=-1), mode if r.rank < 0 else "") for r in tasks]
        for key in [key for key in self._copies if key not in keys]:
            self._copies.pop(key).end()
        for key in keys:
            if key not in self._copies:
                name = f"copy-{mode.replace(' ', '-')}-{key[0].rank}-{key[0].draw}"
                self._copies[key] = _Copy(self._folder / name)
        begun, most = time.monotonic(), self._most_copies
        while missing := [key for key in keys if not self._has_result(key, step)]:
            running = sum(copy.runs for copy in self._copies.values())
            for key in missing:
                copy = self._copies[key]
                if copy.process is None and running < most:
                    self._start(key)
                    running += 1
                elif copy.runs and time.monotonic() - max(begun, copy.begun) > _PATIENCE_S:
                    copy.end()
            time.sleep(0.01)
        return {task: self._read(key, step) for task, key in zip(tasks, keys, strict=True)}

    @cached_property
    def _most_copies(self) -> int:
        """Maximum number of concurrent copies, measured when the model, but no copy, is
        on the GPU.
        """
        return devices.count_of_further_processes(self._gpu_bytes)

    def keep_spare(self) -> bool:
        """Return False: copies measure at every step."""
        return False

    release_spare = keep_spare

    def end_spare(self) -> None:
        """Do nothing: there is no spare copy."""

    def read(self, tasks: Sequence[ReplayTask]) -> Written:
        return {}

    def _has_result(self, key: Key, step: int) -> bool:
        copy = self._copies[key]
        return copy.is_over or copy.result(step).exists()

    def _start(self, key: Key) -> None:
        copy, (task, mode) = self._copies[key], key
        place = copy.folder / "folder"
        shutil.copytree(self._folder / "clean", place, symlinks=True)
        asked = msgspec.structs.replace(self._asked, task=task, task_mode=mode, project=str(place))
        file = settings.write(asked, copy.folder)
        words = ProjectCopy(self._project, place).words(sys.orig_argv)
        nothing = subprocess.DEVNULL
        copy.process = subprocess.Popen(
            words, cwd=place / self._here, env={**self._environment, settings.VARIABLE: str(file)},
            stdin=nothing, stdout=nothing, stderr=nothing,
        )  # fmt: skip
        copy.begun = time.monotonic()

    def _read(self, key: Key, step: int) -> dict[str, torch.Tensor] | None:
        copy, task = self._copies[key], msgspec.structs.replace(key[0], step=step)
        self.why.pop(task, None)
        found = tensors.pop_tensors(copy.result(step))
        if found is None:
            raised = running.noted_exceptions(copy.folder)
            code = copy.process.returncode if copy.process is not None else 0
            self.why[task] = raised[0].text if raised else exit_description(code)
        return found

    def leave(self, task: ReplayTask, found: dict[str, torch.Tensor], step: int) -> None:
        """Write the results of a step, in a copy."""
        tensors.write(found, _Copy(self._folder).result(step))


_ON_GPU = "on a GPU the kernel and its rounding depend on the batch shape"
Tensors = dict[str, torch.Tensor]


class ReplayTasks:
    """Plans the copies and combines their results, in the parent. `hands.copy` is the role of this
    process if it is a copy.
    """

    def __init__(
        self, job: JobRecording, hands: BatchInjector, settings: JobSettings, folder: Path,
        fails: Callable[[str], NoReturn],
    ) -> None:  # fmt: skip
        self._job, self._hands, self._fails = job, hands, fails
        self._weights, self._apart = settings.weights, _ON_GPU if settings.in_processes else ""
        self.forks: Processes | Forks = Forks(folder)
        if settings.in_processes:
            taken = max(record.gpu_bytes for record in job.records.values())
            self.forks = Processes(folder, settings, taken)
        self._owns = settings.own_inputs
        own = self._owns and "the reference has the script's own inputs"
        self.merged_batch = MergedBatch(job, hands.batch_source, self._apart or own or "")
        self.choice = ReferenceChoice()
        self.watched = ModulesOfCopies(PERTURBED_RUNS, job.world)
        self.times: float | None = None  # one of the scales of a correct job
        self.draws = 0  # number of perturbations behind the step's spreads
        self.spreads: dict[str, float] = {}
        self._moves: dict[str, float] = {}  # a gradient's relative change by one ULP
        self._found: dict[int, Written] = {}  # by step

    def begin(self, step: int) -> None:
        """Fork the copies of a step, and of later steps that depend on it. At the first step, also
        fork those that decide which batches the script receives.
        """
        first = self._job.steps[0]
        self._job.tensors(0, step)  # read once, for all forked copies
        if step == first:
            tasks = choosing.trial_tasks(self._job, self._hands.batch_source, self._apart)
            if self._apart:  # needed later as well, and slow to start
                several = product(range(self._job.world), range(1, PERTURBED_RUNS + 1))
                tasks += [ReplayTask(rank, first, draw) for rank, draw in several]
            if self._becomes_a_copy(first, tasks):
                return
            said = self.forks.why.get(ReplayTask(0, first), "no error message")
            found = self._found[first]
            self.choice = choosing.choose(
                self._job, self._hands.batch_source, found, said, self._apart, owns=self._owns
            )
            self._hands.mode = self.choice.mode
            if self.choice.failure:
                self._fails(self.choice.failure)
        for one in (step,) if self._apart else (step, *self._later_steps(step)):
            is_whole = one in (first, *self._trained_on_earlier)
            draws = range(PERTURBED_RUNS + 1) if is_whole or self._apart else (0,)
            tasks = self._gradient_tasks(one, draws)
            if one == step:
                count, by_rank = PERTURBED_RUNS if one == first else 0, self.choice.mode == BY_RANK
                tasks += self.merged_batch.tasks(one, count, by_rank=by_rank)
            if self._becomes_a_copy(one, tasks):
                return
        if step != first and self.forks.keep_spare():
            copy = self.forks.run(self._pending_copies(step), step, self.choice.mode, reads=False)
            if not isinstance(copy, ReplayTask):
                os._exit(0)
            self._hands.copy = copy

    @cached_property
    def _trained_on_earlier(self) -> frozenset[int]:
        """Steps that were trained on forward passes before the previous step, as in a GAN that uses
        its generated samples twice. At the start of these steps nothing can be perturbed.
        """
        return frozenset(s for s in self._job.steps if any(r.earlier for r in self._job.at(s)))

    def _later_steps(self, step: int) -> list[int]:
        by_rank = self.choice.mode == BY_RANK
        later = [one for one in self._job.steps if one > step]
        later = [one for one in later if by_rank or one in self._trained_on_earlier]
        return [one for one in later if self._hands.batch_source.begins_at(one) <= step]

    def _gradient_tasks(self, step: int, draws: "range | tuple[int, ...]") -> list[ReplayTask]:
        if self.choice.mode == BY_RANK:  # this process computes the gradients of rank 0
            several = [(rank, draw) for rank in range(self._job.world) for draw in draws]
            tasks = [ReplayTask(rank, step, draw) for rank, draw in several if rank or draw]
        else:
            tasks = [ReplayTask(ALL, step, draw) for draw in draws if draw]
        return tasks

    def _pending_copies(self, step: int) -> list[ReplayTask]:
        """Return the pending copies that measure the tolerance of a step after the first."""
        tasks = [
            *self._gradient_tasks(step, range(1, PERTURBED_RUNS + 1)),
            *self.merged_batch.tasks(step, PERTURBED_RUNS),
        ]
        return [task for task in tasks if task not in self._found.get(step, {})]

    def _becomes_a_copy(self, step: int, tasks: list[ReplayTask]) -> bool:
        """Run the pending copies; return True in each copy."""
        known = self._found.setdefault(step, {})
        waiting = [task for task in tasks if task not in known]
        found = self.forks.run(waiting, step, self.choice.mode) if waiting else {}
        if not isinstance(found, ReplayTask):
            known.update(self.watched.without(found))
            return False
        self._hands.copy = found
        if found.pairs:
            limit_memory()
        return True

    def reference(self, step: int, computed: Tensors, recorded: Tensors) -> tuple[Tensors, Tensors]:
        """Return the reference gradients, and the other results to write for the step. `computed`
        are the gradients of this process, and `recorded` those of the job.
        """
        if self.choice.mode == BY_RANK:
            self._found.setdefault(step, {}).setdefault(ReplayTask(0, step), computed)
            combined = self._combine_gradients(step, 0)
            if combined is None:
                said = next(iter(self.forks.why.values()), "no error message")
                self._fails(f"step {step}: given the inputs of one rank, the script fails: {said}")
            computed = combined
        loss = computed["loss"]
        own = {n: g for n, g in computed.items() if n not in state.NOT_GRADIENTS}
        if self.times is None:
            found = state.factor_of(recorded, own)
            self.times = min(self.choice.scales, key=lambda scale: abs(scale - found))
        raw, loss = own, loss * self.times
        if self.times != 1.0:
            raw = {n: g * self.times for n, g in own.items()}
        self._measure(step, {**raw, "loss": loss})
        out = self.merged_batch.results(self._found.setdefault(step, {}), step)
        if step != self._job.steps[0]:
            if self._exceeds_spread(raw, recorded, out) and self.forks.release_spare():
                self._found[step].update(
                    self.watched.without(self.forks.read(self._pending_copies(step)))
                )
                self._measure(step, {**raw, "loss": loss})
                out = self.merged_batch.results(self._found[step], step)
            self.forks.end_spare()
        return raw, {**out, "loss": loss}

    def _combine_gradients(self, step: int, draw: int) -> Tensors | None:
        """Return the gradients of one draw: those of the joint batch, or the weighted mean over
        ranks.
        """
        found = self._found.get(step, {})
        if self.choice.mode != BY_RANK:
            return found.get(ReplayTask(ALL, step, draw))
        parts = [found.get(ReplayTask(rank, step, draw)) for rank in range(self._job.world)]
        weights, why = choosing.weights(self._job, step, parts, self._weights)
        if why:
            self._fails(f"step {step}: {why}")
        return state.mean(parts, weights)

    def _measure(self, step: int, found: Tensors) -> None:
        """Measure the change of gradients under perturbation, or reuse the first step's."""
        perturbed = [self._combine_gradients(step, draw) for draw in range(1, PERTURBED_RUNS + 1)]
        draws = [one for one in perturbed if one is not None]
        self.draws = len(draws)
        for name, gradient in found.items():
            there = [one[name] * (self.times or 1.0) for one in draws if name in one]
            self.spreads[name] = state.distance_from_farthest(gradient, there, name, self._moves)

    def _exceeds_spread(self, raw: Tensors, recorded: Tensors, out: Tensors) -> bool:
        """Return True if a gradient deviates from the expected one by more than the tolerance that
        follows from the spread measured so far.
        """
        folded = {n.removeprefix("folded/"): g for n, g in out.items() if n[:7] == "folded/"}
        factor = state.factor_of(raw, folded)
        spread = {n: abs(factor) * float(out[f"spread-folded/{n}"]) for n in folded}
        norms = {n: norm_of(g) for n, g in raw.items()}
        total = math.hypot(*norms.values())
        apart = [(raw[n] - g, self.spreads[n], norms[n]) for n, g in recorded.items()]
        apart += [(raw[n] - factor * folded[n], spread[n], 0.0) for n in folded]
        return any(
            not norm_of(one)
            <= tolerance(known, norm, total, world=self._job.world, unit=unit_roundoff(one.dtype))
            for one, known, norm in apart
        )
