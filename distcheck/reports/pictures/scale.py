"""Draws the error, and its bound, against the world size. Both axes are logarithmic."""

import math

from distcheck.reports.pictures import Drawing, Picture, Table, cell, cross, figure, line_path
from distcheck.reports.pictures import point as place_at
from distcheck.reports.scale import Curve, describe_layer

_LEFT, _RIGHT, _TOP, _HEIGHT = 58, 14, 10, 170
_SIDE = 8.0  # of a mark
_MOST_DECADES = 6  # numbered decades


def draw(name: str, curve: Curve, beside: list[Curve]) -> Picture:
    """Draw the curve of one reduction order. Its axes fit all curves in `beside`, which includes
    this curve.
    """
    drawing = Drawing(name, 320)
    right, bottom = drawing.width - _RIGHT, _TOP + _HEIGHT
    worlds = sorted({point.world for one in beside for point in one.points})
    low, high = _range(beside)

    def x(world: int) -> float:
        share = math.log(world / worlds[0]) / math.log(worlds[-1] / worlds[0])
        return _LEFT + 12 + (right - _LEFT - 24) * share

    def y(value: float | None) -> float | None:
        if value is None or not math.isfinite(value) or value <= 0:
            return None
        return bottom - _HEIGHT * (math.log10(value) - low) / (high - low)

    stride = -(-(high - low) // _MOST_DECADES)
    for decade in range(low, high + 1, stride):
        level = bottom - _HEIGHT * (decade - low) / (high - low)
        drawing.path("axis", f"M{_LEFT} {level:.1f}H{right}")
        drawing.text(_LEFT - 6, level + 4, f"1e{decade:+d}", kind="faint", end="end")
    placed = -1e9
    for world in worlds:
        if x(world) - placed >= 26:
            drawing.text(x(world), bottom + 16, str(world), kind="faint", end="middle")
            placed = x(world)
    drawing.text(_LEFT - 6, bottom + 16, "world", kind="faint", end="end")
    bounds = [place_at(x(p.world), y(p.bound)) for p in curve.points]
    errors = [place_at(x(p.world), y(p.error)) for p in curve.points]
    drawing.path("required", line_path(bounds))
    drawing.path("within" if curve.first_failure is None else "off", line_path(errors))
    for point, place in zip(curve.points, errors, strict=True):
        failed = point.verdict == "fail"
        if place is None and not failed:
            continue
        at_x, at_y = place or (x(point.world), float(_TOP))
        box = (at_x - _SIDE / 2, at_y - _SIDE / 2, _SIDE, _SIDE)
        drawing.path(
            "over" if failed else "bar", cell(*box), title=_describe_point(curve, point.world)
        )
        if failed:
            drawing.path("cross", cross(*box))
    at_edge = any(p.verdict == "fail" and not _is_drawable(p.error) for p in curve.points)
    title = f"Error against world size: order {curve.order}"
    says = (
        f"{curve.strategy} {curve.comes_to}. Solid line: the largest error of the "
        f"{describe_layer(curve.layer)}. Dashed line: its bound. A cross marks a world that fails"
        f"{'; at the upper edge, a world without an error to draw' if at_edge else ''}."
    )
    table = Table(
        ["world", "verdict", "error", "bound", "error / bound", "where"],
        [
            [
                str(p.world),
                p.verdict,
                *map(figure, (p.error, p.bound, p.share)),
                p.where or p.cause,
            ]
            for p in curve.points
        ],
    )
    return Picture(title, says, drawing.markup(bottom + 22, title=title, says=says), table)


def _is_drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _range(curves: list[Curve]) -> tuple[int, int]:
    """Return the first and last decade of a range with all errors and bounds; at least
    two decades.
    """
    values = [v for c in curves for p in c.points for v in (p.error, p.bound)]
    logs = [math.log10(v) for v in values if v is not None and _is_drawable(v)] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return (low, high) if high - low >= 2 else (low - 1, low + 1)


def _describe_point(curve: Curve, world: int) -> str:
    point = next(p for p in curve.points if p.world == world)
    error = "no error" if point.error is None else f"error {figure(point.error)}"
    bound = "" if point.bound is None else f", bound {figure(point.bound)}"
    return f"world {world}: {point.verdict}, {error}{bound}"
