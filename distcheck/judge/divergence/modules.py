"""The modules of two runs of one step, side by side: the first that is given the same, and makes
another thing of it.

Forward, calls are taken in the order in which they were over: a module comes after those within
it, so the innermost one is named. Its inputs are right where each that both have is; it is wrong
where an output is further from the other run's than

    8 max_d |x_d - x| + gamma(16) |x|

with x_d that of a run whose parameters were moved by one ULP, or where its output takes part in
backward in one run alone. Backward, tensors are taken in the order in which gradients came. The
first wrong gradient was handed back by a module that was given the tensor, and whose own gradients
are right. Gradients may be those of the other run times one factor (a loss that is divided by
another number), by which the first one is fitted.

All tensors are 64 sums: their distance is that of the tensors but for a factor near 1. gamma(16) is
chosen, as for an update: an operation on what no parameter has gone into is rounded as well, and no
moved run shows it.
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
from distcheck.records.by_module import ByModule, ModuleSeen, ModuleState

# Chosen: a module whose inputs are within their bound may bring what they differ by nearer to that
# of its output, or beyond it, by as much.
_AMPLIFIES = 8.0
# How far a tensor may be moved, by what it is and whether its gradient is meant; None: not known.
Spread = Callable[[str, bool], float | None]


class _Is(Enum):
    """What a tensor is beside the other run's."""

    SAME = auto()
    NEAR = auto()
    FAR = auto()
    OTHER = auto()  # it differs, and no distance is known
    UNSEEN = auto()


@dataclass(frozen=True)
class Wrong:
    """The first wrong module, and what of it is wrong."""

    call: ModuleCall | None  # None: what is behind all modules
    what: str  # "output", "detached" or "gradient"
    error: float = 0.0
    of: str = ""  # the tensor whose gradient it is


@dataclass
class Both:
    """Both runs of a step; `fits`: whether gradients may have a factor, `bits`: whether nothing may
    differ.
    """

    own: WatchedStep
    other: WatchedStep
    spread: Spread
    unit: float
    fits: bool = False
    bits: bool = False
    _pairs: list[tuple[ModuleCall, ModuleCall]] = field(default_factory=list)
    _beside: dict[int, int] = field(default_factory=dict)  # a tensor's place in the other run
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

    def wrong(self) -> Wrong | None:
        return self._forward() or self._backward()

    def _forward(self) -> Wrong | None:
        for call, _ in self._pairs:
            if not self._is_given_right(call):
                continue
            far = [self._values[one] for one in call.outputs if self._is_far(self._values, one)]
            if far and (self.bits or self._is_more(call, far)):
                return Wrong(call, "output", max(error for _, error, _ in far))
            if any(self._trains(one) for one in call.outputs) and not any(
                self._trains(one) for one in call.inputs
            ):
                return Wrong(call, "detached")
        return None

    def _is_given_right(self, call: ModuleCall) -> bool:
        states = [self._values[one][0] for one in call.inputs if one in self._values]
        right = (_Is.SAME, _Is.UNSEEN) if self.bits else (_Is.SAME, _Is.NEAR, _Is.UNSEEN)
        return all(one in right for one in states)

    def _is_more(self, call: ModuleCall, far: Sequence[tuple[_Is, float, float]]) -> bool:
        """Whether outputs are further beyond their bound than inputs that are near it explain."""
        given = [self._values[one] for one in call.inputs if one in self._values]
        return _share(far) > _AMPLIFIES * _share(given)

    def _is_far(self, of: dict[int, tuple[_Is, float, float]], place: int) -> bool:
        state = of[place][0] if place in of else _Is.UNSEEN
        return state is _Is.FAR or (self.bits and state in (_Is.NEAR, _Is.OTHER))

    def _trains(self, place: int) -> bool:
        """Whether a tensor takes part in backward in one run alone."""
        beside = self._beside.get(place)
        if beside is None or self._values[place][0] is _Is.UNSEEN:
            return False
        both = (self.own.watched.tensors[place], self.other.watched.tensors[beside])
        return both[0].trains != both[1].trains

    def _backward(self) -> Wrong | None:
        place_of = {two: one for one, two in self._beside.items()}
        came = [place_of[two] for two in self.other.watched.backward if two in place_of]
        came += [one for one in self.own.watched.backward if one in self._beside]
        for place in dict.fromkeys(came):
            if not self._is_far(self._gradients, place):
                continue
            users = [call for call, _ in self._pairs if place in call.inputs]
            right = [call for call in users if place not in call.outputs and self._ends_right(call)]
            last = [call for call, _ in self._pairs if call.number == self._number(place)][-1]
            of = _OF_MODEL if place in last.outputs else _name(self._names[place])
            return Wrong(right[0] if right else None, "gradient", self._gradients[place][1], of)
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
        return self._far(one, two, 0, 1.0)

    def _gradient(self, one: int, two: int, factors: dict[int, float]) -> tuple[_Is, float, float]:
        mine, other = self.own.watched.tensors[one], self.other.watched.tensors[two]
        if mine.shape is None or mine.shape != other.shape or mine.trains != other.trains:
            return _Is.UNSEEN, 0.0, 0.0
        if not mine.gradient or not other.gradient:
            if mine.gradient == other.gradient:
                return _Is.UNSEEN, 0.0, 0.0
            return _Is.FAR, math.inf, 0.0
        factor = factors.get(self._number(one), 1.0)
        if mine.gradient == other.gradient and factor == 1.0:
            return _Is.SAME, 0.0, 0.0
        return self._far(one, two, 1, factor)

    def _far(self, one: int, two: int, kind: int, factor: float) -> tuple[_Is, float, float]:
        mine, other = self.own.sums[one, kind], self.other.sums[two, kind] * factor
        if mine.isnan().all() and other.isnan().all():
            return _Is.OTHER, 0.0, 0.0
        norm = max(float(mine.norm()), float(other.norm()))
        # A tensor that goes on has one name in a run, and two where the other run has another one.
        names = (self._names.get(one), self._others.get(two))
        perturbed = [self.spread(name, bool(kind)) for name in names if name is not None]
        spreads = [spread for spread in perturbed if spread is not None]
        if not spreads:
            return _Is.OTHER, 0.0, 0.0
        bound = NOISE_FACTOR * abs(factor) * max(spreads) + gamma(16, self.unit) * norm
        error = float((mine - other).norm())
        if error == 0.0:  # of the other's times a power of two
            return _Is.SAME, 0.0, 0.0
        share = (error / norm, bound / norm)
        return _Is.NEAR if error <= bound else _Is.FAR, *share

    def _number(self, place: int) -> int:
        return int(self._names[place].partition("/")[0]) if place in self._names else 0

    def _factors(self) -> dict[int, float]:
        """By forward pass, what the first gradient is times that of the other run."""
        found: dict[int, float] = {}
        for one in self.own.watched.backward if self.fits else ():
            two = self._beside.get(one)
            if two is None or self._number(one) in found:
                continue
            mine, other = self.own.sums[one, 1], self.other.sums[two, 1]
            square = float((other * other).sum())
            if square > 0 and math.isfinite(square):
                found[self._number(one)] = float((mine * other).sum()) / square
        return found

    # -- for a report ----------------------------------------------------------------------------

    def modules(self, wrong: Wrong | None) -> tuple[ModuleSeen, ...]:
        """Each module with its state, in the order of the first call."""
        paired = {call.key for call, _ in self._pairs}
        found: dict[str, list[ModuleCall]] = {}
        for call in self.own.watched.calls:
            found.setdefault(call.name, []).append(call)
        return tuple(self._module(calls, paired, wrong) for calls in found.values())

    def _module(
        self, calls: Sequence[ModuleCall], paired: set[tuple[str, int, int]], wrong: Wrong | None
    ) -> ModuleSeen:
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
        return ModuleSeen(
            name=calls[0].name, kind=calls[0].kind, state=state, calls=len(calls), error=error,
            bound=bound,
        )  # fmt: skip


def _share(several: Sequence[tuple[_Is, float, float]]) -> float:
    """The largest error over its bound."""
    return max((error / bound for _, error, bound in several if bound), default=0.0)


def first_wrong(steps: Iterable[tuple[int, int, Both]], words: "ModuleWording") -> ByModule | None:
    """The first wrong module over (step, rank) in order; None where nothing was compared."""
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
    return ByModule(
        first=words.sentence(wrong, step, rank, compared),
        name="" if wrong is None or wrong.call is None else wrong.call.name,
        is_found=wrong is not None and wrong.call is not None,
        step=step, rank=rank, compared=compared, left_out=own.left_out,
        compiled=tuple(dict.fromkeys((*own.compiled, *both.other.watched.compiled))),
        modules=both.modules(wrong),
    )  # fmt: skip


@dataclass(frozen=True)
class ModuleWording:
    """How a report says it: of a job against its reference, or of two jobs that part."""

    head: str
    right: str
    wrong: str

    def sentence(self, wrong: Wrong | None, step: int, rank: int, compared: int) -> str:
        if wrong is None:
            return f"no module turned right inputs into a wrong output in {compared} calls"
        at = f"step {step}, rank {rank}"
        if wrong.call is None:
            after = "the loss" if wrong.of == _OF_MODEL else "the code that uses it after that"
            return (
                f"the outputs of all modules {self.right}, and the gradient of {wrong.of} "
                f"{self.wrong} ({at}): check {after}"
            )
        one = f"{self.head}: {label(wrong.call)}"
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


def label(call: ModuleCall) -> str:
    again = f", call {call.call}" if call.call else ""
    number = f", forward pass {call.number}" if call.number else ""
    return f"{call.name or 'the model'} ({call.kind}{again}{number})"


def _name(tensor: str) -> str:
    """`0/layers.0#0/out 0` as a report says it."""
    of, _, what = tensor.partition("/")[2].rpartition("/")
    name, put = of.rpartition("#")[0], f"{what.partition(' ')[0]}put"
    return f"the {put} of {name or 'the model'}"


def with_module(
    found: Sequence[Diagnosis], modules: ByModule | None, named: Callable[[str], Diagnosis]
) -> list[Diagnosis]:
    """Causes with the first wrong module in the evidence of the first one; where nothing explains
    what failed, it is the cause that is `named` by this evidence.
    """
    if modules is None or not modules.is_found or not found:
        return list(found)
    first, *others = found
    evidence = f"{first.evidence}; {modules.first}"
    if first.cause == "unexplained":
        return [named(evidence), *others]
    return [msgspec.structs.replace(first, evidence=evidence), *others]
