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


def checks_without_reference(
    job: JobRecording, agreed: Collection[int] = (), *, folded: bool = True
) -> list[CheckResult]:
    """Return the results of all checks that need no reference, in report order.

    At steps whose gradients `agreed` with the reference, intermediate gradients cannot fail a
    check. For the scale of an accumulated loss, this applies only if accumulation was compared with
    one batch (`folded`), because a single process repeats a mistake in the scale.
    """
    own_steps = averaging.averaging(job)
    if own_steps is not None:
        return [*data_parallel_checks(job), own_steps]
    return [
        *data_parallel_checks(job),
        *_recheck_remaining_steps(exchange.gradients, job, agreed),
        *_recheck_remaining_steps(exchange.clipping, job, agreed),
        *_recheck_remaining_steps(exchange.loss_scale, job, agreed if folded else ()),
        exchange.carried(job),
        ranks.agreement(job),
    ]


def data_parallel_checks(job: JobRecording) -> list[CheckResult]:
    """Return the checks that hold for every data-parallel training, however it synchronizes
    gradients.
    """
    return [
        samples.disjoint_samples(job),
        *samples.order(job),
        ranks.initial_state(job),
        *ranks.random_streams(job),
        ranks.settings(job),
        *ranks.scaler(job),
    ]


def _recheck_remaining_steps(
    check: Check, job: JobRecording, agreed: Collection[int]
) -> Iterator[CheckResult]:
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
