"""Expectations for ranks that step locally and average parameters: `--accept local-sgd:PERIOD`.

Local SGD (Stich, arXiv:1805.09767) and post-local SGD (Lin et al., arXiv:1808.07217), in which the
first `warmup` steps average gradients. Between two averages each rank is a single process with a
separate shard: its gradients are those of its shard, bitwise, and parameters and optimizer state
follow from them, bitwise. After an averaging step every rank holds the plain mean of all ranks'
updated parameters,

    p  =  1 / W  sum_r p_r,      |actual - p|  <=  gamma(W + 1) / W sum_r |p_r|  +  (W + 1) tiny

by the same argument as for gradients (`rounding`): W - 1 additions and two roundings for the scale.
With `groups`, the sums are over the ranks of a group, except after every `global` steps; such an
average may also be made within groups first. Of groups of equal size the mean of means is the mean;
it has one more division, so two more roundings.

Optimizer state remains local, or is averaged by the same bound (`state=mean`; BMUF and SlowMo
discuss the choices, arXiv:1910.00643), or is zero or absent (`state=reset`). Then a step count may
also continue.

Two averages are separated by PERIOD steps (some code counts from 0, some from 1). If no `phase` is
given, the first average is at one of the first PERIOD steps: the first step after which the ranks'
parameters agree. If they agree after none of these, the last of these steps is judged as the first
average. After a step that changed no parameter, such as one at a learning rate of 0, ranks agree
without an average; the first step of that phase that changed a parameter decides.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from distcheck.judge.oracles.design import (
    Mistake,
    ParameterDesign,
    Updates,
    UpdatesAt,
    agree_bitwise,
)
from distcheck.judge.oracles.forms import Combination
from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.machine.numerics import as_float64, unit_roundoff
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.training.optimizers import is_group_number

Groups = Sequence[Sequence[int]]


class PeriodicDesign(ParameterDesign):
    """A design that combines parameters every `period` steps, after some `warmup`."""

    @property
    def period(self) -> int:
        return self.accepted.number("period")

    @property
    def begin(self) -> int:
        return int(self.accepted.settings.get("warmup", 0))

    @property
    def all_ranks(self) -> Groups:
        return [range(self.trace.layout.world)]

    def first_agreement(
        self, groups: Groups, period: int, begin: int, indices: Sequence[int] | None = None
    ) -> tuple[int, bool]:
        """Return the phase of the first agreement (the last phase if there is none), and if there
        was one.
        """
        written = self.trace.steps_written()
        telling = sorted(
            next((s for s in range(phase, written, period) if changed(self.trace, s)), phase)
            for phase in range(begin, min(begin + period, written))
        )
        for step in telling:
            if all(agree_bitwise(self.trace, step + 1, ranks, indices) for ranks in groups):
                return step % period, True
        return (begin + period - 1) % period, False

    def warms_up(self, step: int) -> bool:
        return step < self.begin

    def steps_of(self, phase: int) -> str:
        """Return the steps of a phase, for a sentence."""
        steps = range(self.trace.steps_written())
        found = [s for s in steps if s >= self.begin and (s - phase) % self.period == 0]
        return ", ".join(map(str, found[:4])) + ", ..." * (len(found) > 4)


class LocalSGD(PeriodicDesign):
    """Plain means of parameters, and possibly of optimizer state."""

    @cached_property
    def _phase(self) -> tuple[int, bool]:
        if self.accepted.number("phase") >= 0:
            return self.accepted.number("phase"), True
        return self.first_agreement(self._groups, self.period, self.begin)

    @cached_property
    def _groups(self) -> Groups:
        size, world = self.accepted.number("groups"), self.trace.layout.world
        return [range(i, i + size) for i in range(0, world, size)] if size else self.all_ranks

    @cached_property
    def _global_phase(self) -> int:
        """The phase of averages over all ranks, one of the phases of the groups' averages."""
        period, phase = self.accepted.number("global"), self._phase[0]
        steps = range(self.begin, min(self.begin + period, self.trace.steps_written()))
        of_groups = [s for s in steps if (s - phase) % self.period == 0]
        ranks = self.all_ranks[0]
        agreed = [s for s in of_groups if agree_bitwise(self.trace, s + 1, ranks)]
        return (agreed or of_groups[-1:] or [phase])[0] % period

    def _averaging(self, step: int) -> Groups:
        """Return the groups that average after a step."""
        if step < self.begin or (step - self._phase[0]) % self.period:
            return []
        over_all = self.accepted.number("global")
        if over_all and (step - self._global_phase) % over_all == 0:
            return self.all_ranks
        return self._groups

    def combines(self, step: int, kind: Kind, index: int) -> bool:
        if kind is Kind.PARAMETER or self.accepted["state"] == "local":
            return kind is Kind.PARAMETER and bool(self._averaging(step))
        spec = self.trace.layout.model.optimizer[index]
        if is_group_number(spec.name) or not self._averaging(step):
            return False
        held = self.trace.tensor(0, kind, step + 1, index)
        if self.accepted["state"] == "mean":
            return held is not None and held.is_floating_point()
        return held is None or held.dim() > 0 or not bool(held)

    def combined(
        self, step: int, kind: Kind, index: int, updates: Updates
    ) -> Sequence[Combination | None]:
        found: list[Combination | None] = [None] * len(updates)
        for group in self._averaging(step):
            own = [tensor for rank in group if (tensor := updates[rank][kind][index]) is not None]
            if not own:
                continue
            if kind is Kind.OPTIMIZER and self.accepted["state"] == "reset":
                absent = self.trace.entry(group[0], kind, step + 1, index).state
                zero = torch.zeros_like(own[0], dtype=torch.float64)
                one = None if absent is EntryState.ABSENT else Combination(Interval(zero, zero))
            else:
                even = (1.0 / len(own),) * len(own)
                twice = bool(self.accepted.number("groups"))
                found_mean = interval(own, even, rescaled=twice)
                one = Combination(found_mean, tuple(own), even)
            for rank in group:
                found[rank] = one
        return found

    def wrong_combinations(self, step: int, updates: Updates) -> Iterator[Mistake]:
        yield from mean_before_step(self, step, updates)

    @classmethod
    def candidates(cls, references: Any, updates_at: UpdatesAt) -> Iterator[str]:
        """Yield periods after which all ranks agreed, possibly after a warm-up with agreement."""
        trace, world = references.trace, references.trace.layout.world
        written = trace.steps_written()
        agreed = [s for s in range(written) if agree_bitwise(trace, s + 1, range(world))]
        warm = next((s for s in range(written) if s not in agreed), written)
        for warmup in dict.fromkeys([0, *range(warm, 0, -1)]):
            later = [s for s in agreed if s >= warmup]
            if not later:
                continue
            period = later[1] - later[0] if len(later) > 1 else later[0] - warmup + 1
            if later == list(range(later[0], written, period)):
                text = f"local-sgd:{period}" + f":warmup={warmup}" * bool(warmup)
                yield from (f"{text}{state}" for state in ("", ":state=mean", ":state=reset"))
        for size in (s for s in range(2, world) if world % s == 0):
            yield f"local-sgd:1:groups={size}"

    def agreeing(self, step: int, index: int) -> Groups:
        return self.all_ranks if self.warms_up(step) else self._averaging(step)

    def remark(self) -> str:
        phase, seen = self._phase
        if not seen:
            return (
                f"parameters of all ranks agree after none of the first {self.period} steps"
                f"{' after the warm-up' * bool(self.begin)}, although one of them must end with "
                "their average"
            )
        return f"parameters are averaged after steps {self.steps_of(phase)}"


def mean_before_step(design: ParameterDesign, step: int, updates: Updates) -> Iterator[Mistake]:
    """Yield the mistake of combining the parameters before the step, and not after it."""

    def expected(kind: Kind, index: int) -> Sequence[Combination | None]:
        before = [design.trace.tensor(rank, kind, step, index) for rank in range(len(updates))]
        held = [{kind: {index: tensor}} for tensor in before]
        found = []
        mixed = design.combined(step, kind, index, held)  # type: ignore[arg-type]
        for was, own, one in zip(before, updates, mixed, strict=True):
            after = own[kind][index]
            if one is None or was is None or after is None:
                return [None] * len(updates)
            moved = as_float64(after) - as_float64(was)
            size = one.found.mean.abs() + 2 * as_float64(was).abs() + moved.abs()
            bound = one.found.bound + 4 * unit_roundoff(after.dtype) * size
            found.append(Combination(Interval(one.found.mean + moved, bound)))
        return found

    yield (
        "parameters were combined before the optimizer's step, so that ranks differ by their last "
        "update",
        expected,
    )


def mean_over_ranks(parameters: Sequence[torch.Tensor]) -> Interval:
    """Return the plain mean of one parameter over the ranks, and its rounding bound."""
    return interval(parameters, [1.0 / len(parameters)] * len(parameters))


def changed(trace: TraceReader, step: int) -> bool:
    """Return True if the step changed a parameter of any rank."""
    return any(
        trace.entry(rank, Kind.PARAMETER, step, index).digest
        != trace.entry(rank, Kind.PARAMETER, step + 1, index).digest
        for rank in range(trace.layout.world)
        for index in range(len(trace.layout.model.parameters))
    )
