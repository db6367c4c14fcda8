"""Whether events of the ranks' own gradients, and of the tensors that have them, happened.

As in `happened_in_loop.py`: "" where an event happened, and otherwise what was seen.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distcheck.judge.checks.recording import RunOfEvents, all_there, holds_any
from distcheck.machine.numerics import wide
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.layout import memory_order, spec_bytes
from distcheck.records import TensorSpec
from distcheck.records import expected_events as events


def _is_on(on: str, holds: Sequence[bool]) -> bool:
    number, ranks = sum(holds), len(holds)
    return {
        "every rank": number == ranks,
        "some ranks": 0 < number < ranks,
        "one rank": number == 1 < ranks,
        "every rank but one": ranks > 1 and number == ranks - 1,
    }[on]


def _counts(found: Sequence[tuple[int, Sequence[bool]]], what: str) -> str:
    """How many ranks it held on, step by step."""
    if not found:
        return "seen: no such parameter"
    shown = ", ".join(f"{sum(holds)} of {len(holds)} at step {step}" for step, holds in found)
    return f"seen: {what} on {shown}"


def no_gradient(event: events.NoGradient, run: RunOfEvents) -> str:
    """None is what backward leaves where the loss does not reach a parameter."""
    found = [(step, [g is None for g in own]) for step, own in run.named(event.parameter)]
    had = not event.after_one
    for _, absent in found:
        if had and _is_on(event.on, absent):
            return ""
        had = had or not any(absent)
    return _counts(found, f"no gradient of {event.parameter}")


def zero_gradient(event: events.ZeroGradient, run: RunOfEvents) -> str:
    found = [
        (step, [g is not None and not holds_any(g) for g in own])
        for step, own in run.named(event.parameter)
    ]
    if any(_is_on(event.on, zero) for _, zero in found):
        return ""
    return _counts(found, f"a gradient of zero of {event.parameter}")


def not_finite(event: events.NotFinite, run: RunOfEvents) -> str:
    if run.training.loss_scale is not None:
        return "seen: a GradScaler"
    for _, own in run.named(event.parameter):
        if any(g is not None and not bool(g.isfinite().all()) for g in own):
            return ""
    return f"seen: finite gradients of {event.parameter} in all {len(run.steps)} steps"


def magnitude(event: events.Magnitude, run: RunOfEvents) -> str:
    """At some step, on every rank."""
    seen = f"seen: no gradient of {event.parameter} on every rank"
    for step, own in run.named(event.parameter):
        there = [wide(g).abs().flatten() for g in own if g is not None]
        sizes = torch.cat(there) if len(there) == len(own) else torch.empty(0)
        sizes = sizes[sizes > 0]
        if not sizes.numel():
            continue
        least, most = float(sizes.min()), float(sizes.max())
        if event.least <= least and most <= event.most:
            return ""
        seen = f"seen: sizes from {least:.3g} to {most:.3g} at step {step}"
    return seen


def rows_apart(event: events.RowsApart, run: RunOfEvents) -> str:
    """By which rows hold anything but zeros."""
    for _, own in run.named(event.parameter):
        rows = {tuple(g.reshape(len(g), -1).any(1).tolist()) for g in own if g is not None}
        if len(rows) > 1:
            return ""
    return f"seen: the same rows of {event.parameter} on every rank"


def _in_both_parts(gradient: torch.Tensor | None) -> bool:
    """Whether it is not zero, neither in its real nor in its imaginary part."""
    if gradient is None or not gradient.is_complex():
        return holds_any(gradient)
    return holds_any(gradient.real) and holds_any(gradient.imag)


def dtypes(event: events.Dtypes, run: RunOfEvents) -> str:
    """Complex ones need both parts."""
    found = {
        spec.dtype
        for index, spec in enumerate(run.specs)
        for step in (run.steps if spec.dtype in event.dtypes else ())
        if any(_in_both_parts(gradient) for gradient in run.own(step, index))
    }
    missing = [dtype for dtype in event.dtypes if dtype not in found]
    return f"seen: none of {', '.join(missing)}" if missing else ""


def twins(event: events.Twins, run: RunOfEvents) -> str:
    """At one step, on one rank."""
    most = 0
    for step in run.steps:
        groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for index, spec in enumerate(run.specs):
            gradient = run.own(step, index)[0]
            if gradient is None or not holds_any(gradient):
                continue
            alike = groups.setdefault((spec.shape, spec.dtype), [])
            if not any(torch.equal(gradient, other) for other in alike):
                alike.append(gradient)
        most = max([most, *map(len, groups.values())])
    return "" if most >= event.least else f"seen: at most {most}"


def _there(run: RunOfEvents, holds: Callable[[TensorSpec], bool]) -> list[TensorSpec]:
    """The parameters with a property that every rank had a gradient of, at one step at least."""
    owns = ((s, i) for i, s in enumerate(run.specs) if holds(s))
    return [
        spec
        for spec, index in owns
        if any(all_there(run.own(expectation, index)) for expectation in run.steps)
    ]


def shapes(event: events.Shapes, run: RunOfEvents) -> str:
    """Also of shapes without elements, whose gradients cannot be other than zero."""
    found = {spec.shape for spec in _there(run, lambda spec: spec.shape in event.shapes)}
    missing = [shape for shape in event.shapes if shape not in found]
    return f"seen: none of shape {', '.join(map(str, missing))}" if missing else ""


def more_elements(event: events.MoreElements, run: RunOfEvents) -> str:
    most = max((s.elements for i, s in enumerate(run.specs) if run.exchanged(i)), default=0)
    return "" if most > event.elements else f"seen: at most {most:,}"


def more_bytes(event: events.MoreBytes, run: RunOfEvents) -> str:
    most = max((spec_bytes(s) for i, s in enumerate(run.specs) if run.exchanged(i)), default=0)
    return "" if most > event.nbytes else f"seen: at most {most:,}"


def remainder(event: events.Remainder, run: RunOfEvents) -> str:
    world = len(run.ranks)
    found = _there(run, lambda spec: spec.elements % world != 0)
    return "" if found else f"seen: every number of elements is a multiple of {world}"


def permuted(event: events.Permuted, run: RunOfEvents) -> str:
    """As the ranks recorded it before the first step."""
    for index, spec in enumerate(run.specs):
        strides = torch.empty(spec.shape, device="meta").stride()
        order = run.trace.entry(0, Kind.PARAMETER, 0, index).order
        if order and order != memory_order(spec.shape, strides) and run.exchanged(index):
            return ""
    return "seen: every parameter lies in the order of its indices"


def tied(event: events.Tied, run: RunOfEvents) -> str:
    """By the names that the model has for its parameters."""
    twice = run.as_prepared[0].twice_named
    found = [i for i, spec in enumerate(run.specs) if spec.name in twice and run.exchanged(i)]
    return "" if found else f"seen: {len(twice)} parameters with two names"


def one_storage(event: events.OneStorage, run: RunOfEvents) -> str:
    """By the model as the workload builds it."""
    shared = run.as_prepared[0].in_one_storage
    found = [i for i, spec in enumerate(run.specs) if spec.name in shared and run.exchanged(i)]
    return "" if len(found) > 1 else f"seen: {len(shared)} parameters with a storage in common"


def kinds(event: events.Kinds, run: RunOfEvents) -> str:
    """Every parameter, on some rank and at some step."""
    there = run.as_prepared[0].kinds
    missing = [kind for kind in event.kinds if kind not in there]
    if missing:
        return f"seen: no {', '.join(missing)}"
    silent = [
        spec.name
        for index, spec in enumerate(run.specs)
        if not any(holds_any(g) for step in run.steps for g in run.own(step, index))
    ]
    return f"seen: no gradient of {', '.join(silent)}" if silent else ""
