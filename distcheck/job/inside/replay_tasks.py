"""The copies of a replay, step by step: those that compute a rank's gradients, those that measure
by how much gradients move, and those that make several passes as one.

Where the script uses a GPU, which a fork loses, copies are processes of their own. Each runs the
script from its beginning, in a copy of the folder, and is what it is at every step. Every step
starts from the recorded state, so a copy waits for no other: it writes what it has computed at a
step, takes the step that was recorded, and goes on. What a GPU computes differently from run to
run, and kernels that are chosen by measuring, are then in what copies differ by.
"""

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
from distcheck.job.copying import Copy
from distcheck.job.inside import choosing, state, tensors
from distcheck.job.inside.batch_injection import BatchInjector
from distcheck.job.inside.batch_source import ALL
from distcheck.job.inside.forks import Forks, Written, how_ended
from distcheck.job.inside.marking import MARK
from distcheck.job.inside.merged_batch import MergedBatch, limit_memory
from distcheck.job.inside.watching import WatchedCopies
from distcheck.job.settings import BY_RANK, JobSettings, ReplayTask
from distcheck.machine import devices
from distcheck.recordings.jobs.reading import JobRecording

_PATIENCE_S = 300.0  # for a copy's next step: it may have to start Python, and measure kernels

Key = tuple[ReplayTask, str]


@dataclass
class _Copy:
    """A process, or one that is still to be started; its folder has its settings and results."""

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
    """Starts copies, as many at once as there is room for where each takes `gpu_bytes` of a GPU's
    memory, as a rank of the job did; and reads what they write.
    """

    def __init__(self, folder: Path, asked: JobSettings, gpu_bytes: int) -> None:
        self._folder, self._asked, self._gpu_bytes = folder, asked, gpu_bytes
        self._project = Path(asked.project)
        # Each is watched as the rank that it is.
        self._environment = {k: v for k, v in os.environ.items() if k != MARK}
        self._here = Path.cwd().relative_to(self._project)
        self._copies: dict[Key, _Copy] = {}
        self.why: dict[ReplayTask, str] = {}  # of copies that failed
        if asked.task is None:  # before the script writes anything
            shutil.copytree(self._project, folder / "clean", symlinks=True)

    def run(
        self, tasks: Sequence[ReplayTask], step: int, mode: str, *, reads: bool = True
    ) -> "ReplayTask | Written":
        """What each copy wrote of a step, None of one that failed. Others are ended. What a rank's
        own copy does, it does in every mode.
        """
        keys = [(msgspec.structs.replace(r, step=-1), mode if r.rank < 0 else "") for r in tasks]
        for key in [key for key in self._copies if key not in keys]:
            self._copies.pop(key).end()
        for key in keys:
            if key not in self._copies:
                name = f"copy-{mode.replace(' ', '-')}-{key[0].rank}-{key[0].draw}"
                self._copies[key] = _Copy(self._folder / name)
        begun, most = time.monotonic(), self._most
        while missing := [key for key in keys if not self._has(key, step)]:
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
    def _most(self) -> int:
        """How many at once: asked when the model is on the GPU, and no copy is there."""
        return devices.copies_beside(self._gpu_bytes)

    def keep_spare(self) -> bool:
        """Copies measure at every step."""
        return False

    release_spare = keep_spare

    def end_spare(self) -> None:
        """There is none."""

    def read(self, tasks: Sequence[ReplayTask]) -> Written:
        return {}

    def _has(self, key: Key, step: int) -> bool:
        copy = self._copies[key]
        return copy.is_over or copy.result(step).exists()

    def _start(self, key: Key) -> None:
        copy, (task, mode) = self._copies[key], key
        place = copy.folder / "folder"
        shutil.copytree(self._folder / "clean", place, symlinks=True)
        asked = msgspec.structs.replace(self._asked, task=task, task_mode=mode, project=str(place))
        file = settings.write(asked, copy.folder)
        words = Copy(self._project, place).words(sys.orig_argv)
        nothing = subprocess.DEVNULL
        copy.process = subprocess.Popen(
            words, cwd=place / self._here, env={**self._environment, settings.VARIABLE: str(file)},
            stdin=nothing, stdout=nothing, stderr=nothing,
        )  # fmt: skip
        copy.begun = time.monotonic()

    def _read(self, key: Key, step: int) -> dict[str, torch.Tensor] | None:
        copy, task = self._copies[key], msgspec.structs.replace(key[0], step=step)
        self.why.pop(task, None)
        found = tensors.taken_from(copy.result(step))
        if found is None:
            raised = running.raised_in(copy.folder)
            code = copy.process.returncode if copy.process is not None else 0
            self.why[task] = raised[0][1] if raised else how_ended(code)
        return found

    def leave(self, task: ReplayTask, found: dict[str, torch.Tensor], step: int) -> None:
        """In a copy: writes what it has computed at a step."""
        tensors.write(found, _Copy(self._folder).result(step))


PERTURBED_RUNS = 2
_ON_GPU = "on a GPU a kernel, and its rounding, depends on the shape of a batch"
NOISE_FACTOR = 8  # times what a draw has moved: as in `checks/reference`
Tensors = dict[str, torch.Tensor]


class ReplayTasks:
    """In the parent, what they have computed; `hands.copy` says in which copy this is."""

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
        self.merged_batch = MergedBatch(job, hands.batch_source, self._apart)
        self.choice = choosing.ReferenceChoice()
        self.watched = WatchedCopies(PERTURBED_RUNS, job.world)
        self.times: float | None = None  # one of the scales that a right job may have
        self.draws = 0  # by which the step's spreads are measured
        self.spreads: dict[str, float] = {}
        self._moves: dict[str, float] = {}  # a gradient's, by one ULP of parameters, over its norm
        self._found: dict[int, Written] = {}  # by step

    def begin(self, step: int) -> None:
        """Forks the copies of a step, and of later ones for which it does something; at the first
        step, those by which it is chosen which batches the script takes.
        """
        first = self._job.steps[0]
        self._job.tensors(0, step)  # read once, for all copies that are forked
        if step == first:
            tasks = choosing.tries(self._job, self._hands.batch_source, self._apart)
            if self._apart:  # these will be needed as well, and each takes long to begin
                several = product(range(self._job.world), range(1, PERTURBED_RUNS + 1))
                tasks += [ReplayTask(rank, first, draw) for rank, draw in several]
            if self._becomes_a_copy(first, tasks):
                return
            said = self.forks.why.get(ReplayTask(0, first), "nothing was said")
            found = self._found[first]
            self.choice = choosing.choose(
                self._job, self._hands.batch_source, found, said, self._apart
            )
            self._hands.mode = self.choice.mode
            if self.choice.failure:
                self._fails(self.choice.failure)
        for one in (step,) if self._apart else (step, *self._ahead(step)):
            is_whole = one in (first, *self._trained_on_earlier)
            draws = range(PERTURBED_RUNS + 1) if is_whole or self._apart else (0,)
            tasks = self._roles(one, draws)
            tasks += (
                self.merged_batch.tasks(one, PERTURBED_RUNS if one == first else 0)
                if one == step
                else []
            )
            if self._becomes_a_copy(one, tasks):
                return
        if step != first and self.forks.keep_spare():
            copy = self.forks.run(self._moved(step), step, self.choice.mode, reads=False)
            if not isinstance(copy, ReplayTask):
                os._exit(0)
            self._hands.copy = copy

    @cached_property
    def _trained_on_earlier(self) -> frozenset[int]:
        """The steps that are trained on forward passes before the last step, as where a GAN uses
        its fakes twice. Nothing can be perturbed when they begin.
        """
        return frozenset(s for s in self._job.steps if any(r.earlier for r in self._job.at(s)))

    def _ahead(self, step: int) -> list[int]:
        """The later steps for which something is done in this one."""
        by_rank = self.choice.mode == BY_RANK
        later = [one for one in self._job.steps if one > step]
        later = [one for one in later if by_rank or one in self._trained_on_earlier]
        return [one for one in later if self._hands.batch_source.begins_at(one) <= step]

    def _roles(self, step: int, draws: "range | tuple[int, ...]") -> list[ReplayTask]:
        """The copies that compute the gradients of a step, and are not done."""
        if self.choice.mode == BY_RANK:  # this process computes the gradients of rank 0
            several = [(rank, draw) for rank in range(self._job.world) for draw in draws]
            tasks = [ReplayTask(rank, step, draw) for rank, draw in several if rank or draw]
        else:
            tasks = [ReplayTask(ALL, step, draw) for draw in draws if draw]
        return tasks

    def _moved(self, step: int) -> list[ReplayTask]:
        """The copies that measure the tolerance of a step after the first one."""
        tasks = [
            *self._roles(step, range(1, PERTURBED_RUNS + 1)),
            *self.merged_batch.tasks(step, PERTURBED_RUNS),
        ]
        return [task for task in tasks if task not in self._found.get(step, {})]

    def _becomes_a_copy(self, step: int, tasks: list[ReplayTask]) -> bool:
        """Runs copies that were not run; in each of them, True."""
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
        """The reference's gradients, where this process has `computed` its own; and what else of
        the step is to be written. `recorded` are the job's.
        """
        if self.choice.mode == BY_RANK:
            self._found.setdefault(step, {}).setdefault(ReplayTask(0, step), computed)
            combined = self._combined(step, 0)
            if combined is None:
                said = next(iter(self.forks.why.values()), "nothing was said")
                self._fails(f"step {step}: as one rank the script fails: {said}")
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
            if self._says_too_little(raw, recorded, out) and self.forks.release_spare():
                self._found[step].update(self.watched.without(self.forks.read(self._moved(step))))
                self._measure(step, {**raw, "loss": loss})
                out = self.merged_batch.results(self._found[step], step)
            self.forks.end_spare()
        return raw, {**out, "loss": loss}

    def _combined(self, step: int, draw: int) -> Tensors | None:
        """The gradients of the copies of one draw: of all ranks together, or their mean."""
        found = self._found.get(step, {})
        if self.choice.mode != BY_RANK:
            return found.get(ReplayTask(ALL, step, draw))
        parts = [found.get(ReplayTask(rank, step, draw)) for rank in range(self._job.world)]
        weights, why = choosing.weights(self._job, step, parts, self._weights)
        if why:
            self._fails(f"step {step}: {why}")
        return state.mean(parts, weights)

    def _measure(self, step: int, found: Tensors) -> None:
        """How far gradients move with one ULP: measured here, or as far as at the first step."""
        perturbed = [self._combined(step, draw) for draw in range(1, PERTURBED_RUNS + 1)]
        draws = [one for one in perturbed if one is not None]
        self.draws = len(draws)
        for name, gradient in found.items():
            there = [one[name] * (self.times or 1.0) for one in draws if name in one]
            self.spreads[name] = state.spread_of(gradient, there, name, self._moves)

    def _says_too_little(self, raw: Tensors, recorded: Tensors, out: Tensors) -> bool:
        """Whether some gradient is further from what is expected than what is known allows."""
        folded = {n.removeprefix("folded/"): g for n, g in out.items() if n[:7] == "folded/"}
        factor = state.factor_of(raw, folded)
        spread = {n: abs(factor) * float(out[f"spread-folded/{n}"]) for n in folded}
        apart = {n: (raw[n] - g, self.spreads[n]) for n, g in recorded.items()}
        apart |= {f"folded {n}": (raw[n] - factor * folded[n], spread[n]) for n in folded}
        return any(
            not float(one.double().norm()) <= NOISE_FACTOR * known for one, known in apart.values()
        )
