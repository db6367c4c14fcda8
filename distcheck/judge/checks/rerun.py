"""A second, fresh world with the same seeds produced the same bits, everywhere, in every step."""

from collections.abc import Callable

import torch

from distcheck.judge.checks.comparison import Comparison, bitwise
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.tally import Tally
from distcheck.training.traces.layout import EntryState, Kind
from distcheck.training.traces.reader import TraceReader

OVER_STEPS = True  # looks at all steps together, as they were recorded


def compare(evidence: Evidence, tally: Tally) -> None:
    """Everything both runs recorded, by digest; values are looked at where digests differ."""
    if evidence.rerun is None:
        return
    layout = evidence.trace.layout
    unseen = evidence.contract.sync == "out-of-sight"
    kinds = [kind for kind in Kind if kind is not Kind.LOCAL_GRADIENT or not unseen]
    steps = min(evidence.trace.steps_written(), evidence.rerun.steps_written())
    for step in range(steps):
        for rank in evidence.ranks:
            _compare_header(evidence.trace, evidence.rerun, rank, step, tally)
            for kind in kinds:
                after = layout.slots(kind) > layout.steps
                slots = [0, 1] if after and step == 0 else [step + after]
                for slot in slots:
                    for index in range(len(layout.specs(kind))):
                        _compare_slot(evidence, kind, slot, index, rank, step, tally)


def _compare_header(
    first: TraceReader, second: TraceReader, rank: int, step: int, tally: Tally
) -> None:
    one, two = first.header(rank, step), second.header(rank, step)
    pairs: list[tuple[str, object, object, Callable[[object], float | str]]] = [
        ("sample ids", one.ids, two.ids, lambda _: "other ids"),
        ("loss", one.loss, two.loss, lambda v: float(v)),  # type: ignore[arg-type]
        ("RNG state", one.rng_digest, two.rng_digest, lambda v: v.hex()[:8]),  # type: ignore[attr-defined]
    ]
    for name, before, after, show in pairs:
        same = before == after or (before != before and after != after)  # two NaNs
        if not same:
            tally.fail(
                f"{name} of rank {rank} at step {step} differed between two runs",
                parameter=name,
                rank=rank,
                step=step,
                actual=show(after),
                expected=show(before),
            )


def _compare_slot(
    evidence: Evidence, kind: Kind, slot: int, index: int, rank: int, step: int, tally: Tally
) -> None:
    assert evidence.rerun is not None
    spec = evidence.trace.layout.specs(kind)[index]
    one = evidence.trace.entry(rank, kind, slot, index)
    two = evidence.rerun.entry(rank, kind, slot, index)
    if EntryState.UNWRITTEN in (one.state, two.state):
        return
    name = f"{spec.name} ({kind.label})"
    if (one.state, one.digest) == (two.state, two.digest):
        tally.add(Comparison(True, spec.elements), parameter=name, rank=rank, step=step)
        return
    actual = evidence.rerun.tensor(rank, kind, slot, index)
    expected = evidence.trace.tensor(rank, kind, slot, index)
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        tally.add(bitwise(actual, expected), parameter=name, rank=rank, step=step)
        return
    tally.fail(
        f"{name} of rank {rank} at step {step} was there in one run only",
        parameter=name,
        rank=rank,
        step=step,
    )
