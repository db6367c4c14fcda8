"""Finds the first module, in two runs of one step, whose inputs match and whose outputs diverge.

In forward, calls are ordered by completion: a module comes after its submodules, so the innermost
module is named. Its inputs are right if every input that both runs have is right. It is wrong if an
output differs between the runs by more than

    8 max_d |x_d - x| + gamma(16) |x|

with x_d that of a run with parameters perturbed by one ULP, or if its output takes part in backward
in only one run. In backward, tensors are ordered by the arrival of gradients. The first wrong
gradient comes from a module that received the tensor, and whose output gradients are right.
Gradients may differ between the runs by one factor (a loss with a different divisor), which is
fitted to the first gradient.

All tensors are 64 projections, whose distance is that of the tensors up to a factor near 1.
gamma(16) is a heuristic, as for an update: an operation that depends on no parameter rounds as
well, and perturbed runs do not show its rounding.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from distcheck.judge.divergence.noise_floor import NOISE_FACTOR
from distcheck.machine.numerics import gamma
from distcheck.recordings.jobs.watched import ModuleCall, WatchedStep
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.odd_ranks import grouped
from distcheck.records.run_facts import ComparedModule, ModuleComparison, ModuleState

# Heuristic: a module whose inputs are within their bound may amplify their relative error by this
# factor.
_AMPLIFIES = 8.0
# Noise floor of a tensor by name, of its gradient if True; None: unknown.
Spread = Callable[[str, bool], float | None]


class _Is(Enum):
    """Relation of a tensor to the other run's."""

    SAME = auto()
    NEAR = auto()
    FAR = auto()
    OTHER = auto()  # it differs, by an unknown distance
    UNSEEN = auto()


@dataclass(frozen=True)
class WrongModule:
    """The first wrong module, and its wrong input, output or gradient."""

    call: ModuleCall | None  # None: before all modules
    what: str  # "output", "detached" or "gradient"
    error: float = 0.0
    of: str = ""  # the tensor with this gradient


@dataclass
class StepInBothRuns:
    """Both runs of a step; `fits`: up to a factor; `bits`: nothing may differ."""

    own: WatchedStep
    other: WatchedStep
    spread: Spread
    unit: float
    fits: bool = False
    bits: bool = False
    _pairs: list[tuple[ModuleCall, ModuleCall]] = field(default_factory=list)
    _beside: dict[int, int] = field(default_factory=dict)  # a tensor's index in the other run
    _names: dict[int, str] = field(default_factory=dict)
    _others: dict[int, str] = field(default_factory=dict)
    _values: dict[int, tuple[_Is, float, float]] = field(default_factory=dict)
    _gradients: dict[int, tuple[_Is, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        theirs = {call.key: call for call in self.other.watched.calls}
        for call in self.own.watched.calls:
            beside = theirs.get(call.key)
            if beside is None:
                continue
            self._pairs.append((call, beside))
            for mine, others in ((call.outputs, beside.outputs), (call.inputs, beside.inputs)):
                if len(mine) == len(others):
                    for one, two in zip(mine, others, strict=True):
                        self._beside.setdefault(one, two)
        self._names = {place: name for name, place in self.own.places().items()}
        self._others = {place: name for name, place in self.other.places().items()}
        factors = self._factors()
        for one, two in self._beside.items():
            self._values[one] = self._value(one, two)
            self._gradients[one] = self._gradient(one, two, factors)

    @property
    def compared(self) -> int:
        return len(self._pairs)

    def wrong(self) -> WrongModule | None:
        return self._forward() or self._backward()

    def _forward(self) -> WrongModule | None:
        for call, _ in self._pairs:
            if not self._is_given_right(call):
                continue
            far = [self._values[one] for one in call.outputs if self._is_far(self._values, one)]
            if far and (self.bits or self._is_more(call, far)):
                return WrongModule(call, "output", max(error for _, error, _ in far))
            if any(self._trains(one) for one in call.outputs) and not any(
                self._trains(one) for one in call.inputs
            ):
                return WrongModule(call, "detached")
        return None

    def _is_given_right(self, call: ModuleCall) -> bool:
        states = [self._values[one][0] for one in call.inputs if one in self._values]
        right = (_Is.SAME, _Is.UNSEEN) if self.bits else (_Is.SAME, _Is.NEAR, _Is.UNSEEN)
        return all(one in right for one in states)

    def _is_more(self, call: ModuleCall, far: Sequence[tuple[_Is, float, float]]) -> bool:
        """Return True if outputs exceed their bound by more than inputs near theirs explain."""
        given = [self._values[one] for one in call.inputs if one in self._values]
        return _share(far) > _AMPLIFIES * _share(given)

    def _is_far(self, of: dict[int, tuple[_Is, float, float]], place: int) -> bool:
        state = of[place][0] if place in of else _Is.UNSEEN
        return state is _Is.FAR or (self.bits and state in (_Is.NEAR, _Is.OTHER))

    def _trains(self, place: int) -> bool:
        """Return True if a tensor takes part in backward in only one run."""
        beside = self._beside.get(place)
        if beside is None or self._values[place][0] is _Is.UNSEEN:
            return False
        both = (self.own.watched.tensors[place], self.other.watched.tensors[beside])
        return both[0].trains != both[1].trains

    def _backward(self) -> WrongModule | None:
        place_of = {two: one for one, two in self._beside.items()}
        came = [place_of[two] for two in self.other.watched.backward if two in place_of]
        came += [one for one in self.own.watched.backward if one in self._beside]
        for place in dict.fromkeys(came):
            if not self._is_far(self._gradients, place):
                continue
            users = [call for call, _ in self._pairs if place in call.inputs]
            right = [call for call in users if place not in call.outputs and self._ends_right(call)]
            last = [call for call, _ in self._pairs if call.number == self._call_number(place)][-1]
            of = _OF_MODEL if place in last.outputs else _name(self._names[place])
            return WrongModule(
                right[0] if right else None, "gradient", self._gradients[place][1], of
            )
        return None

    def _ends_right(self, call: ModuleCall) -> bool:
        known = [self._gradients[one][0] for one in call.outputs if one in self._gradients]
        seen = [one for one in known if one is not _Is.UNSEEN]
        return bool(seen) and not any(
            self._is_far(self._gradients, one) for one in call.outputs if one in self._gradients
        )

    # -- single tensors --------------------------------------------------------------------------

    def _value(self, one: int, two: int) -> tuple[_Is, float, float]:
        mine, other = self.own.watched.tensors[one], self.other.watched.tensors[two]
        if mine.shape is None or mine.shape != other.shape:
            return _Is.UNSEEN, 0.0, 0.0
        if mine.digest == other.digest:
            return _Is.SAME, 0.0, 0.0
        return self._distance(one, two, 0, 1.0)

    def _gradient(self, one: int, two: int, factors: dict[int, float]) -> tuple[_Is, float, float]:
        mine, other = self.own.watched.tensors[one], self.other.watched.tensors[two]
        if mine.shape is None or mine.shape != other.shape or mine.trains != other.trains:
            return _Is.UNSEEN, 0.0, 0.0
        if not mine.gradient or not other.gradient:
            if mine.gradient == other.gradient:
                return _Is.UNSEEN, 0.0, 0.0
            return _Is.FAR, math.inf, 0.0
        factor = factors.get(self._call_number(one), 1.0)
        if mine.gradient == other.gradient and factor == 1.0:
            return _Is.SAME, 0.0, 0.0
        return self._distance(one, two, 1, factor)

    def _distance(self, one: int, two: int, kind: int, factor: float) -> tuple[_Is, float, float]:
        mine, other = self.own.sums[one, kind], self.other.sums[two, kind] * factor
        if mine.isnan().all() and other.isnan().all():
            return _Is.OTHER, 0.0, 0.0
        norm = max(float(mine.norm()), float(other.norm()))
        # A reused tensor has one name in a run, and two if the other run has different tensors.
        names = (self._names.get(one), self._others.get(two))
        perturbed = [self.spread(name, bool(kind)) for name in names if name is not None]
        spreads = [spread for spread in perturbed if spread is not None]
        if not spreads:
            return _Is.OTHER, 0.0, 0.0
        bound = NOISE_FACTOR * abs(factor) * max(spreads) + gamma(16, self.unit) * norm
        error = float((mine - other).norm())
        if error == 0.0:  # equal times a power of two
            return _Is.SAME, 0.0, 0.0
        share = (error / norm, bound / norm)
        return _Is.NEAR if error <= bound else _Is.FAR, *share

    def _call_number(self, place: int) -> int:
        return int(self._names[place].partition("/")[0]) if place in self._names else 0

    def _factors(self) -> dict[int, float]:
        """Return, by forward pass, the factor between the runs' first gradients."""
        found: dict[int, float] = {}
        for one in self.own.watched.backward if self.fits else ():
            two = self._beside.get(one)
            if two is None or self._call_number(one) in found:
                continue
            mine, other = self.own.sums[one, 1], self.other.sums[two, 1]
            square = float((other * other).sum())
            if square > 0 and math.isfinite(square):
                found[self._call_number(one)] = float((mine * other).sum()) / square
        return found

    # -- for a report ----------------------------------------------------------------------------

    def modules(self, wrong: WrongModule | None) -> tuple[ComparedModule, ...]:
        """Return each module with its comparison, in the order of first calls."""
        paired = {call.key for call, _ in self._pairs}
        found = grouped(self.own.watched.calls, lambda call: call.name)
        return tuple(self._module(calls, paired, wrong) for calls in found.values())

    def _module(
        self,
        calls: Sequence[ModuleCall],
        paired: set[tuple[str, int, int]],
        wrong: WrongModule | None,
    ) -> ComparedModule:
        there = [call for call in calls if call.key in paired]
        outputs = [one for call in there for one in call.outputs]
        known = [of[o] for o in outputs for of in (self._values, self._gradients) if o in of]
        seen = [one for one in known if one[0] is not _Is.UNSEEN]
        worst = max(seen, key=lambda one: _share([one]), default=None)
        of = (self._values, self._gradients)
        state: ModuleState = "same"
        if wrong is not None and wrong.call is not None and wrong.call.name == calls[0].name:
            state = "wrong"
        elif not seen:
            state = "unseen"
        elif any(self._is_far(one, place) for one in of for place in outputs):
            state = "follows"
        elif any(one[0] is not _Is.SAME for one in seen):
            state = "near"
        numbers = (0.0, 0.0) if worst is None else worst[1:]
        error, bound = (one if math.isfinite(one) else 0.0 for one in numbers)
        return ComparedModule(
            name=calls[0].name, kind=calls[0].kind, state=state, calls=len(calls), error=error,
            bound=bound,
        )  # fmt: skip


def _share(several: Sequence[tuple[_Is, float, float]]) -> float:
    """Return the largest error / bound."""
    return max((error / bound for _, error, bound in several if bound), default=0.0)


def first_wrong(
    steps: Iterable[tuple[int, int, StepInBothRuns]], words: "ModuleWording"
) -> ModuleComparison | None:
    """Return the first wrong module over (step, rank) in order; None if nothing was compared."""
    compared, last = 0, None
    for step, rank, both in steps:
        compared += both.compared
        wrong = both.wrong()
        last = (step, rank, both, wrong)
        if wrong is not None:
            break
    if last is None or not compared:
        return None
    step, rank, both, wrong = last
    own = both.own.watched
    return ModuleComparison(
        first=words.sentence(wrong, step, rank, compared),
        name="" if wrong is None or wrong.call is None else wrong.call.name,
        is_found=wrong is not None and wrong.call is not None,
        step=step, rank=rank, compared=compared, left_out=own.left_out,
        compiled=tuple(dict.fromkeys((*own.compiled, *both.other.watched.compiled))),
        modules=both.modules(wrong),
    )  # fmt: skip


@dataclass(frozen=True)
class ModuleWording:
    """Wording of a report, either for a job and its reference or for two diverging jobs."""

    head: str
    right: str
    wrong: str

    def sentence(self, wrong: WrongModule | None, step: int, rank: int, compared: int) -> str:
        if wrong is None:
            return f"no module turned right inputs into a wrong output in {compared} calls"
        at = f"step {step}, rank {rank}"
        if wrong.call is None:
            after = "the loss" if wrong.of == _OF_MODEL else "the code that uses it after that"
            return (
                f"the outputs of all modules {self.right}, and the gradient of {wrong.of} "
                f"{self.wrong} ({at}): check {after}"
            )
        one = f"{self.head}: {call_label(wrong.call)}"
        far = f"off by {wrong.error:.2g} of its norm, " if math.isfinite(wrong.error) else ""
        if wrong.what == "output":
            return f"{one}: its inputs {self.right}, but its output {self.wrong} ({far}{at})"
        if wrong.what == "detached":
            return (
                f"{one}: its inputs {self.right}, but its output takes part in backward in only "
                f"one of the two runs ({at})"
            )
        return (
            f"{one}: the gradients that it receives {self.right}, but the gradient that it returns "
            f"{self.wrong} ({far}{at})"
        )


_OF_MODEL = "the output of the model"
OF_REFERENCE = ModuleWording("first wrong module", "are right", "is not")
OF_TWO = ModuleWording("first divergent module", "agree", "does not")
OF_BITS = ModuleWording("first divergent module", "are bit-identical", "is not")


def call_label(call: ModuleCall) -> str:
    again = f", call {call.call}" if call.call else ""
    number = f", forward pass {call.number}" if call.number else ""
    return f"{call.name or 'the model'} ({call.kind}{again}{number})"


def _name(tensor: str) -> str:
    """Format `0/layers.0#0/out 0` for a report."""
    of, _, what = tensor.partition("/")[2].rpartition("/")
    name, put = of.rpartition("#")[0], f"{what.partition(' ')[0]}put"
    return f"the {put} of {name or 'the model'}"


def add_module_evidence(
    found: Sequence[Diagnosis], modules: ModuleComparison | None, *variants: str
) -> list[Diagnosis]:
    """Add the first wrong module to the evidence of the first cause. If that cause is unexplained,
    replace it by the cause `module-differs` with this evidence.
    """
    if modules is None or not modules.is_found or not found:
        return list(found)
    first, *others = found
    evidence = f"{first.evidence}; {modules.first}"
    if first.cause == "unexplained":
        return [name_cause("module-differs", evidence, *variants), *others]
    return [msgspec.structs.replace(first, evidence=evidence), *others]
