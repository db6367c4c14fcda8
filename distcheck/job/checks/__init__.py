"""Checks of a recorded job: pure functions of the recording.

samples     the samples of each rank, and their order
ranks       state that must be the same on all ranks, and RNG streams that must differ
exchange    reduced gradients are the mean of the local gradients; clipping; the loss scale
terms       the loss scale, for losses with several terms
averaging   detects local SGD: ranks that step by local gradients and average parameters later
reference   comparisons with the single-process reference
accumulation  comparison of accumulated gradients with those of one batch
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec.structs import replace

from distcheck.job.checks import averaging, exchange, ranks, samples
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.records import CheckResult

Check = Callable[[JobRecording, Sequence[int]], CheckResult | None]


def without_reference(
    job: JobRecording, agreed: Collection[int] = (), *, folded: bool = True
) -> list[CheckResult]:
    """Every check that needs the job alone, in the order of the report. At steps that `agreed` with
    the reference, what looks at gradients on their way has nothing to say against. Of the scale of
    an accumulated loss that is so where accumulation was compared with one batch (`folded`): one
    process makes the same mistake.
    """
    own_steps = averaging.averaging(job)
    if own_steps is not None:
        return [*of_ranks(job), own_steps]
    return [
        *of_ranks(job),
        *_outranked(exchange.gradients, job, agreed),
        *_outranked(exchange.clipping, job, agreed),
        *_outranked(exchange.loss_scale, job, agreed if folded else ()),
        exchange.carried(job),
        ranks.agreement(job),
    ]


def of_ranks(job: JobRecording) -> list[CheckResult]:
    """What holds for every training in parallel, whatever ranks exchange."""
    return [
        samples.disjoint(job),
        *samples.order(job),
        ranks.initial_state(job),
        *ranks.random_streams(job),
        ranks.settings(job),
        *ranks.scaler(job),
    ]


def _outranked(check: Check, job: JobRecording, agreed: Collection[int]) -> Iterator[CheckResult]:
    result = check(job, job.steps)
    if result is not None and result.verdict == "fail" and agreed:
        rest = check(job, [step for step in job.steps if step not in agreed])
        if rest is None or rest.verdict != "fail":
            where = "" if result.first is None else f", from step {result.first.step} on"
            reason = result.reason or f"ranks do not hold the expected gradients{where}"
            result = replace(
                result, verdict="pass", worst=None, first=None,
                reason=f"{reason}; the gradients passed to the optimizer match the reference",
            )  # fmt: skip
        else:
            result = rest
    if result is not None:
        yield result
