"""The source line of the code under test that causes a wrong gradient.

A rank records the calls that its gradients pass through (`worlds/step_calls`). The table of causes
defines the relevant kind of call. If several lines are possible, none is named.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distcheck.judge.checks.merging import earliest_failure
from distcheck.judge.diagnosis.measurements import LineMeasurements, Measurements
from distcheck.records import CallSite, CheckResult, Diagnosis, Difference
from distcheck.records.causes import causes

if TYPE_CHECKING:
    from distcheck.recordings.traces.reader import TraceReader

KINDS = ("given", "exchanges", "reduces")  # kinds of lines, among those in the table of causes
_MOST_PATH = 4096  # characters; the limit of Linux


def measured_lines(trace: "TraceReader", step: int) -> Iterator[LineMeasurements]:
    """Yield the lines of every gradient that all ranks have recorded."""
    if step >= trace.steps_written():
        return
    noted = [trace.lines(rank, step) for rank in range(trace.world)]
    ranks = [lines for lines in noted if lines is not None]
    if len(ranks) < len(noted):
        return
    reducing = {lines.lines[n] for lines in ranks for n in lines.reducing}
    reducing -= {line for one in ranks for n, line in enumerate(one.lines) if n not in one.reducing}
    for index, spec in enumerate(trace.layout.model.parameters):
        if not all(lines.known[index] for lines in ranks):
            continue
        given = [{one.lines[n] for n in one.given[index]} for one in ranks]
        perhaps = [{one.lines[n] for n in one.perhaps[index]} for one in ranks]
        yield LineMeasurements(
            step=step,
            parameter=spec.name,
            given=tuple(sorted(set[str]().union(*given))),
            perhaps=tuple(sorted(set[str]().union(*perhaps))),
            reducing=tuple(sorted(reducing)),
            never_on=tuple(
                rank for rank in range(trace.world) if not given[rank] and not perhaps[rank]
            ),
        )


def line_of_first_wrong(
    found: Sequence[Diagnosis], results: Sequence[CheckResult], facts: Measurements
) -> CallSite | None:
    """Return the line that the first wrong gradient passed through, if all causes agree on it."""
    first = earliest_failure([r for r in results if r.check != "outcome"])
    kinds = {next((k for k in causes()[one.cause].lines if k in KINDS), "") for one in found}
    if first is None or first.first is None or first.check != "gradients":
        return None
    sites = {_site(kind, first.first, facts) for kind in kinds}
    return sites.pop() if len(sites) == 1 else None


def _site(kind: str, place: Difference, facts: Measurements) -> CallSite | None:
    """Return the line of a kind that a gradient passed through."""
    way = next(
        (w for w in facts.ways if (w.step, w.parameter) == (place.step, place.parameter)), None
    )
    if way is None:
        return None
    given, lines = {*way.given}, {*way.given, *way.perhaps}
    if kind == "given":
        if place.rank in way.never_on:
            return CallSite()
        lines = given if len(given) == 1 and not {*way.perhaps} - given else set()
    elif kind == "reduces":
        if not _left_right(facts, place.step):
            return None
        lines = lines if len(lines) == 1 else lines & {*way.reducing} if "" not in lines else set()
    elif kind != "exchanges" or not _was_finite(facts, place.step):
        return None
    return parse_call_site(next(iter(lines))) if len(lines) == 1 else None


def _left_right(facts: Measurements, step: int) -> bool:
    """Return True if a wrong factor came from synchronization, not from the loss."""
    at = next((one for one in facts.steps if one.step == step), None)
    return at is not None and all(factor == 1.0 for factor in at.left_factors)


def _was_finite(facts: Measurements, step: int) -> bool:
    """Return True if infinities, if any, came from synchronization."""
    at = next((one for one in facts.steps if one.step == step), None)
    seen = None if at is None else at.not_finite
    return seen is None or not (seen.before or seen.hidden)


def parse_call_site(line: str) -> CallSite | None:
    """Parse FILE:LINE from a rank; None if it is malformed."""
    file, _, number = line.rpartition(":")
    if not file or len(file) > _MOST_PATH or not number.isdecimal() or len(number) > 9:
        return None
    return CallSite(file=file, line=int(number))
