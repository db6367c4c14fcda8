"""Compares two recordings of jobs in execution order, up to the first divergence beyond rounding.

    samples, RNG streams, settings, loss, local gradients, reduced gradients, optimizer gradients,
    the parameters after the step

Choices of a script (samples, random numbers, settings) must be equal; after a different choice
nothing is compared. Computed values must be within the bound of `noise_floor`. Optimizer gradients
and parameters decide, as in the comparison with a reference: if both are within the bound, a loss
or reduced gradient outside it may have been scaled, and unscaled later.

If world sizes differ, each recording is treated as a single process: the samples of all ranks in
any order, the mean of the losses, and the tensors of rank 0. Local gradients and RNG streams of
ranks are not compared.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import torch

from distcheck.judge.divergence.lockstep import LockstepComparison
from distcheck.judge.divergence.modules import OF_BITS, OF_TWO, StepInBothRuns, first_wrong
from distcheck.judge.divergence.noise_floor import (
    NOISE_FACTOR,
    STEM_OF,
    NoiseFloor,
    distance_between,
    module_tensor_name,
    norm_of,
    recorded_tensor,
    tolerance,
    unscaled_loss,
)
from distcheck.machine.numerics import gamma, unit_roundoff
from distcheck.recordings.differing import CHOSEN, INITIAL, Pair, TraceComparison
from distcheck.recordings.jobs.reading import STEMS, JobRecording, JobStepHeader
from distcheck.recordings.jobs.records import COMPILED, OpCall, RecordedOps, StepRecord
from distcheck.recordings.recording import EntryState, Kind
from distcheck.records import Difference
from distcheck.records.run_facts import ModuleComparison

_ORDER = ("made", "others", "given")  # by decreasing information


@dataclass(frozen=True)
class DivergentOp:
    """A divergence of operators; `after` is the preceding collective, if any.

    `how` is "made" (different bits from equal inputs), "given" (different inputs) or "others"
    (different operators).
    """

    how: str  # "made", "given" or "others"
    place: int
    one: OpCall
    two: OpCall
    after: str = ""


def divergent_op(one: RecordedOps, two: RecordedOps) -> DivergentOp | None:
    """Return the first divergence of a step's operators, as far as both are recorded, or None."""
    collective = ""
    for place, (first, second) in enumerate(zip(one.calls, two.calls, strict=False)):
        if (first.name, first.part) != (second.name, second.part):
            return DivergentOp("others", place, first, second)
        if first.inputs != second.inputs:
            return DivergentOp("given", place, first, second, collective)
        if first.outputs != second.outputs:
            return DivergentOp("made", place, first, second)
        collective = first.name if not first.outputs else collective
    return None


def first_divergent_op(
    steps: Iterable[tuple[int, int, RecordedOps, RecordedOps]],
) -> tuple[DivergentOp | None, str]:
    """Return the first diverging operator over (step, rank), and a sentence about it; "" if no
    operators were recorded. Within a step, ranks whose operator had equal inputs take precedence.
    """
    found: dict[int, list[tuple[int, DivergentOp]]] = {}
    compared = 0
    for step, rank, one, two in steps:
        if found and step not in found:
            break
        compared += min(len(one.calls), len(two.calls))
        if (where := divergent_op(one, two)) is not None:
            found.setdefault(step, []).append((rank, where))
    for step, ranks in found.items():
        rank, where = min(ranks, key=lambda of: (_ORDER.index(of[1].how), of[1].place))
        line = f", {where.one.line.rpartition('/')[2]}" if where.one.line else ""
        return where, _sentence(where, f"step {step}, rank {rank}, number {where.place}{line}")
    return None, f"none of {compared} operators diverges before the jobs do" if compared else ""


def _sentence(where: DivergentOp, at: str) -> str:
    one, two = where.one, where.two
    of = "" if one.part == "forward" else f", in {one.part}"
    within = f" in {one.module}{of}" if one.module else of
    if where.how == "others":
        return (
            f"different operators run: {one.name}{within}, but {two.name} in the later job ({at})"
        )
    if where.how == "given":
        source = (
            f"communication, {where.after}" if where.after
            else "no operator: compiled code, an extension, or data"
        )  # fmt: skip
        inputs = f"the inputs of {one.name}{within} are not bit-identical"
        return f"{inputs}; they come from {source} ({at})"
    if one.name == COMPILED:
        name = one.module or "the model"
        return (
            f"first divergent operator: within {name}, which torch.compile has compiled: its "
            f"inputs are bit-identical, but its outputs are not ({at})"
        )
    if one.draws:
        return (
            f"first divergent operator: {one.name}{within} draws different random numbers than in "
            f"the earlier job ({at})"
        )
    return (
        f"first divergent operator: {one.name}{within}: its inputs are bit-identical, but its "
        f"outputs are not ({at})"
    )


# Settings of an optimizer's implementation that do not change its results.
_MANNERS = ("foreach", "fused", "capturable", "differentiable")
_OF_UPDATES = (Kind.PARAMETER, Kind.BUFFER)


@dataclasses.dataclass
class RecordingSide(JobRecording):
    """One of two recordings. With `as_one`, all ranks are treated as a single process."""

    as_one: bool = False
    other: "RecordingSide | None" = None

    def header(self, rank: int, step: int) -> JobStepHeader:
        """Return a header with only those settings that both recordings have."""
        at, found = self.steps[step], super().header(rank, step)
        settings, loss = self._settings(step), unscaled_loss(self, rank, at)
        if not self.as_one:
            return found._replace(optimizer=settings, loss=loss)
        every = [super(RecordingSide, self).header(one, step) for one in self._ranks_at(at)]
        losses = [unscaled_loss(self, one, at) for one in self._ranks_at(at)]
        rows = sorted(chain(*(one.ids for one in every)))
        return JobStepHeader(tuple(rows), sum(losses) / len(losses), b"", settings)

    def _ranks_at(self, at: int) -> list[int]:
        return [rank for rank, step in self.records if step == at]

    def _settings(self, step: int) -> str:
        own = self.records[0, self.steps[step]].groups
        theirs = own
        if self.other is not None and step < len(self.other.steps):
            theirs = self.other.records[0, self.other.steps[step]].groups
        groups = []
        for number, group in enumerate(own):
            both = theirs[number] if number < len(theirs) else {}
            known = [k for k in group if k in both and k not in _MANNERS]
            groups.append(", ".join(f"{name} {group[name]:.9g}" for name in known))
        return "; ".join(groups)


def comparable_recordings(
    then: JobRecording, now: JobRecording
) -> tuple[RecordingSide, RecordingSide]:
    """Return both recordings with the same tensors in the same order."""
    as_one = then.world != now.world
    names: dict[Kind, list[str]] = {}
    for kind in Kind:
        several = [one.names(kind) for one in (then, now)]
        known = dict.fromkeys(chain(*several))
        is_known = all(several) and all(_has_tensors(one, kind) for one in (then, now))
        names[kind] = [*known] if is_known else []
    if as_one:
        names[Kind.LOCAL_GRADIENT] = []
    one, two = (_side(job, as_one, names) for job in (then, now))
    one.other, two.other = two, one
    return one, two


def _has_tensors(job: JobRecording, kind: Kind) -> bool:
    """Return True if a recording has tensors of a kind: FSDP2 leaves no local gradients."""
    stem = f"{STEM_OF.get(kind, kind.label)}/"
    records = job.at(job.steps[0])
    return kind not in STEMS or any(n.startswith(stem) for one in records for n in one.digests)


def _side(job: JobRecording, as_one: bool, names: dict[Kind, list[str]]) -> RecordingSide:
    about = {field.name: getattr(job, field.name) for field in dataclasses.fields(JobRecording)}
    if as_one:
        about["ranks"] = (msgspec.structs.replace(job.ranks[0], world=1),)
    return RecordingSide(**{**about, "_names": dict(names)}, as_one=as_one)  # type: ignore[arg-type]


def name_in_only_one(then: JobRecording, now: JobRecording) -> str:
    """Return a parameter or buffer that only one of two jobs has, with its kind, or ""."""
    for kind in (Kind.PARAMETER, Kind.BUFFER):
        if other := set(then.names(kind)) ^ set(now.names(kind)):
            return f"{kind.label} {min(other)}"
    return ""


def why_not_comparable(then: JobRecording, now: JobRecording) -> str:
    """Return why jobs of different world sizes differ by design, or ""."""
    if then.world == now.world:
        return ""
    records = [*then.records.values(), *now.records.values()]
    if any(one.batchnorm for one in records):
        return "BatchNorm normalizes each rank's batch, which depends on the world size"
    if any(part.draws or part.drew for one in records for part in one.passes if part.live):
        return "ranks draw random numbers in a step, which depend on the world size"
    return ""


class JobComparison(LockstepComparison):
    """The comparison of two jobs.

    `diverged` is the first different choice. `blurred` is the step from which perturbed runs
    diverge as far as the gradients.
    """

    def __init__(
        self, then: RecordingSide, now: RecordingSide, floors: Sequence[tuple[NoiseFloor, int]]
    ) -> None:
        super().__init__(then, now)
        self._sides, self._floors = (then, now), floors
        self._large = max(one.records[0, one.steps[0]].world for one in self._sides)
        self.diverged: Pair | None = None
        self.blurred: int | None = None
        self.unmeasured = self._beyond_kind = ""
        self._measured: list[float] = []

    @property
    def is_over(self) -> bool:
        """Return True if later differences may be consequences."""
        return self.diverged is not None or self._beyond is not None

    def result(self) -> TraceComparison:
        """Return the comparison, with the noise floor of the drift."""
        found = super().result()
        cast = found.kind == INITIAL and self.diverged is None
        return msgspec.structs.replace(
            found, noise_floor=tuple(self._measured), beyond_kind=self._beyond_kind,
            kind=f"{INITIAL}, in a different dtype" if cast else found.kind,
        )  # fmt: skip

    def _judge_step(self, step: int, changed: Sequence[Pair], *, is_first: bool) -> None:
        drifts = [one.drift(step + later) for one, later in self._floors]
        self._measured += [max(known)] if (known := [d for d in drifts if d is not None]) else []
        chosen = [p for p in changed if p.what in CHOSEN and not self._is_cast(p)]
        if chosen:
            self.diverged = chosen[0]
            return
        changed = [p for p in changed if p.what not in CHOSEN and p.kind is not Kind.OPTIMIZER]
        if not changed or self.blurred is not None:
            return
        if self._is_blurred(step):
            self.blurred = step
            return
        failing, seen = [], set[tuple[object, ...]]()
        for pair in changed:
            both = (getattr(one, "digest", one) for one in (pair.one, pair.two))
            what = (pair.kind, pair.name, *both)
            if pair.kind is not None and what in seen:
                continue  # another rank with the same contents
            seen.add(what)
            place = self._loss(pair, step) if pair.kind is None else self._tensor(pair, step)
            if place is not None:
                failing.append((pair, place))
        deciding = [one for one in failing if one[0].kind in (Kind.GRADIENT, *_OF_UPDATES)]
        if failing and (deciding or not self._knows_given(step)):
            self._beyond, self._beyond_kind = failing[0][1], failing[0][0].what

    def _knows_given(self, step: int) -> bool:
        return any(self._spread(f"step/{name}", step) is not None
                   for name in self._sides[0].names(Kind.GRADIENT))  # fmt: skip

    def _is_cast(self, pair: Pair) -> bool:
        """Return True if parameters are equal after a cast to the less precise dtype."""
        if pair.what != INITIAL or pair.kind is None:
            return False
        if pair.rank:  # tensors not recorded: another check compares ranks
            return True
        one, two = (
            side.tensor(pair.rank, pair.kind, pair.slot, pair.index) for side in self._sides
        )
        if one is None or two is None or one.dtype == two.dtype or one.shape != two.shape:
            return False
        return any(torch.equal(a.to(b.dtype), b) for a, b in ((one, two), (two, one)))

    def by_module(self) -> ModuleComparison | None:
        """Return the first module that diverges beyond rounding, or bitwise if the jobs do not
        diverge beyond rounding. Return None if one of the jobs did not record modules.
        """
        if self._first is None or self.diverged is not None or self._sides[0].as_one:
            return None
        found = None
        if self._beyond is not None:
            found = first_wrong(self._modules_until(self._beyond.step, bits=False), OF_TWO)
        if found is None or not found.is_found:
            by_bits = first_wrong(self._modules_until(self._first.step, bits=True), OF_BITS)
            found = by_bits if by_bits is not None and by_bits.is_found else found or by_bits
        return found

    def first_divergent_op(self) -> tuple[DivergentOp | None, str]:
        """Return the first diverging operator, if both jobs recorded operators."""
        if self._first is None or self.diverged is not None or self._sides[0].as_one:
            return None, ""
        return first_divergent_op(self._ops_until(self._first.step))

    def _ops_until(self, last: int) -> Iterator[tuple[int, int, RecordedOps, RecordedOps]]:
        for step in range(last + 1):
            pairs = zip(*(side.at(side.steps[step]) for side in self._sides), strict=True)
            for rank, (one, two) in enumerate(pairs):
                if one.ops is not None and two.ops is not None:
                    yield self._sides[0].steps[step], rank, one.ops, two.ops

    def _modules_until(self, last: int, *, bits: bool) -> Iterator[tuple[int, int, StepInBothRuns]]:
        for step in range(last + 1):
            for rank in range(self._sides[0].world):
                other, own = (side.modules(rank, side.steps[step]) for side in self._sides)
                if own is not None and other is not None:
                    spread = functools.partial(self._largest_spread, step)
                    both = StepInBothRuns(own, other, spread, self._unit(step), bits=bits)
                    yield self._sides[0].steps[step], rank, both

    def _largest_spread(self, step: int, name: str, gradient: bool) -> float | None:
        of = module_tensor_name(name, gradient=gradient)
        found = (one.spread(of, step + later) for one, later in self._floors)
        return max((one for one in found if one is not None), default=None)

    # -- bounds ----------------------------------------------------------------------------------

    def _records(self, step: int) -> list[StepRecord]:
        return [record for side in self._sides for record in side.at(side.steps[step])]

    def _unit(self, step: int) -> float:
        return unit_roundoff_of_step(self._records(step))

    def _spread(self, name: str, step: int) -> float | None:
        """Return the distance of a perturbed run, by the larger noise floor."""
        found = [one.spread(name, step + later) for one, later in self._floors]
        known = [one for one in found if one is not None]
        if not known:
            whys = [one.why for one, _ in self._floors if one.why]
            self.unmeasured = self.unmeasured or next(iter(whys), "it was not measured")
        return max(known, default=None)

    def _is_blurred(self, step: int) -> bool:
        """Return True if perturbed gradients differ by their size, so that nothing could fail."""
        spreads, sizes = [], []
        for floor, later in self._floors:
            found = floor.steps[step + later] if step + later < len(floor.steps) else {}
            given = {n: one for n, one in found.items() if n.startswith("step/")}
            spreads.append(math.hypot(*(NOISE_FACTOR * one.distance for one in given.values())))
            sizes.append(math.hypot(*(one.size for one in given.values())))
        return any(s and d >= s for d, s in zip(spreads, sizes, strict=True))

    def _loss(self, pair: Pair, step: int) -> Difference | None:
        spread = self._spread("loss", step)
        one, two = float(pair.one), float(pair.two)
        if spread is None or pair.what != "loss" or not (math.isfinite(one) and math.isfinite(two)):
            return None
        count = max(1, max(len(p.rows) for r in self._records(step) for p in r.passes))
        bound = NOISE_FACTOR * spread + self._unit(step) * count * max(abs(one), abs(two))
        self._judged += 1
        return self._keep(pair, "loss", two, one, abs(one - two), bound, "absolute")

    def _tensor(self, pair: Pair, step: int) -> Difference | None:
        assert pair.kind is not None
        stem, places = STEM_OF[pair.kind], [side.steps[step] for side in self._sides]
        # Buffers are those before a step: a slot is the step that starts with it.
        if pair.kind is Kind.BUFFER:
            if any(pair.slot >= len(side.steps) for side in self._sides):
                return None
            places = [side.steps[pair.slot] for side in self._sides]
        spread = self._spread(
            f"{stem}/{pair.name}", pair.slot if pair.kind is Kind.BUFFER else step
        )
        if spread is None:
            return None
        one, two = (
            recorded_tensor(side, pair.kind, pair.rank, at, pair.name)
            if entry.state is EntryState.STORED else None
            for side, at, entry in zip(self._sides, places, (pair.one, pair.two), strict=True)
        )  # fmt: skip
        if one is None and two is None:
            return None
        one = torch.zeros_like(two) if one is None and two is not None else one
        two = torch.zeros_like(one) if two is None and one is not None else two
        assert one is not None and two is not None  # noqa: PT018
        norms, unit = (norm_of(one), norm_of(two)), self._unit(step)
        if pair.kind in _OF_UPDATES:
            bound = NOISE_FACTOR * spread + gamma(16 * (step + 1), unit) * max(norms)
        else:
            whole = self._whole_norm(pair.kind, pair.rank, step)
            bound = tolerance(spread, max(norms), whole, world=self._large, unit=unit)
        self._judged += one.numel()
        return self._keep(
            pair, pair.name, norms[1], norms[0], distance_between(one, two), bound, "L2 norm"
        )

    def _whole_norm(self, kind: Kind, rank: int, step: int) -> float:
        side = self._sides[0]
        found = (
            recorded_tensor(side, kind, rank, side.steps[step], name) for name in side.names(kind)
        )
        return math.hypot(*(norm_of(one) for one in found if one is not None))

    def _keep(self, pair: Pair, name: str, actual: float, expected: float, error: float,
              bound: float, unit: str) -> Difference | None:  # fmt: skip
        if error <= bound < math.inf:
            return None
        return Difference(
            parameter=name, rank=pair.rank, step=pair.step, index=(), actual=actual,
            expected=expected, error=error if math.isfinite(error) else "inf", bound=bound,
            unit=unit,
        )  # fmt: skip

    def _distance(self, slot: int) -> float:
        """Return the relative distance of parameters, by tensors or projections."""
        difference = norm = 0.0
        places = [side.steps[slot - 1] for side in self._sides]
        for name in self._sides[0].names(Kind.PARAMETER):
            one, two = (
                recorded_tensor(side, Kind.PARAMETER, 0, at, name)
                for side, at in zip(self._sides, places, strict=True)
            )
            if one is not None and two is not None:
                norm = math.hypot(norm, norm_of(one))
                difference = math.hypot(difference, distance_between(one, two))
        return difference / norm if norm else 0.0


def unit_roundoff_of_step(records: Sequence[StepRecord]) -> float:
    """Return the unit roundoff of the least precise dtype of a step."""
    names = {one.computed for one in records} | {p.autocast for r in records for p in r.passes}
    known = [name.removeprefix("torch.") for name in names if name]
    units = [unit_roundoff(name) for name in known if hasattr(torch, name)]
    for record in records:
        units += [unit_roundoff(n) for n in set(record.dtypes.values()) if "float" in n]
    return max([unit_roundoff("float32") if not units else 0.0, *units])


def compare_recordings(
    then: JobRecording, now: JobRecording, floors: Sequence[tuple[NoiseFloor, int]]
) -> JobComparison:
    """Compare two jobs up to the end of the shorter one."""
    one, two = comparable_recordings(then, now)
    comparison = JobComparison(one, two, floors)
    for step in range(min(len(one.steps), len(two.steps))):
        comparison.compare_step(step)
        if comparison.is_over:
            break
    return comparison
