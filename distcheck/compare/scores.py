"""Compares two files of per-token log-probabilities (`recordings/scores.py`).

For the scored token i let d_i be the difference, f_i its noise floor (the larger of the two files,
including rounding differences of their own variants), and f the mean of f_i. The files agree if
mean |d_i| <= 2 f and |d_i| <= 8 max(f_i, f) for every token. They disagree if mean |d_i| > 8 f or
1 % of the tokens exceed their bounds, in two sequences and 10 % of them or more. Anything between
is not decided: kernels that accumulate in another precision can exceed f, and a discontinuity, such
as the routing of a mixture of experts, can move a token and those after it by more than the
perturbations did.

A cause is named only if the files determine it: the log-probabilities that a mistake would give,
which a file of `distcheck.scores` has, match the other file; or recorded facts differ.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from distcheck.compare.records import CaseComparison, ScoredToken, ScoresComparison
from distcheck.compare.scoring import LARGE, SMALL, TF32
from distcheck.compare.screen import KnownCase
from distcheck.judge.divergence.noise_floor import NOISE_FACTOR
from distcheck.machine.numerics import spacing
from distcheck.recordings.scores import DTYPES, Scores, aligned, read_scores
from distcheck.records import Case, Change, Diagnosis, VerdictName
from distcheck.records.causes import name_cause

_ID = "scores"
_PASSES = 2.0  # Measured: correct engines differ by 0.0 to 0.9 times the noise floor
_FEW = 0.01  # Heuristic: share of tokens beyond their bound that a discontinuity may explain
_FEW_SEQUENCES = 0.1  # Heuristic: the same for sequences
_LEFT = 0.02  # Heuristic: share of these that a named mistake may leave, such as ties at a top-p
_CLOSER = 0.5  # Heuristic: residual of the best hypothesis, relative to the second best
_LEAST_ROUNDING = 0.01  # Heuristic: of the noise floor of a coarser dtype
_SIMILAR = 4.0  # Heuristic: ratio of a variant's distance and that of the files
_LEAST = 16  # Heuristic: numbers that show a dtype, and positions that show a first one
_WORST, _MOST_PLACES, _MOST_NAMED = 10, 4096, 3
# Cause of a column of a file, and how the other file's scores relate to its own if they match.
_CAUSE_OF = {
    "temperature": ("scores-temperature", "at {}"),
    "top-p": ("scores-renormalized", "renormalized after {}"),
    "top-k": ("scores-renormalized", "renormalized after {}"),
    "shifted": ("scores-shifted", "{}"),
    "again": ("scores-not-repeatable", "computed again"),
    "batch": ("scores-depend-on-batch", "with another batch"),
    "padding": ("scores-depend-on-padding", "with padding on the other side"),
}
_CHANGE = {
    "again": "change when they are computed again,",
    "batch": "change with the size and order of the batch,",
    "padding": "change with the side of the padding,",
}
_CANDIDATES = {
    "again": "dropout",
    "batch": "a kernel that depends on the batch",
    "padding": "padding that is attended or counted",
}


@dataclass(frozen=True)
class _Side:
    """One file, with its columns in the order of the first one."""

    scores: Scores
    order: torch.Tensor

    @property
    def name(self) -> str:
        return str(self.scores.file)

    @property
    def logprobs(self) -> torch.Tensor:
        return self.scores.logprobs[self.order]

    def group(self, kind: str) -> dict[str, torch.Tensor]:
        return {name: one[self.order] for name, one in self.scores.group(kind).items()}


class _Comparison:
    """Both files, the difference, and its bounds."""

    def __init__(self, one: Scores, two: Scores) -> None:
        self.sides = _Side(one, torch.arange(len(one.sequence))), _Side(two, aligned(one, two))
        self.abouts = one.about, two.about
        self.sequence, self.position, self.token = one.sequence, one.position, one.token
        self.difference = self.sides[1].logprobs - self.sides[0].logprobs
        self.distance = self.difference.abs()
        self.mean = float(self.distance.mean())
        floors = [s.scores.floor[s.order] for s in self.sides if s.scores.floor is not None]
        self.is_measured = bool(floors)
        floors += [s.scores.spacing[s.order] for s in self.sides if floors]
        self.floor = torch.stack(floors).amax(0) if floors else torch.zeros_like(self.distance)
        limit = NOISE_FACTOR * float(self.floor.mean())
        self.variants: list[tuple[_Side, str, float]] = []  # beyond rounding, with mean distances
        for side in self.sides if floors else ():
            for name, column in side.group("with").items():
                distance = (column - side.logprobs).abs()
                if float(distance.mean()) > limit:
                    self.variants.append((side, name, float(distance.mean())))
                else:
                    self.floor = torch.maximum(self.floor, distance)
        # Every quotient is a number, also if all tokens are certain.
        self.level = max(float(self.floor.mean()), sys.float_info.min)
        self.bound = NOISE_FACTOR * self.floor.clamp_min(self.level)
        self.beyond = self.distance > self.bound
        self.differ = len(self.sequence[self.beyond].unique())  # sequences
        share = float(self.beyond.double().mean())
        exceeds = self.mean > NOISE_FACTOR * self.level or share >= _FEW
        total = len(one.lengths)
        several = self.differ >= min(total, max(2, _FEW_SEQUENCES * total))
        self.fails = self.is_measured and exceeds and several

    def pairs(self) -> Iterator[tuple[_Side, _Side]]:
        yield from (self.sides, self.sides[::-1])


def compare_scores(then: Path, now: Path, *, bits: bool) -> tuple[CaseComparison, KnownCase]:
    """Compare two files. Raises UsageError for damaged ones, and for different sequences."""
    found = _Comparison(read_scores(then), read_scores(now))
    verdict, reason = _verdict(found, bits=bits)
    case = Case(id=_ID, strategy=f"{then} {now}", world=1, workload="job", data="job")
    result = CaseComparison(
        id=_ID,
        verdict=verdict,
        bits="changed" if found.mean else "same",
        reason=reason,
        changes=tuple(_declared_changes(found)),
        diagnosis=(_cause(found),) if found.fails else (),
        scores=_described(found),
    )
    return result, KnownCase(case, {}, "")


def _declared_changes(found: _Comparison) -> Iterator[Change]:
    for name in ("dtype", "temperature", "step"):
        was, is_now = (getattr(about, name) for about in found.abouts)
        if was != is_now and not {was, is_now} & {"", None}:
            yield Change(kind="settings", name=name, then=str(was), now=str(is_now))


def _verdict(found: _Comparison, *, bits: bool) -> tuple[VerdictName, str]:
    number = int(found.beyond.sum())
    many = f"{number:,} of {len(found.beyond):,} tokens {'is' if number == 1 else 'are'}"
    if bits and found.mean:
        return "fail", "bits differ, and --bits was passed"
    if not found.is_measured and not found.mean:
        return "pass", "all log-probabilities are identical"
    if not found.is_measured:
        return "unknown", (
            "neither file has a noise floor; write one of them with distcheck.scores(file, "
            "sequences, model)"
        )
    if found.fails:
        return "fail", f"more than rounding; {many} beyond the bound"
    if number:
        return "unknown", (
            f"{many} beyond the bound, in {found.differ} of {len(found.sides[0].scores.lengths):,} "
            "sequences: a mistake in single tokens or sequences, or a discontinuity such as the "
            "routing of a mixture of experts"
        )
    if found.mean > _PASSES * found.level:
        return "unknown", (
            f"the mean is between {_PASSES:g}x the noise floor, which correct engines have not "
            f"exceeded, and {NOISE_FACTOR:g}x, from which on it is a mistake"
        )
    for side, name, distance in found.variants:
        return "unknown", (
            f"the files agree, but the scores of {side.name} {_CHANGE.get(name, name)} by "
            f"{distance / found.level:.3g}x the noise floor"
        )
    if weights := _cause_of_weights(found):
        return "unknown", f"the files agree within the noise floor, but {weights.evidence}"
    if hidden := _hidden(found):
        return "unknown", f"the noise floor is so wide that it hides {hidden}"
    return "pass", "within the bound at every token"


def _hidden(found: _Comparison) -> str:
    """Return the simplest mistakes that the bound of the mean would not detect."""
    sizes = {f"a temperature error of {1 - LARGE:.0%}": _effect_of_temperature(found, LARGE)}
    for side in found.sides:
        column, exists = _shifted(side, found, 1)
        size = float((column - side.logprobs)[exists].abs().mean()) if exists.any() else 0.0
        sizes["scores shifted by one token"] = size
    bound = _PASSES * found.level
    return " and ".join(name for name, size in sizes.items() if size is not None and size <= bound)


def _effect_of_temperature(found: _Comparison, factor: float) -> float | None:
    """Return the mean change of log-probabilities by a relative temperature error, if known."""
    groups = [(side, side.group("if")) for side in found.sides]
    names = [f"temperature {side.scores.about.temperature * factor:.6g}" for side, _ in groups]
    sizes = [
        float((columns[name] - side.logprobs).abs().mean())
        for (side, columns), name in zip(groups, names, strict=True)
        if name in columns
    ]
    return min(sizes, default=None)


def _not_detected(found: _Comparison) -> tuple[str, ...]:
    """Return mistakes that a pass would not have detected, from the bound of the mean."""
    bound = _PASSES * found.level
    said = [f"a mean distance below {bound:.2g} nats"] if bound else []
    if small := _effect_of_temperature(found, SMALL):
        said.append(f"a temperature error below {100 * bound * (1 - SMALL) / small:.2g} %")
    low = {about.dtype for about in found.abouts} & {"bfloat16", "float16", TF32}
    more = [f"mistakes hidden by {one}: scoring both sides in float32 detects more" for one in low]
    return (*said, *more)


def _shifted(side: _Side, found: _Comparison, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of each sequence shifted by one token, and where they exist."""
    exists = found.sequence == found.sequence.roll(by)
    exists[0 if by > 0 else -1] = False
    return side.logprobs.roll(by), exists


# -- causes ----------------------------------------------------------------------------------------


def _cause(found: _Comparison) -> Diagnosis:
    """Return the cause that the files determine, or a list of those that they do not exclude."""
    determined = (
        _cause_by_hypothesis(found)
        or _cause_of_variant(found)
        or _cause_of_dtype(found)
        or _cause_of_weights(found)
        or _cause_by_position(found)
    )
    if determined is not None:
        return determined
    said = "not rounding; the files cannot tell which of: " + ", ".join(_candidates(found))
    lengths = found.sides[0].scores.lengths
    shorter = (lengths < lengths.max()).nonzero()[:, 0]
    if torch.equal(found.sequence[found.beyond].unique(), shorter):
        said += "; only the longest sequences agree, which need no padding"
    return name_cause("unexplained", said, "scores")


def _cause_by_hypothesis(found: _Comparison) -> Diagnosis | None:
    """Return the cause of the columns that match the other file, if there is only one."""
    matches: list[tuple[float, int, str, str]] = []
    everywhere = torch.ones_like(found.beyond)
    for number, (side, other) in enumerate(found.pairs()):
        groups = {**side.group("if"), **side.group("with")}
        columns = {name: (one, everywhere) for name, one in groups.items()}
        columns |= {f"shifted by {by:+d} token": _shifted(side, found, by) for by in (1, -1)}
        for name, (column, where) in columns.items():
            cause, how = _CAUSE_OF.get(name.split()[0], ("", ""))
            distance = (column - other.logprobs).abs()
            left = (distance > found.bound) & where
            if cause and int(left.sum()) <= _LEFT * int((found.beyond & where).sum()):
                residual = float(distance[where & ~left].mean())  # ties at a top-p are far off
                text = f"{other.name} has the scores of {side.name} {how.format(name)}"
                matches.append((residual, number, cause, text))
    best, _, cause, text = min(matches, default=(0.0, 0, "", ""))
    rivals = {one for residual, _, one, _ in matches if best > _CLOSER * residual} - {cause}
    if not matches or rivals:
        return None
    return name_cause(
        cause, f"{text}; the remaining difference is {best / found.level:.2g}x the noise floor"
    )


def _cause_of_variant(found: _Comparison) -> Diagnosis | None:
    """Return the cause if one side's own scores change by about the distance of the two files."""
    for side, name, distance in found.variants:
        similar = found.mean / _SIMILAR <= distance <= found.mean * _SIMILAR
        if similar and name in _CHANGE:
            said = f"the scores of {side.name} {_CHANGE[name]} by {distance:.2g} nats in the mean"
            return name_cause(_CAUSE_OF[name][0], f"{said}; the files differ by {found.mean:.2g}")
    return None


def _cause_of_dtype(found: _Comparison) -> Diagnosis | None:
    """Return the cause if one side is rounded to a lower precision, or declares one, and the files
    differ by no more than that.
    """
    for side, other in found.pairs():
        values, others = side.logprobs, other.logprobs
        for dtype in (torch.bfloat16, torch.float16):
            is_short = torch.equal(values, values.to(dtype).double()) and len(values) >= _LEAST
            fits = found.mean <= 2 * spacing(dtype) * float(values.abs().mean())
            if is_short and fits and not torch.equal(others, others.to(dtype).double()):
                said = f"all log-probabilities of {side.name} are numbers of {str(dtype)[6:]}"
                return name_cause("scores-low-precision", f"{said}; those of {other.name} are not")
        names = side.scores.about.dtype, other.scores.about.dtype
        ratio = _coarser(*names)
        if side.scores.floor is None and ratio > 1:
            multiple = found.mean / found.level / ratio
            if _LEAST_ROUNDING <= multiple <= NOISE_FACTOR:
                said = (
                    f"{side.name} is of {names[0]}, {other.name} of {names[1]}; the difference is "
                    f"{multiple:.2g}x the noise floor scaled to the lower precision"
                )
                return name_cause("scores-low-precision", said)
    return None


def _coarser(one: str, other: str) -> float:
    """Return the ratio of the spacings of two dtypes, 0 for unknown names."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    known[TF32] = torch.float16
    if not {one, other} <= known.keys():
        return 0.0
    return spacing(known[one]) / spacing(known[other])


def _cause_of_weights(found: _Comparison) -> Diagnosis | None:
    one, two = found.abouts
    changed = _changed_weights(one.weights, two.weights)
    if changed == []:
        return None
    said = []
    if changed:
        names = ", ".join(changed[:_MOST_NAMED])
        more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
        said = [f"{len(changed)} of {len(one.weights)} parameters differ: {names}{more}"]
    if None not in (one.step, two.step) and one.step != two.step:
        steps = f"the files are of steps {one.step} and {two.step}"
        return name_cause("stale-weights", "; ".join([steps, *said]))
    return name_cause("weights-differ", said[0]) if said else None


def _changed_weights(one: Mapping[str, str], two: Mapping[str, str]) -> list[str] | None:
    """Return the parameters of `one` that `two` does not have; None if their dtypes or shapes
    differ, as with fused parameters.
    """
    kinds = [Counter(value.rpartition(" ")[0] for value in side.values()) for side in (one, two)]
    if not one or kinds[0] != kinds[1]:
        return None
    left = Counter(two.values())
    left.subtract(one.values())
    return [name for name, value in one.items() if left[value] < 0]


def _cause_by_position(found: _Comparison) -> Diagnosis | None:
    """Return the cause if all sequences agree before one position, and differ from there on."""
    distances, floors = (_means(one, found.position) for one in (found.distance, found.floor))
    shares = {
        position: distance / max(floor or 0.0, found.level)
        for position, (distance, floor) in enumerate(zip(distances, floors, strict=True))
        if distance is not None
    }
    far = [position for position, share in shares.items() if share > NOISE_FACTOR]
    first = min(far, default=0)
    before = [share for position, share in shares.items() if position < first]
    if (
        len(before) < _LEAST
        or max(before) > _PASSES
        or len(far) < 0.9 * (len(shares) - len(before))
    ):
        return None
    reach = found.sequence[found.position == first].unique()
    near = found.beyond & (found.position < first + _LEAST)
    if len(reach) < 2 or not torch.isin(reach, found.sequence[near]).all():
        return None
    said = f"{len(reach)} sequences agree up to position {first - 1} and differ from {first} on"
    return name_cause("scores-differ-by-position", said)


def _candidates(found: _Comparison) -> Iterator[str]:
    """Yield the mistakes that the files do not exclude."""
    one, two = found.abouts
    variants = [side.group("with") for side in found.sides]
    if any(bool((sign * found.difference > -found.bound).all()) for sign in (1, -1)):
        yield "a renormalization after top-p, top-k or min-p (all differences have the same sign)"
    else:
        yield f"a temperature or scale{_near(found)}"
    if _changed_weights(one.weights, two.weights) != []:
        yield from ("stale weights", "a LoRA adapter that is not merged", "a quantized layer")
    if not one.dtype or one.dtype != two.dtype:
        yield "another dtype"
    yield from (text for name, text in _CANDIDATES.items() if any(name not in v for v in variants))
    yield "position ids or RoPE"


def _near(found: _Comparison) -> str:
    """Return the temperature that comes closest, if it explains most of the distance."""
    closest = [
        (float((column - other.logprobs).abs().mean()), name)
        for side, other in found.pairs()
        for name, column in side.group("if").items()
        if name.startswith("temperature")
    ]
    distance, name = min(closest, default=(math.inf, ""))
    return f" (near {name})" if distance < found.mean / _SIMILAR else ""


# -- report ----------------------------------------------------------------------------------------


def _described(found: _Comparison) -> ScoresComparison:
    share = found.distance / found.floor.clamp_min(found.level or 1.0)
    worst = share.topk(min(_WORST, len(share))).indices.tolist() if found.mean else []
    first = found.beyond.nonzero()[:1, 0].tolist() if found.is_measured else []
    curves = [
        tuple(zip(*(_means(v, place) for v in (found.distance, found.floor)), strict=True))
        for place in (found.position, found.sequence)
    ]
    return ScoresComparison(
        tokens=len(found.token),
        sequences=int(found.sequence[-1]) + 1,
        mean=found.mean,
        signed_mean=float(found.difference.mean()),
        noise_floor=found.level if found.is_measured else None,
        beyond=int(found.beyond.sum()) if found.is_measured else 0,
        first=_token(found, first[0]) if first else None,
        worst=tuple(_token(found, at) for at in worst),
        not_detected=_not_detected(found),
        by_position=curves[0][:_MOST_PLACES],
        by_sequence=curves[1][:_MOST_PLACES],
    )


def _token(found: _Comparison, at: int) -> ScoredToken:
    return ScoredToken(
        sequence=int(found.sequence[at]),
        position=int(found.position[at]),
        token=int(found.token[at]),
        then=float(found.sides[0].logprobs[at]),
        now=float(found.sides[1].logprobs[at]),
        noise_floor=float(found.floor[at]),
    )


def _means(values: torch.Tensor, place: torch.Tensor) -> list[float | None]:
    """Return the mean over the tokens of each place; None for a place without tokens."""
    counts = place.bincount()
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, values)
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    return [total / number if number else None for total, number in pairs]
