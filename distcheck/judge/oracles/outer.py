"""Expectations for inner steps and an outer optimizer: `--accept diloco:PERIOD`.

DiLoCo (Douillard et al., arXiv:2311.08105): each rank takes PERIOD steps of its inner optimizer
from common parameters x, bitwise those of its own shard. Then the outer gradient is the mean of the
ranks' movements,

    d_k  =  1 / W  sum_r (x_k - u_r),      x_(k+1)  =  outer step from x_k by d_k

with u_r the updated parameters of rank r, and x_k the parameters that all ranks recorded after the
previous outer step (at first, the initial ones). The outer optimizer is torch's SGD:

    m_k = momentum m_(k-1) + d_k,   m_0 = d_0
    x_(k+1) = x_k - lr (d_k + momentum m_k)      with Nesterov momentum
    x_(k+1) = x_k - lr m_k                       otherwise

Every d_k is computed from the recording, so m_k is a sum of known terms, and errors do not grow
from one outer step to the next. The ranks may average x_k - u_r, or u_r. A term of d_k has at most
W + 2 roundings either way: one subtraction, and W + 1 of the mean. A recorded term gets two more in
each later update of the momentum (product and sum), and four in the outer step (momentum, sum,
rate, difference). With n = W + 2 + 2 k + 4 and the factors c_j of d_j in x_(k+1)

    |actual - x_(k+1)|  <=  gamma(n) (|x_k| + sum_j |c_j| s_j) + n tiny,
    s_j = 1 / W  sum_r (|x_j| + |u_(j,r)|)

With `fragments` (Streaming DiLoCo, arXiv:2501.18512) groups of parameters take turns: each tensor
has its own phase, and there are as many phases as fragments; otherwise there is no verdict. The
inner optimizer's state remains local.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from distcheck.judge.oracles.averaging import Groups, PeriodicDesign, mean_before_step
from distcheck.judge.oracles.design import Mistake, Updates, UpdatesAt, agree_bitwise
from distcheck.judge.oracles.forms import Combination
from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import NotBoundedError, as_float64, gamma, smallest, unit_roundoff
from distcheck.recordings.recording import Kind


class DiLoCo(PeriodicDesign):
    """Inner steps on each rank, and an outer step by the mean of their movements."""

    @cached_property
    def _phases(self) -> list[tuple[int, bool]]:
        """The phase of each parameter, and if the ranks agreed on it."""
        count, phase = len(self.trace.layout.model.parameters), self.accepted.number("phase")
        if phase >= 0:
            return [(phase, True)] * count
        if self.accepted.number("fragments") == 1:
            return [self.first_agreement(self.all_ranks, self.period, 0)] * count
        return [
            self.first_agreement(self.all_ranks, self.period, 0, [index]) for index in range(count)
        ]

    @property
    def _phase_count(self) -> int:
        return len({phase for phase, _ in self._phases})

    def _outer_steps(self, index: int, until: int) -> range:
        """Return the steps up to `until` after which a tensor has an outer step."""
        return range(self._phases[index][0], until + 1, self.period)

    def combines(self, step: int, kind: Kind, index: int) -> bool:
        return kind is Kind.PARAMETER and step in self._outer_steps(index, step)

    def _moved(self, step: int, index: int, updates: Updates) -> tuple[Any, list[torch.Tensor]]:
        """Return the parameter before the inner steps up to `step`, and the ranks' updates."""
        start = max(0, step + 1 - self.period)  # the previous outer step, or the initial state
        before = self.trace.tensor(0, Kind.PARAMETER, start, index)
        return before, [own[Kind.PARAMETER][index] for own in updates]  # type: ignore[misc]

    def factors(self, count: int) -> list[float]:
        """Return the factor of each outer gradient up to number `count` in the outer step."""
        rate, momentum = float(self.accepted["lr"]), float(self.accepted["momentum"])
        of_momentum = [momentum ** (count - j) for j in range(count + 1)]
        if self.accepted["nesterov"] == "no":
            return [rate * factor for factor in of_momentum]
        return [rate * (momentum * factor + (j == count)) for j, factor in enumerate(of_momentum)]

    def combined(
        self, step: int, kind: Kind, index: int, updates: Updates
    ) -> Sequence[Combination | None]:
        world, steps = len(updates), self._outer_steps(index, step)
        if self._phase_count != self.accepted.number("fragments"):
            raise NotBoundedError(self.remark())
        factors = self.factors(len(steps) - 1)
        mean = size = None
        moved: list[torch.Tensor] = []
        for outer, factor in zip(steps, factors, strict=True):
            now = updates if outer == step else self._updates_at(outer)
            before, own = self._moved(outer, index, now)
            if before is None or any(one is None for one in own):
                return [None] * world
            start = as_float64(before)
            moved = [start - as_float64(one) for one in own]
            d = torch.stack(moved).mean(0)
            terms = torch.stack([as_float64(one).abs() for one in own]).mean(0) + start.abs()
            mean = factor * d if mean is None else mean + factor * d
            size = abs(factor) * terms if size is None else size + abs(factor) * terms
        assert mean is not None
        assert size is not None
        dtype = updates[0][kind][index].dtype  # type: ignore[union-attr]
        roundings = world + 6 + 2 * len(steps)
        bound = gamma(roundings, unit_roundoff(dtype)) * (size + start.abs())
        found = Interval(start - mean, bound + roundings * smallest(dtype))
        weights = (factors[-1] / world,) * world
        return [Combination(found, tuple(moved), weights)] * world

    def _updates_at(self, step: int) -> Updates:
        """Return the ranks' updates at an earlier step, which all later outer steps need."""
        if step not in self._earlier:
            run = self.references.update.run
            self._earlier[step] = [
                {Kind.PARAMETER: run(rank, step)[Kind.PARAMETER]}
                for rank in range(self.trace.layout.world)
            ]
        return self._earlier[step]

    @cached_property
    def _earlier(self) -> dict[int, Updates]:
        return {}

    def agreeing(self, step: int, index: int) -> Groups:
        return self.all_ranks if self.combines(step, Kind.PARAMETER, index) else []

    def remark(self) -> str:
        phases = {phase for phase, _ in self._phases}
        if not all(seen for _, seen in self._phases):
            return (
                f"parameters of all ranks agree after none of the first {self.period} steps, "
                "although one of them must end with an outer step"
            )
        wanted = self.accepted.number("fragments")
        if len(phases) == wanted:
            after = "; ".join(self.steps_of(phase) for phase in sorted(phases))
            return f"outer steps come after steps {after}"
        return f"outer steps have {len(phases)} phases, but {wanted} fragments are accepted"

    def wrong_combinations(self, step: int, updates: Updates) -> Iterator[Mistake]:
        for name, values in self._other_settings():
            other = DiLoCo(self.references, self.accepted.having(**values))
            other._phases = self._phases
            yield f"the outer step has {name}", partial(other.combined, step, updates=updates)
        alone = [
            partial(self._of_one_rank, rank, step, updates=updates) for rank in range(len(updates))
        ]
        yield (
            "each rank's outer optimizer steps by its own movement, not by the mean of all",
            lambda kind, index: [own(kind, index) for own in alone],
        )
        yield from mean_before_step(self, step, updates)

    def _of_one_rank(
        self, rank: int, step: int, kind: Kind, index: int, updates: Updates
    ) -> Combination | None:
        """Return the result of a rank whose outer optimizer sees no other rank, at first."""
        return self.combined(step, kind, index, [updates[rank]])[0]

    def _other_settings(self) -> Iterator[tuple[str, dict[str, Any]]]:
        rate = float(self.accepted["lr"])
        if self.accepted["momentum"]:
            yield "no momentum", {"momentum": 0.0, "nesterov": "no"}
        other = "no" if self.accepted["nesterov"] == "yes" else "yes"
        yield (
            "plain instead of Nesterov momentum" if other == "no" else "Nesterov momentum",
            {"nesterov": other},
        )
        yield "a learning rate of 1", {"lr": 1.0}
        world = self.trace.layout.world
        yield "the sum instead of the mean of the ranks' movements", {"lr": rate * world}
        yield "the mean of the movements divided once more by the world size", {"lr": rate / world}

    @classmethod
    def candidates(cls, references: Any, updates_at: UpdatesAt) -> Iterator[str]:
        """Yield the period of agreement, with the outer settings that explain the first steps."""
        trace = references.trace
        steps = range(trace.steps_written())
        agreed = [s for s in steps if agree_bitwise(trace, s + 1, range(trace.layout.world))]
        if not agreed or agreed != list(range(agreed[0], len(steps), agreed[0] + 1)):
            return
        period = agreed[0] + 1
        for lr, momentum, nesterov in _outer_settings(trace, agreed, updates_at):
            yield f"diloco:{period}:lr={lr:g}:momentum={momentum:g}:nesterov={nesterov}"


def _outer_settings(
    trace: Any, agreed: Sequence[int], updates_at: UpdatesAt
) -> Iterator[tuple[float, float, str]]:
    """Yield rates and momenta by least squares: the first outer step is a0 d_0, the second a d_1 +
    b d_0. With Nesterov momentum a0 = a = lr (1 + mu) and b = lr mu^2; otherwise a = lr, b = lr mu.
    """
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in agreed[:2]:
        start = 0 if not rows else agreed[0] + 1
        moved, outer = [], []
        for index in range(len(trace.layout.model.parameters)):
            before = trace.tensor(0, Kind.PARAMETER, start, index)
            after = trace.tensor(0, Kind.PARAMETER, step + 1, index)
            found = [one[Kind.PARAMETER][index] for one in updates_at(step)]
            own = [one for one in found if one is not None]
            if before is None or after is None or len(own) < len(found):
                return
            start_64 = as_float64(before)
            moved.append((start_64 - torch.stack([as_float64(o) for o in own]).mean(0)).flatten())
            outer.append((start_64 - as_float64(after)).flatten())
        rows.append((torch.cat(moved), torch.cat(outer)))
    (d0, o0), last = rows[0], rows[-1]
    if not bool(d0.any()):
        return
    first = float(d0 @ o0 / (d0 @ d0))
    if len(rows) == 1:
        yield round(first, 6), 0.0, "no"
        return
    solved = torch.linalg.lstsq(torch.stack([last[0], d0], 1), last[1].unsqueeze(1)).solution
    a, b = (float(value) for value in solved.flatten())
    yield round(a, 4), round(b / a, 4) if a else 0.0, "no"
    ratio = b / a if a else 0.0  # mu^2 / (1 + mu)
    momentum = (ratio + (ratio * ratio + 4 * ratio) ** 0.5) / 2 if ratio >= 0 else 0.0
    yield round(a / (1 + momentum), 4), round(momentum, 4), "yes"
