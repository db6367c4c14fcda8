"""What a recording must hold: pure functions of it, each a check of the report.

samples     which samples the ranks had, and in which order
ranks       what must be the same on all ranks, and what must not
exchange    gradients are the mean of the ranks' gradients; clipping; the scale of the loss
terms       that scale, of a loss that adds several terms up
"""

from distcheck.job.checks import exchange, ranks, samples
from distcheck.job.reading import Recording
from distcheck.records import CheckResult


def without_reference(job: Recording) -> list[CheckResult]:
    """Every check that needs the job alone, in the order of the report."""
    return [
        samples.disjoint(job),
        *samples.order(job),
        ranks.initial_state(job),
        *ranks.random_streams(job),
        exchange.gradients(job),
        *exchange.clipping(job),
        *exchange.loss_scale(job),
        ranks.settings(job),
        *ranks.scaler(job),
        ranks.agreement(job),
    ]
