"""What a recording must hold: pure functions of it, each a check of the report.

samples     which samples the ranks had, and in which order
ranks       what must be the same on all ranks, and what must not
exchange    gradients are the mean of the ranks' gradients; clipping; the scale of the loss
terms       that scale, of a loss that adds several terms up
averaging   whether ranks step by their own gradients, and exchange parameters later
reference   all that needs the script as one process; folded: its passes as one batch
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
            reason = result.reason or f"what ranks hold differs from what it says{where}"
            result = replace(
                result, verdict="pass", worst=None, first=None,
                reason=f"{reason}; the optimizer got the gradients of one process all the same",
            )  # fmt: skip
        else:
            result = rest
    if result is not None:
        yield result
