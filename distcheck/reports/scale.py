"""How the error of one strategy grows with the world size: curves over the cases of a document.

A curve has one strategy, workload, dtype and reduction order. The error comes from the check
`gradients`: from the first layer in `_LAYERS` that was compared, and there from the element whose
error is largest relative to its bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from distcheck.records import CaseReport, Difference, Number, VerdictName
from distcheck.records.decoding import World
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64, ROUNDING, layer_label

_LAYERS = (ROUNDING, IN_FLOAT32, IN_FLOAT64)
_BACKEND = "simulated"


@dataclass(frozen=True)
class Point:
    """One world of a curve. `error` and `bound` are None if no rank reached the comparison."""

    world: int
    verdict: VerdictName
    error: float | None = None
    bound: float | None = None
    where: str = ""
    cause: str = ""
    reason: str = ""  # of an unknown verdict

    @property
    def share(self) -> float | None:
        if self.error is None or not self.bound:
            return None
        return self.error / self.bound


@dataclass(frozen=True)
class Curve:
    """The worlds of one reduction order, from smallest to largest."""

    strategy: str
    workload: str
    dtype: str
    order: str
    layer: str
    points: list[Point] = field(default_factory=list)

    @property
    def first_failure(self) -> Point | None:
        return next((point for point in self.points if point.verdict == "fail"), None)

    @property
    def comes_to(self) -> str:
        failed = self.first_failure
        if failed is not None:
            smaller = [point.world for point in self.points if point.world < failed.world]
            before = f"; the next smaller world size tested is {max(smaller)}" if smaller else ""
            why = f" ({failed.cause})" if failed.cause else ""
            return f"first fails at world size {failed.world}{why}{before}"
        unknown = [str(point.world) for point in self.points if point.verdict != "pass"]
        if unknown:
            return f"does not fail, but is unknown at world size {', '.join(unknown)}"
        first, last = self.points[0].world, self.points[-1].world
        return f"passes at all {len(self.points)} world sizes from {first} to {last}"


class ScaleEntry(msgspec.Struct, kw_only=True):
    """The error in one simulated world: its size and reduction order."""

    strategy: str
    workload: str
    dtype: str
    order: str
    world: World
    verdict: VerdictName
    layer: str
    error: Number | None
    bound: Number | None
    where: str
    cause: str
    reason: str


def curves(cases: Sequence[CaseReport]) -> list[Curve]:
    """Return the curves of a document's cases; none unless it has simulated worlds of different
    sizes.
    """
    found: dict[tuple[str, str, str, str], list[CaseReport]] = {}
    for report in cases:
        case = report.case
        name, _, order = case.backend.partition(":")
        if name == _BACKEND:
            key = (case.strategy, case.workload, case.dtype, order or "gloo")
            found.setdefault(key, []).append(report)
    kept = {
        key: sorted(group, key=lambda report: report.case.world)
        for key, group in found.items()
        if len({report.case.world for report in group}) == len(group) > 1
    }
    layers = {key: _layer_of(group) for key, group in kept.items()}
    return [
        Curve(*key, layers[key], [_point(case, layers[key]) for case in group])
        for key, group in kept.items()
    ]


def scale_entries(cases: Sequence[CaseReport]) -> list[ScaleEntry]:
    """Return the curves for `--json`: one entry for each world and reduction order."""
    return [
        ScaleEntry(
            strategy=curve.strategy,
            workload=curve.workload,
            dtype=curve.dtype,
            order=curve.order,
            layer=curve.layer,
            world=point.world,
            verdict=point.verdict,
            error=_json_number(point.error),
            bound=_json_number(point.bound),
            where=point.where,
            cause=point.cause,
            reason=point.reason if point.verdict == "unknown" else "",
        )
        for curve in curves(cases)
        for point in curve.points
    ]


def _layer_of(cases: Sequence[CaseReport]) -> str:
    for layer in _LAYERS:
        if any(_worst(case, layer) is not None for case in cases):
            return layer
    return ""


def _worst(case: CaseReport, layer: str) -> Difference | None:
    for check in case.checks:
        worst = check.worst
        if check.check == "gradients" and check.layer == layer and worst is not None:
            return worst if worst.unit else None
    return None


def _point(case: CaseReport, layer: str) -> Point:
    worst = _worst(case, layer)
    causes = case.diagnosis
    cause = causes[0].cause if causes and case.verdict != "pass" else ""
    unknown = [check for check in case.checks if check.verdict == "unknown"]
    reason = next((check.reason for check in unknown if check.reason), "")
    if not case.checks:  # no check was reached
        reason = next(iter(case.notes), "")
    point = Point(case.case.world, case.verdict, cause=cause, reason=reason)
    if worst is None:
        return point
    return replace(
        point,
        error=float(worst.error),
        bound=float(worst.bound),
        where=f"{worst.parameter}, rank {worst.rank}, step {worst.step}",
    )


def _json_number(value: float | None) -> float | str | None:
    if value is None or value - value == 0:  # finite
        return value
    return str(value)


def describe_layer(layer: str) -> str:
    return f"gradients ({layer_label(layer)})" if layer else "gradients"
