"""The designs `--accept sparse` and `--accept error-feedback`: each rank compresses its gradient
plus the part that it has not sent before (`compression.py`).

The memories of all ranks are derived from the recorded gradients, step by step. If no compressor is
named, the one that made the results of the first step is expected at all others; if none did, the
verdict is `unknown`.

error-feedback:quantized=BITS sends integers (`quantum.py`). The mean of the ranks' memories is then
enough, as for low-rank compression: M = g(t) + sum over s < t of (g(s) - y(s)), and y must be M
within half a quantum. A rank's elements are at most its largest gradient plus its largest memory,
which is half a quantum of the step before, so h_r(t) is computed from max |g_r(t)| + h_r(t - 1).
Errors of different steps cancel in the sum of results, instead of adding up as without memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from distcheck.judge.acceptance import AcceptedDeviation
from distcheck.judge.oracles import low_rank, quantum
from distcheck.judge.oracles.compression import (
    Compressor,
    SumOfParts,
    check_counts,
    find_compressor,
)
from distcheck.judge.oracles.design import Design
from distcheck.judge.oracles.forms import GradientForms, Limit, WithinBound
from distcheck.judge.oracles.projections import CompressedForms, earlier_results
from distcheck.judge.oracles.references import AtStep, References
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.rounding_bound import mean_of_step
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import NotBoundedError, smallest, unit_roundoff
from distcheck.recordings.recording import Kind

_MOST_RANKS = 8  # 2^W subsets of ranks are tried for an element
Memory = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MeanWithMemory(GradientForms):
    """The mean of gradients and memories, within the error of a quantizer."""

    intervals: tuple[Interval | None, ...]

    def of(self, index: int) -> WithinBound | None:
        found = self.intervals[index]
        return None if found is None else WithinBound(found.mean, found.bound)

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        found = self.intervals[index]
        assert found is not None, "each rank has a gradient"
        return lambda stride: found.bound.reshape(-1)[::stride]


class ErrorFeedback(Design):
    """A compressor that each rank applies to its gradient plus memory."""

    def __init__(self, references: References, accepted: AcceptedDeviation) -> None:
        super().__init__(references, accepted)
        self._halves: dict[int, list[float]] = {}
        self._last: tuple[int, int, list[Memory]] = (0, 0, [])
        self._known: Compressor | None = None

    def gradients(self, at: AtStep) -> GradientForms:
        return self._expect(at, 1.0)

    def gradient_mistakes(self, at: AtStep) -> Iterator[tuple[str, GradientForms]]:
        """Yield mistakes with the memory: it is not added, scaled, or was reset."""
        if not at.step or self.accepted.settings.get("dropped"):
            return
        world = at.trace.layout.world
        yield "without the memory of earlier steps", self._expect(at, 0.0)
        for factor in (2.0, 0.5, -1.0, float(world), 1.0 / world):
            yield f"with {factor:g} times the memory of earlier steps", self._expect(at, factor)
        for start in range(1, at.step):
            words = f"with the memory of step {start} and later, but not of earlier steps"
            yield words, self._expect(at, 1.0, start=start)

    def _expect(self, at: AtStep, factor: float, *, start: int = 0) -> GradientForms:
        """Return the gradients with `factor` times the memory since a step."""
        bits = int(self.accepted.settings.get("quantized", 0))
        if bits:
            return self._quantized(at, bits, factor, start)
        return self._compressed(at, factor, start)

    # -- compressors whose parts are found

    def _compressed(self, at: AtStep, factor: float, start: int) -> CompressedForms:
        if at.trace.layout.world > _MOST_RANKS:
            raise NotBoundedError(
                f"the part that each rank sent is found for at most {_MOST_RANKS} ranks"
            )
        memories = [(factor * m, abs(factor) * e) for m, e in self._memories(at.step, start)]
        forms = self.inputs(at, memories)
        if self.compressor(at).whole and self.compressor(at).amount:
            broken = check_counts(forms, self.results(at))
            forms = [replace(form, broken=broken) for form in forms]
        mean = mean_of_step(at)
        return CompressedForms(
            at.shares, mean.computed, mean=mean, inputs=tuple(forms), opening=at.shares.lost
        )

    def _memories(self, step: int, start: int) -> list[Memory]:
        """Return the memories with which a step starts, if they were empty before `start`."""
        begun, number, memories = self._last
        if begun != start or number > step:
            number, memories = start, []
        for earlier in range(number, step):
            before = self.references.at(earlier)
            forms = self.inputs(before, memories)
            memories = [form.memory(y) for form, y in zip(forms, self.results(before), strict=True)]
        if not start:
            self._last = start, step, memories
        return memories

    def inputs(self, at: AtStep, memories: Sequence[Memory]) -> list[SumOfParts]:
        """Return the input of every tensor's compression, given memories, if any."""
        kept = () if self.accepted.settings.get("dropped") else memories
        unit, tiny = unit_roundoff(at.ingredients.dtype), smallest(at.ingredients.dtype)
        shapes = [spec.shape for spec in at.specs]
        return self.compressor(at).inputs(contributions(at), kept, shapes, unit=unit, tiny=tiny)

    def compressor(self, at: AtStep) -> Compressor:
        """Return the accepted compressor, or the one of the first step."""
        settings = self.accepted.settings
        whole = bool(settings["whole"])
        if self.accepted.family == "sparse":
            return Compressor(float(settings["amount"]), settings["places"] != "random", whole)
        if settings["compressor"]:
            return Compressor(whole=whole)
        if self._known is None:
            first = self.references.at(0)
            self._known = compressor_of(first, contributions(first), self.results(first))
        if self._known is None:
            raise NotBoundedError(
                "no known compressor made the gradients of step 0: name it, as in "
                "error-feedback:quantized=8 or low-rank:2"
            )
        return self._known

    def results(self, at: AtStep) -> list[torch.Tensor]:
        """Return the recorded gradients of rank 0. Raises NotRecordedError."""
        found = []
        for index, spec in enumerate(at.specs):
            result = at.trace.tensor(0, Kind.GRADIENT, at.step, index)
            if result is None:
                raise NotRecordedError(f"rank 0 has no gradient of {spec.name} at step {at.step}")
            found.append(result)
        return found

    # -- a quantizer

    def _quantized(self, at: AtStep, bits: int, factor: float, start: int) -> MeanWithMemory:
        mean, dtype = mean_of_step(at), at.ingredients.dtype
        halves = [torch.tensor(half) for half in self._halves_at(at.step, bits)]
        found = list[Interval | None]()
        for index in range(len(at.specs)):
            now = mean.interval(index)
            if now is None:
                found.append(None)
                continue
            form = low_rank.compression_input(
                now,
                earlier_results(at, index)[start:],
                rank=1,
                unit=unit_roundoff(dtype),
                world=at.trace.layout.world,
            )
            expected = now.mean + factor * (form.mean - now.mean)
            found.append(
                quantum.quantized_interval(
                    Interval(expected, form.bound), halves, at.shares.mean_weights, dtype
                )
            )
        return MeanWithMemory(
            at.shares, mean.computed, intervals=tuple(found), opening=at.shares.lost
        )

    def _halves_at(self, step: int, bits: int) -> list[float]:
        """Return half a quantum of each rank at a step, from the largest gradients so far."""
        for number in range(step + 1):
            if number in self._halves:
                continue
            before = self._halves.get(number - 1, [0.0] * self.trace.layout.world)
            gradients = self.references.at(number).shard_gradients
            self._halves[number] = [
                float(quantum.half_quanta([*own, torch.tensor(0.0)], bits)[-1])
                + float(quantum.half_quanta([torch.tensor(half)], bits)[0])
                for own, half in zip(gradients, before, strict=True)
            ]
        return self._halves[step]


def contributions(at: AtStep) -> list[torch.Tensor]:
    """Return the ranks' weighted gradients [W, n] of every parameter. Raises NotBoundedError."""
    found = []
    for index, spec in enumerate(at.specs):
        parts = [
            torch.zeros(spec.elements, dtype=torch.float64)
            if (gradient := gradients[index]) is None
            else weight * gradient.double().reshape(-1)
            for gradients, weight in zip(at.shard_gradients, at.shares.mean_weights, strict=True)
        ]
        found.append(torch.stack(parts))
        if not bool(found[-1].isfinite().all()):
            raise NotBoundedError(f"a gradient of {spec.name} is not finite at step {at.step}")
    return found


def find_acceptance(references: References) -> str:
    """Return the acceptance of a compressor that made the results of the first steps, or ""."""
    first = references.at(0)
    if references.trace.layout.world > _MOST_RANKS:
        return ""
    accepted = AcceptedDeviation("error-feedback", {"compressor": "", "whole": ""})
    seen = ErrorFeedback(references, accepted)
    found = compressor_of(first, contributions(first), seen.results(first))
    if found is None:
        return ""
    words = [f"sparse:{found.amount:g}" if found.amount else "error-feedback:sign"]
    words += ["random"] * (not found.top) + ["whole"] * found.whole
    if found.amount and references.trace.steps_written() > 1:
        second = references.at(1)
        forms = seen.inputs(second, [])
        if not any(f.fit(y).why for f, y in zip(forms, seen.results(second), strict=True)):
            words.append("no-feedback")
    return ":".join(words)


def compressor_of(
    at: AtStep, parts: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> Compressor | None:
    """Return the compressor that made the results of the first step, or None."""
    return find_compressor(
        parts,
        results,
        [spec.shape for spec in at.specs],
        unit=unit_roundoff(at.ingredients.dtype),
        tiny=smallest(at.ingredients.dtype),
    )
