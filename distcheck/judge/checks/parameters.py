"""Given the reduced gradients, the optimizer's update is that of a single process.

A different check judges the gradients. Here each rank's recorded gradients, parameters and
optimizer state go through the same optimizer in one process, and the result must be bit-identical.
In workload `exact`, parameters are known in closed form. Sharded optimizer state is compared on the
rank that holds it. Under local SGD, ranks must hold the mean of all ranks' updates after every
average (layer rounding).
"""

from collections.abc import Sequence
from functools import partial

from distcheck.judge.checks import sensitivity
from distcheck.judge.checks.comparison import compare_within
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.matching import comparison_for_form, match_ranks
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.averaging import mean_over_ranks
from distcheck.judge.oracles.forms import After, ExactParameters, Form, Updates, UpdatesToAverage
from distcheck.recordings.recording import Kind


def compare(evidence: Evidence, tally: Tally) -> None:
    for expectation in evidence.expectations:
        what = expectation.what
        if isinstance(what, ExactParameters):
            _compare_exact(evidence, expectation, what, tally)
        elif isinstance(what, UpdatesToAverage):
            _compare_average(evidence, expectation, what, tally)
        elif isinstance(what, Updates):
            _compare_updates(evidence, expectation, what, tally)


def _compare_updates(
    evidence: Evidence, expectation: Expectation, updates: Updates, tally: Tally
) -> None:
    ranks = evidence.with_data if evidence.mesh is None else evidence.ranks
    for rank, after in zip(ranks, updates.after, strict=True):
        if after is not None:  # otherwise counted as not compared
            _compare_rank(evidence, rank, expectation.step, after, updates, tally)


def _compare_rank(
    evidence: Evidence, rank: int, step: int, after: After, updates: Updates, tally: Tally
) -> None:
    for kind, forms in after.items():
        if kind is Kind.PARAMETER and updates.averaged:
            continue  # expected by the rounding bound: the mean over the ranks
        for index, expected in enumerate(forms):
            if kind is Kind.OPTIMIZER and index in updates.holders:
                holders = updates.holders[index]
                if rank == 0:
                    _one_holder(evidence, index, step, holders, expected, tally)
                if rank not in holders:
                    continue
            match_ranks(
                tally, evidence.trace, kind, step, index,
                ranks=[rank], compare=comparison_for_form(expected, tally),
            )  # fmt: skip


def _compare_average(
    evidence: Evidence, expectation: Expectation, averaged: UpdatesToAverage, tally: Tally
) -> None:
    """Compare with the mean of every rank's own update (local SGD), after averaging steps."""
    step = expectation.step
    for index, alike in enumerate(zip(*averaged.parts, strict=True)):
        present = [tensor for tensor in alike if tensor is not None]
        mean = mean_over_ranks(present)
        before = evidence.trace.tensor(evidence.ranks[0], Kind.PARAMETER, step, index)
        found = sensitivity.mistakes_shown_by_average(evidence.ranks, present, mean.bound, before)
        if found is not None:
            name = evidence.trace.layout.model.parameters[index].name
            tally.record_revealed(found, parameter=name, step=step)
        match_ranks(
            tally, evidence.trace, Kind.PARAMETER, step, index,
            ranks=evidence.ranks,
            compare=partial(compare_within, expected=mean.mean, bound=mean.bound),
        )  # fmt: skip


def _compare_exact(
    evidence: Evidence, expectation: Expectation, exact: ExactParameters, tally: Tally
) -> None:
    for index, form in enumerate(exact.parameters):
        match_ranks(
            tally, evidence.trace, Kind.PARAMETER, expectation.step, index,
            ranks=evidence.holding, compare=comparison_for_form(form, tally),
        )  # fmt: skip


def _one_holder(
    evidence: Evidence,
    index: int,
    step: int,
    holders: Sequence[int],
    expected: Form | None,
    tally: Tally,
) -> None:
    """Check that each sharded state is held by exactly one rank."""
    spec = evidence.trace.layout.model.optimizer[index]
    if len(holders) == (expected is not None):
        if not holders:
            tally.count(parameter=spec.name, rank=0, step=step, elements=spec.elements)
        return
    found = f"ranks {', '.join(map(str, holders))}" if holders else "no rank"
    tally.fail(
        f"{spec.name} after step {step} is held by {found}; sharded state must be held by "
        "exactly one rank",
        parameter=spec.name,
        rank=holders[-1] if holders else 0,
        step=step,
        actual=found,
        expected="one rank" if expected is not None else "no rank",
    )
