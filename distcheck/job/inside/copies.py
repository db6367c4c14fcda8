"""The copies of a replay, step by step: those that compute a rank's gradients, those that measure
by how much gradients move, and those that make several passes as one.
"""

import os
from collections.abc import Callable
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NoReturn

import torch

from distcheck.job.inside import choosing, state
from distcheck.job.inside.feeding import ALL
from distcheck.job.inside.folding import Folding, limit_memory
from distcheck.job.inside.forks import Forks, Written
from distcheck.job.inside.handing_out import HandingOut
from distcheck.job.inside.processes import Processes
from distcheck.job.inside.watching import WatchedCopies
from distcheck.job.settings import BY_RANK, JobSettings, Role
from distcheck.recordings.jobs.reading import JobRecording

DRAWS = 2
_ON_GPU = "on a GPU a kernel, and its rounding, depends on the shape of a batch"
SPREADS = 8  # times what a draw has moved: as in `checks/reference`
Tensors = dict[str, torch.Tensor]


class Copies:
    """In the parent, what they have computed; `hands.copy` says in which copy this is."""

    def __init__(
        self, job: JobRecording, hands: HandingOut, settings: JobSettings, folder: Path,
        fails: Callable[[str], NoReturn],
    ) -> None:  # fmt: skip
        self._job, self._hands, self._fails = job, hands, fails
        self._weights, self._apart = settings.weights, _ON_GPU if settings.in_processes else ""
        self.forks: Processes | Forks = Forks(folder)
        if settings.in_processes:
            taken = max(record.gpu_bytes for record in job.records.values())
            self.forks = Processes(folder, settings, taken)
        self.folding = Folding(job, hands.feeding, self._apart)
        self.choice = choosing.Choice()
        self.watched = WatchedCopies(DRAWS, job.world)
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
            roles = choosing.tries(self._job, self._hands.feeding, self._apart)
            if self._apart:  # these will be needed as well, and each takes long to begin
                several = product(range(self._job.world), range(1, DRAWS + 1))
                roles += [Role(rank, first, draw) for rank, draw in several]
            if self._becomes_a_copy(first, roles):
                return
            said = self.forks.why.get(Role(0, first), "nothing was said")
            found = self._found[first]
            self.choice = choosing.choose(self._job, self._hands.feeding, found, said, self._apart)
            self._hands.mode = self.choice.mode
            if self.choice.failure:
                self._fails(self.choice.failure)
        for one in (step,) if self._apart else (step, *self._ahead(step)):
            is_whole = one in (first, *self._trained_on_earlier)
            draws = range(DRAWS + 1) if is_whole or self._apart else (0,)
            roles = self._roles(one, draws)
            roles += self.folding.roles(one, DRAWS if one == first else 0) if one == step else []
            if self._becomes_a_copy(one, roles):
                return
        if step != first and self.forks.keep_spare():
            copy = self.forks.run(self._moved(step), step, self.choice.mode, reads=False)
            if not isinstance(copy, Role):
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
        return [one for one in later if self._hands.feeding.begins_at(one) <= step]

    def _roles(self, step: int, draws: "range | tuple[int, ...]") -> list[Role]:
        """The copies that compute the gradients of a step, and are not done."""
        if self.choice.mode == BY_RANK:  # this process computes the gradients of rank 0
            several = [(rank, draw) for rank in range(self._job.world) for draw in draws]
            roles = [Role(rank, step, draw) for rank, draw in several if rank or draw]
        else:
            roles = [Role(ALL, step, draw) for draw in draws if draw]
        return roles

    def _moved(self, step: int) -> list[Role]:
        """The copies that measure the tolerance of a step after the first one."""
        roles = [*self._roles(step, range(1, DRAWS + 1)), *self.folding.roles(step, DRAWS)]
        return [role for role in roles if role not in self._found.get(step, {})]

    def _becomes_a_copy(self, step: int, roles: list[Role]) -> bool:
        """Runs copies that were not run; in each of them, True."""
        known = self._found.setdefault(step, {})
        waiting = [role for role in roles if role not in known]
        found = self.forks.run(waiting, step, self.choice.mode) if waiting else {}
        if not isinstance(found, Role):
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
            self._found.setdefault(step, {}).setdefault(Role(0, step), computed)
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
        out = self.folding.results(self._found.setdefault(step, {}), step)
        if step != self._job.steps[0]:
            if self._says_too_little(raw, recorded, out) and self.forks.release_spare():
                self._found[step].update(self.watched.without(self.forks.read(self._moved(step))))
                self._measure(step, {**raw, "loss": loss})
                out = self.folding.results(self._found[step], step)
            self.forks.end_spare()
        return raw, {**out, "loss": loss}

    def _combined(self, step: int, draw: int) -> Tensors | None:
        """The gradients of the copies of one draw: of all ranks together, or their mean."""
        found = self._found.get(step, {})
        if self.choice.mode != BY_RANK:
            return found.get(Role(ALL, step, draw))
        parts = [found.get(Role(rank, step, draw)) for rank in range(self._job.world)]
        weights, why = choosing.weights(self._job, step, parts, self._weights)
        if why:
            self._fails(f"step {step}: {why}")
        return state.mean(parts, weights)

    def _measure(self, step: int, found: Tensors) -> None:
        """How far gradients move with one ULP: measured here, or as far as at the first step."""
        moved = [self._combined(step, draw) for draw in range(1, DRAWS + 1)]
        draws = [one for one in moved if one is not None]
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
            not float(one.double().norm()) <= SPREADS * known for one, known in apart.values()
        )
