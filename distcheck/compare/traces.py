"""Compares two traces of one case, in the order in which their ranks computed them."""

from functools import partial

from distcheck.compare.differing import StepBounds
from distcheck.compare.records import COMPARE, CompareRequest
from distcheck.judge.parting.walk import Walk
from distcheck.machine import seeds
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records.parting import TraceComparison
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.reporter import Reporter


@COMPARE.does
def compare_job(job: CompareRequest, fds: Descriptors, reporter: Reporter) -> TraceComparison:
    """Compares all of both traces."""
    seeds.pin_determinism()
    then, now = (
        TraceReader(fds[name], layout, tensors=job.tensors)
        for name, layout in zip(COMPARE.descriptors, job.layouts, strict=True)
    )
    return compare_traces(job, then, now, reporter)


def compare_traces(
    job: CompareRequest, then: TraceReader, now: TraceReader, reporter: Reporter | None = None
) -> TraceComparison:
    """Everything that both recorded, by digest; values are looked at where digests differ, if the
    job has tensors.
    """
    if then.layout.model != now.layout.model:
        return TraceComparison(why_not="the model has other parameters, buffers or optimizer state")
    steps = min(then.steps_written(), now.steps_written())
    if steps < job.case.steps:
        return TraceComparison(why_not=f"both recorded {steps} of {job.case.steps} steps")
    walk = Walk(
        then, now, tensors=job.tensors, drifts_on=job.case.with_data[0],
        bounds=partial(StepBounds, job, then),
    )  # fmt: skip
    for step in range(steps):
        if reporter is not None:
            reporter.progress(step, "compare")
        walk.compare_step(step)
    return walk.result()
