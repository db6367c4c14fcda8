"""Comparing what is in memory after a call with what is expected; plain Python, to the bit."""

from collections.abc import Sequence
from typing import Any

from distcheck.backend_probe import patterns
from distcheck.backend_probe.patterns import Value
from distcheck.backend_probe.scene import Buffer, Layout, ProbeScene, surroundings, untouched


def before_call(buffer: Buffer, layout: Layout, dtype: str) -> list[Value]:
    """The storage as it is handed over; an output holds what it must not hold afterwards."""
    values = buffer.before
    if values is None:
        values = untouched(buffer.after or (), dtype)
    return layout.place(values, surroundings(dtype, layout.size))


def find_difference(
    *, actual: list[Any], buffer: Buffer, layout: Layout, scene: ProbeScene, before: list[Value]
) -> str:
    """What is wrong with a storage after the call, in words; empty if nothing is."""
    around = surroundings(scene.dtype, layout.size)
    required: list[Any] = buffer.after if buffer.after is not None else _taken(actual, layout)
    expected = layout.place(required, around)
    if actual == expected:
        return ""
    wrong = [i for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if a != e]
    if scene.reduction == "AVG" and buffer.after is not None:
        wrong = [i for i in wrong if not _is_mean(actual[i], expected[i], scene)]
    return _describe(wrong, actual, expected, before, layout) if wrong else ""


def _taken(storage: list[Any], layout: Layout) -> list[Any]:
    rows, cols = layout.shape
    down, right = layout.strides
    return [
        storage[layout.offset + row * down + col * right]
        for row in range(rows)
        for col in range(cols)
    ]


def _is_mean(actual: Any, expected: Any, scene: ProbeScene) -> bool:
    """A mean is never an int, what surrounds it is, and is held to the bit. NaN is never near."""
    if isinstance(expected, int):
        return False
    return bool(abs(actual - expected) <= patterns.mean_bound(scene.dtype, expected, scene.world))


def _describe(
    wrong: Sequence[int],
    actual: list[Any],
    expected: list[Any],
    before: list[Value],
    layout: Layout,
) -> str:
    rows, cols = layout.shape
    down, right = layout.strides
    places = {
        layout.offset + row * down + col * right: (row, col)
        for row in range(rows)
        for col in range(cols)
    }
    inside = [index for index in wrong if index in places]
    outside = len(wrong) - len(inside)
    parts = []
    if inside:
        first = inside[0]
        row, col = places[first]
        text = f"[{row},{col}] is {_show(actual[first])}, expected {_show(expected[first])}"
        text += f"; {len(inside)} of {rows * cols} elements differ"
        if all(actual[index] == before[index] for index in inside):
            text += ", all unchanged by the call"
        parts.append(text)
    if outside:
        parts.append(f"{outside} elements outside of it were written")
    return "; ".join(parts)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, complex):
        return f"{_show(value.real)}{'' if str(value.imag)[0] in '-n' else '+'}{_show(value.imag)}j"
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)
