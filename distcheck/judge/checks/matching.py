"""Matching what ranks recorded against expectations, tensor by tensor.

Ranks that recorded the same bits are compared once and counted each.
"""

from collections.abc import Callable, Iterable

import torch

from distcheck.judge.checks.comparison import Comparison
from distcheck.judge.checks.evidence import recorded
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import TensorSpec

Compare = Callable[[torch.Tensor], Comparison]


def match_ranks(
    tally: Tally,
    trace: TraceReader,
    *,
    kind: Kind,
    slot: int,
    step: int,
    index: int,
    ranks: Iterable[int],
    compare: Compare | None,
    zero_will_do: bool = False,
) -> None:
    """Compares one tensor of every rank with one expectation.

    `compare` is None where no tensor is expected (a parameter without a gradient); with
    `zero_will_do` one that is zero everywhere is the same. What a rank never recorded is not
    counted: the verdict will then be unknown.
    """
    spec = trace.layout.specs(kind)[index]
    known: dict[bytes, Comparison] = {}
    for rank in ranks:
        found = recorded(trace, rank, kind, slot, index)
        if compare is None and zero_will_do and is_zero(found.tensor):
            tally.count(parameter=spec.name, rank=rank, step=step, elements=spec.elements)
            tally.remark(
                f"{spec.name} has a gradient of zero where one machine has none, which counts as "
                "right as long as the optimizer does not move it"
            )
            continue
        state, digest = found.entry.state, found.entry.digest
        if state is not EntryState.STORED or compare is None:
            _without_tensor(tally, state, spec, rank, step, expected=compare is not None)
            continue
        if digest not in known:
            assert found.tensor is not None, "what is stored has bytes"
            known[digest] = compare(found.tensor)
        tally.add(known[digest], parameter=spec.name, rank=rank, step=step)


def note_not_given(
    tally: Tally, trace: TraceReader, kind: Kind, slot: int, index: int, ranks: Iterable[int]
) -> None:
    """Says that a strategy's accessor has left a tensor out, on ranks that finished the step."""
    accessor = "full_gradients" if kind is Kind.GRADIENT else "full_parameters"
    for rank in ranks:
        unwritten = trace.entry(rank, kind, slot, index).state is EntryState.UNWRITTEN
        if unwritten and trace.header(rank, slot).written:
            name = trace.layout.specs(kind)[index].name
            tally.missing(f"{accessor}(model) returned nothing for {name}")
            return


def is_zero(tensor: torch.Tensor | None) -> bool:
    """Whether it is there, and holds nothing but zeros."""
    return tensor is not None and not bool(tensor.any())


def _without_tensor(
    tally: Tally, state: EntryState, spec: TensorSpec, rank: int, step: int, *, expected: bool
) -> None:
    if state is EntryState.UNWRITTEN:
        return
    tally.count(parameter=spec.name, rank=rank, step=step, elements=spec.elements)
    if state is EntryState.ABSENT and not expected:
        return
    actual = {
        EntryState.ABSENT: "absent",
        EntryState.STORED: "a tensor",
        EntryState.MALFORMED: "malformed",
    }
    wanted = "a tensor" if expected else "absent"
    shape = f" of shape {spec.shape} and dtype {spec.dtype}" if expected else ""
    tally.fail(
        f"{spec.name} on rank {rank} at step {step} is {actual[state]}; "
        f"expected is {wanted}{shape}",
        parameter=spec.name,
        rank=rank,
        step=step,
        actual=actual[state],
        expected=wanted,
    )
