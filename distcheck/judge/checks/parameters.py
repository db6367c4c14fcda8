"""Given the reduced gradients, the optimizer's update is that of a single process.

A different check judges the gradients. Here each rank's recorded gradients, parameters and
optimizer state go through the same optimizer in one process, and the result must be bit-identical.
In workload `exact`, parameters are known in closed form. Sharded optimizer state is compared on the
rank that holds it. If ranks combine parameters by an accepted design, such as local SGD, they must
hold that combination of all ranks' updates (layer rounding).
"""

from collections.abc import Sequence
from functools import partial

from distcheck.judge.checks import sensitivity
from distcheck.judge.checks.comparison import compare_within
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.matching import comparison_for_form, match_ranks
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.forms import After, CombinedTensors, ExactParameters, Form, Updates
from distcheck.recordings.recording import Kind


def compare(evidence: Evidence, tally: Tally) -> None:
    for expectation in evidence.expectations:
        what = expectation.what
        if isinstance(what, ExactParameters):
            _compare_exact(evidence, expectation, what, tally)
        elif isinstance(what, CombinedTensors):
            _compare_combined(evidence, expectation, what, tally)
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
        for index, expected in enumerate(forms):
            if (kind, index) in updates.combined:
                continue  # expected by the rounding bound
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


def _compare_combined(
    evidence: Evidence, expectation: Expectation, combined: CombinedTensors, tally: Tally
) -> None:
    """Compare with a combination of every rank's own update, once for ranks that share it."""
    step = expectation.step
    for kind, index in combined.tensors:
        by_rank = combined.of(kind, index)
        before = evidence.trace.tensor(evidence.ranks[0], kind, step, index)
        for one in {id(one): one for one in by_rank}.values():
            if one is not None and kind is Kind.PARAMETER:
                found = sensitivity.mistakes_shown_by_combination(evidence.ranks, one, before)
                if found is not None:
                    name = evidence.trace.layout.specs(kind)[index].name
                    tally.record_revealed(found, parameter=name, step=step)
            match_ranks(
                tally, evidence.trace, kind, step, index,
                ranks=[rank for rank in evidence.ranks if by_rank[rank] is one],
                compare=None if one is None
                else partial(compare_within, expected=one.found.mean, bound=one.found.bound),
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
