"""Growth of one strategy's error with the world size: curves over the cases of a document.

A curve has one strategy, workload, dtype and summation order. Its error is that of the check
`gradients`, in the first of the layers below that has one: the place where the error is closest to
its bound, or exceeds it most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from distcheck.records import Difference, VerdictName
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64, ROUNDING, shown_layer
from distcheck.reports.document import CaseEntry, ScaleEntry, entry_from_sources

_LAYERS = (ROUNDING, IN_FLOAT32, IN_FLOAT64)
_BACKEND = "simulated"


@dataclass(frozen=True)
class Point:
    """A world of a curve. `error` and `bound` are None if no rank got so far."""

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
    """The worlds of one order, from the smallest to the largest."""

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
            before = f"; the largest world below it is {max(smaller)}" if smaller else ""
            why = f": {failed.cause}" if failed.cause else ""
            return f"first fails in world {failed.world}{why}{before}"
        unknown = [str(point.world) for point in self.points if point.verdict != "pass"]
        if unknown:
            return f"does not fail, and is unknown in world {', '.join(unknown)}"
        return f"passes in every world from {self.points[0].world} to {self.points[-1].world}"


def curves(cases: Sequence[CaseEntry]) -> list[Curve]:
    """Return the curves of a document's cases; empty unless simulated worlds differ in size."""
    found: dict[tuple[str, str, str, str], list[CaseEntry]] = {}
    for case in cases:
        name, _, order = case.backend.partition(":")
        if name == _BACKEND:
            key = (case.strategy, case.workload, case.dtype, order or "gloo")
            found.setdefault(key, []).append(case)
    kept = {
        key: sorted(group, key=lambda case: case.world)
        for key, group in found.items()
        if len({case.world for case in group}) == len(group) > 1
    }
    layers = {key: _layer_of(group) for key, group in kept.items()}
    return [
        Curve(*key, layers[key], [_point(case, layers[key]) for case in group])
        for key, group in kept.items()
    ]


def as_rows(cases: Sequence[CaseEntry]) -> list[ScaleEntry]:
    """Return the curves for `--json`: a row for each world and order."""
    return [
        entry_from_sources(
            ScaleEntry,
            point,
            curve,
            error=_json_number(point.error),
            bound=_json_number(point.bound),
            reason=point.reason if point.verdict == "unknown" else "",
        )
        for curve in curves(cases)
        for point in curve.points
    ]


def _layer_of(cases: Sequence[CaseEntry]) -> str:
    for layer in _LAYERS:
        if any(_worst(case, layer) is not None for case in cases):
            return layer
    return ""


def _worst(case: CaseEntry, layer: str) -> Difference | None:
    for check in case.checks:
        worst = check.worst
        if check.check == "gradients" and check.layer == layer and worst is not None:
            return worst if worst.unit else None
    return None


def _point(case: CaseEntry, layer: str) -> Point:
    worst = _worst(case, layer)
    causes = case.diagnosis
    cause = causes[0].cause if causes and case.verdict != "pass" else ""
    unknown = [check for check in case.checks if check.verdict == "unknown"]
    reason = next((check.reason for check in unknown if check.reason), "")
    if not case.checks:  # no check was reached
        reason = next(iter(case.notes), "")
    point = Point(case.world, case.verdict, cause=cause, reason=reason)
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


def described(layer: str) -> str:
    return f"gradients ({shown_layer(layer)})" if layer else "gradients"
