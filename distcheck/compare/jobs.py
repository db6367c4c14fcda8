"""Two recordings of training jobs, as `distcheck job --save` keeps them, side by side."""

from pathlib import Path
from typing import Any

from distcheck.compare.judging import judged
from distcheck.compare.outputs import KnownCase
from distcheck.compare.records import CaseComparison, TraceComparison
from distcheck.compare.traces import Walk
from distcheck.errors import UsageError
from distcheck.plan.provenance import Provenance, changes_for_bits
from distcheck.recordings.jobs.reading import REPORT, JobRecording, read
from distcheck.recordings.recording import Kind
from distcheck.records import Case
from distcheck.reports.documents import read_report

_NAME = "job"


def compare_jobs(then: Path, now: Path, *, bits: bool) -> tuple[CaseComparison, KnownCase]:
    """What two recordings have in common. Raises UsageError for a folder that is damaged."""
    earlier, later = (read(folder) for folder in (then, now))
    reports = [read_report(folder / REPORT) for folder in (then, now)]
    for folder, report in zip((then, now), reports, strict=True):
        if len(report["cases"]) != 1:
            raise UsageError(
                f"{folder / REPORT} is damaged: a job has one case, and it has "
                f"{len(report['cases'])}; run distcheck job again"
            )
    known = [_known(report) for report in reports]
    found = _compare(earlier, later)
    changed = changes_for_bits(
        Provenance(environment=known[0].environment),
        Provenance(environment=known[1].environment),
        known[1].case,
    )
    verdicts = (reports[0]["cases"][0]["verdict"], reports[1]["cases"][0]["verdict"])
    return judged(_NAME, found, changed, verdicts, bits=bits, needs_bound=True), known[1]


def _known(report: dict[str, Any]) -> KnownCase:
    entry = report["cases"][0]
    fields = ("strategy", "world", "backend", "device", "dtype", "batch", "steps", "seed")
    case = Case(id=_NAME, workload="job", data="job", **{name: entry[name] for name in fields})
    return KnownCase(case, report["environment"], entry["strategy_file"])


def _compare(then: JobRecording, now: JobRecording) -> TraceComparison:
    why_not = _unlike(then, now)
    if why_not:
        return TraceComparison(why_not=why_not)
    walk = Walk(then, now)
    for step in range(then.steps_written()):
        walk.compare_step(step)
    return walk.result()


def _unlike(then: JobRecording, now: JobRecording) -> str:
    """Why two recordings are not of one training; empty where they may be."""
    if then.world != now.world:
        return f"the earlier job has {then.world} ranks, and the later one {now.world}"
    if then.divided_by or now.divided_by:
        return f"ranks hold parts of one model ({then.divided_by or now.divided_by})"
    if then.steps != now.steps or not then.steps:
        several = [", ".join(map(str, one.steps)) or "none" for one in (then, now)]
        return f"the earlier recording has the steps {several[0]}, and the later one {several[1]}"
    for kind in (Kind.PARAMETER, Kind.BUFFER):
        one, two = then.names(kind), now.names(kind)
        if one != two:
            other = next((n for n in [*one, *two] if (n in one) != (n in two)), "")
            where = f"only one of both has {other}" if other else "they come in another order"
            return f"the models have other {kind.label}s: {where}"
    return ""
