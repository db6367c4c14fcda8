"""The optimizer did with the synchronised gradients what it does with them on one machine.

Gradients are judged on their own; here each rank's recorded gradients, parameters and optimizer
state go through the same optimizer in one process, and the result must be bit-identical. In
the lattice the parameters are known in closed form, whatever was recorded. State that is sharded
over the ranks is taken from, and compared on, the rank that holds it. Ranks that may train by
themselves must hold, after every average, the mean of what their own updates left (R).
"""

from functools import partial

import torch

from distcheck.judge.checks import sensitivity
from distcheck.judge.checks.comparison import bitwise, equal_numbers, within
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import is_zero, match_ranks
from distcheck.judge.checks.rounded_sums import rounds
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.averaging import mean_of
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.judge.oracles.lattice_tensors import as_tensor
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.records.layers import ROUNDING
from distcheck.training.traces.layout import Kind


def compare(evidence: Evidence, tally: Tally) -> None:
    """Parameters and optimizer state after every step."""
    if tally.layer == "lattice":
        for expectation in evidence.expectations:
            # As exact as gradients were; from where those were rounded on, from recorded state.
            how = _compare_updates if rounds(expectation) else _compare_lattice
            how(evidence, expectation, tally)
        return
    for expectation in evidence.expectations:
        if tally.layer == ROUNDING:
            _compare_average(evidence, expectation, tally)
            continue
        _compare_updates(evidence, expectation, tally)


def _compare_updates(evidence: Evidence, expectation: StepExpectation, tally: Tally) -> None:
    reference = expectation.update
    updates: dict[bytes, dict[Kind, list[torch.Tensor | None]]] = {}
    for position, rank in enumerate(evidence.with_data):
        inputs = reference.input_digest(position, expectation.step)
        if inputs not in updates:
            try:
                updates[inputs] = reference.run(position, expectation.step)
                if zeros := _zeros_for_none(evidence, rank, expectation):
                    moved = reference.run(position, expectation.step, absent=zeros)
                    updates[inputs][Kind.PARAMETER] = moved[Kind.PARAMETER]
            except NotRecordedError:
                continue  # counted as not compared
        _compare_rank(evidence, rank, expectation, updates[inputs], tally)


def _zeros_for_none(evidence: Evidence, rank: int, expectation: StepExpectation) -> set[int]:
    """Parameters that have a gradient of zero where they should have none. The optimizer may keep
    state for them; it must not move them (momentum and weight decay do).
    """
    specs = evidence.trace.layout.model.parameters
    zeros = {
        index
        for index in range(len(specs))
        if is_zero(evidence.trace.tensor(rank, Kind.GRADIENT, expectation.step, index))
    }
    return zeros and {i for i in zeros if all(s.gradients[i] is None for s in expectation.shards)}


def _compare_rank(
    evidence: Evidence,
    rank: int,
    expectation: StepExpectation,
    after: dict[Kind, list[torch.Tensor | None]],
    tally: Tally,
) -> None:
    step, averages = expectation.step, expectation.averages
    for kind, tensors in after.items():
        if kind is Kind.PARAMETER and averages is not None and averages.at(step):
            continue  # expected under R: the mean over the ranks
        for index, expected in enumerate(tensors):
            if kind is Kind.OPTIMIZER and expectation.update.is_sharded(index):
                holders = expectation.update.holders(step + 1, index)
                if rank == 0:
                    _one_holder(evidence, index, step, holders, expected, tally)
                if rank not in holders:
                    continue
            match_ranks(
                tally,
                evidence.trace,
                kind=kind,
                slot=step + 1,
                step=step,
                index=index,
                ranks=[rank],
                compare=None if expected is None else partial(bitwise, expected=expected),
            )


def _compare_average(evidence: Evidence, expectation: StepExpectation, tally: Tally) -> None:
    """Local SGD: after some steps, the mean of what every rank's own update left."""
    averages, step = expectation.averages, expectation.step
    if averages is None or not averages.at(step):
        return
    try:
        # Copies: the reference works on one model, and the next rank's run writes over it.
        updates = [
            [None if p is None else p.clone() for p in after[Kind.PARAMETER]]
            for after in (expectation.update.run(rank, step) for rank in evidence.ranks)
        ]
    except NotRecordedError:
        return  # counted as not compared
    for index, alike in enumerate(zip(*updates, strict=True)):
        present = [tensor for tensor in alike if tensor is not None]
        mean = mean_of(present)
        before = evidence.trace.tensor(evidence.ranks[0], Kind.PARAMETER, step, index)
        found = sensitivity.of_average(evidence.ranks, present, mean.bound, before)
        if found is not None:
            name = evidence.trace.layout.model.parameters[index].name
            tally.would_show(found, parameter=name, step=step)
        match_ranks(
            tally,
            evidence.trace,
            kind=Kind.PARAMETER,
            slot=step + 1,
            step=step,
            index=index,
            ranks=evidence.ranks,
            compare=partial(within, expected=mean.mean, bound=mean.bound),
        )


def _one_holder(
    evidence: Evidence,
    index: int,
    step: int,
    holders: list[int],
    expected: torch.Tensor | None,
    tally: Tally,
) -> None:
    """Sharded state: what exists is held once, neither lost nor by several."""
    spec = evidence.trace.layout.model.optimizer[index]
    if len(holders) == (expected is not None):
        if not holders:
            tally.count(parameter=spec.name, rank=0, step=step, elements=spec.elements)
        return
    found = f"ranks {', '.join(map(str, holders))}" if holders else "no rank"
    tally.fail(
        f"{spec.name} after step {step} is held by {found}; sharded state is held by exactly one",
        parameter=spec.name,
        rank=holders[-1] if holders else 0,
        step=step,
        actual=found,
        expected="one rank" if expected is not None else "no rank",
    )


def _compare_lattice(evidence: Evidence, expectation: StepExpectation, tally: Tally) -> None:
    for index, spec in enumerate(evidence.trace.layout.model.parameters):
        expected = as_tensor(spec, expectation.lattice.after[spec.name])
        match_ranks(
            tally,
            evidence.trace,
            kind=Kind.PARAMETER,
            slot=expectation.step + 1,
            step=expectation.step,
            index=index,
            ranks=evidence.holding,
            compare=partial(equal_numbers, expected=expected),
        )
