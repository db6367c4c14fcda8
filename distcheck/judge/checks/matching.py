"""Compares tensors of all ranks with an expectation; equal bits only once."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from distcheck.judge.checks.comparison import (
    Comparison,
    compare_bitwise,
    compare_by_norm,
    compare_numbers,
    compare_within,
    tensor_difference,
)
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.compression import CompressedFit, CompressedForm
from distcheck.judge.oracles.forms import (
    EitherForm,
    ExactBits,
    ExactNumbers,
    Form,
    WithinBound,
    WithinNorm,
    WithoutBias,
)
from distcheck.recordings.differing import Pair
from distcheck.recordings.recording import OF_A_STEP, Entry, EntryState, Kind, Recording
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import TensorSpec

Compare = Callable[[torch.Tensor], Comparison]


def match_ranks(
    tally: Tally,
    trace: TraceReader,
    kind: Kind,
    step: int,
    index: int,
    *,
    ranks: Iterable[int],
    compare: Compare | None,
    slot: int | None = None,
    zero_will_do: bool = False,
) -> None:
    """Compare one tensor of every rank with one expectation, after the step or in a different
    `slot`.

    `compare` is None if no tensor is expected (a parameter without a gradient). With
    `zero_will_do`, a zero tensor is accepted in that case. A tensor that was never recorded is not
    counted, so the verdict becomes unknown.
    """
    if slot is None:
        slot = step if kind in OF_A_STEP else step + 1
    spec = trace.layout.specs(kind)[index]
    known: dict[bytes, Comparison] = {}
    for rank in ranks:
        entry = trace.entry(rank, kind, slot, index)
        if compare is None and zero_will_do and is_zero(trace.tensor(rank, kind, slot, index)):
            tally.count(parameter=spec.name, rank=rank, step=step, elements=spec.elements)
            tally.remark(
                f"{spec.name} has a zero gradient, but the single-process reference has none; "
                "this is accepted as long as the optimizer does not change the parameter"
            )
            continue
        if entry.state is not EntryState.STORED or compare is None:
            _count_missing(tally, entry.state, spec, rank, step, expected=compare is not None)
            continue
        if entry.digest not in known:
            tensor = trace.tensor(rank, kind, slot, index)
            assert tensor is not None, "what is stored has bytes"
            known[entry.digest] = compare(tensor)
        tally.add(known[entry.digest], parameter=spec.name, rank=rank, step=step)


def comparison_for_form(form: Form | None, tally: Tally) -> Compare | None:
    """Return the comparison for a form; None if no tensor is expected. Excuses are recorded."""
    if form is None:
        return None
    if isinstance(form, ExactBits):
        return partial(compare_bitwise, expected=form.expected)
    if isinstance(form, ExactNumbers):
        return partial(compare_numbers, expected=form.expected)
    if isinstance(form, WithinBound):
        nan = form.nan_is_expected
        return partial(compare_within, expected=form.mean, bound=form.bound, nan_is_expected=nan)
    if isinstance(form, WithinNorm):
        return partial(_compare_norm, form)
    if isinstance(form, WithoutBias):
        return partial(_compare_rounding, form, tally)
    if isinstance(form, CompressedForm):
        return lambda actual: compressed_comparison(actual, form, form.fit(actual))
    return partial(_compare_either, form, tally)


def _compare_rounding(form: WithoutBias, tally: Tally, actual: torch.Tensor) -> Comparison:
    """Compare elements, and if each is within its bound, sums of their errors."""
    within = form.within
    found = compare_within(actual, within.mean, within.bound)
    error, bound = form.errors.worst_sum(actual)
    if not found.ok or error <= bound:
        return found
    tally.remark(
        f"rounding is biased: the weighted sum of the errors of {actual.numel()} elements is "
        f"{error / bound:.3g} times the bound of unbiased rounding (false alarm probability "
        f"{form.errors.probability:.1g})"
    )
    norms = float(actual.double().norm()), float(within.mean.norm())
    place = tensor_difference(*norms, error, bound)
    return Comparison(actual.numel(), place, place)


def _compare_norm(form: WithinNorm, actual: torch.Tensor) -> Comparison:
    found = compare_by_norm(
        actual, form.expected, form.tolerance, nan_is_expected=form.nan_is_expected
    )
    assert found.worst is not None, "a comparison by norm has one place"
    may_be_rounding = not found.ok and float(found.worst.error) <= form.rounding
    return replace(found, undecided=form.why) if may_be_rounding else found


def compressed_comparison(
    actual: torch.Tensor, form: CompressedForm, found: CompressedFit
) -> Comparison:
    """Convert the fit of a compressed result to a comparison of norms."""
    norms = float(actual.double().norm()), float(form.mean.norm())
    place = tensor_difference(*norms, found.error, found.bound)
    return Comparison(actual.numel(), place, place if found.why else None)


def _compare_either(form: EitherForm, tally: Tally, actual: torch.Tensor) -> Comparison:
    first, second = (comparison_for_form(one, tally) for one in (form.first, form.second))
    assert first is not None
    assert second is not None
    found = first(actual)
    if found.ok:
        return found
    by_second = second(actual)
    if form.excuse and not by_second.ok:
        return found  # a failure of both is measured by the first
    if form.excuse:
        tally.excuse(form.excuse)
    return by_second


def report_omitted_tensors(
    tally: Tally, trace: TraceReader, kind: Kind, slot: int, index: int, ranks: Iterable[int]
) -> None:
    """Report tensors that a strategy's accessor omitted on ranks that completed the step."""
    accessor = "full_gradients" if kind is Kind.GRADIENT else "full_parameters"
    for rank in ranks:
        unwritten = trace.entry(rank, kind, slot, index).state is EntryState.UNWRITTEN
        if unwritten and trace.header(rank, slot).written:
            name = trace.layout.specs(kind)[index].name
            tally.missing(f"{accessor}(model) returned nothing for {name}")
            return


def is_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not bool(tensor.any())


def _count_missing(
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
        f"{spec.name} on rank {rank} at step {step} is {actual[state]}; expected {wanted}{shape}",
        parameter=spec.name,
        rank=rank,
        step=step,
        actual=actual[state],
        expected=wanted,
    )


_WORDS = {
    EntryState.UNWRITTEN: "not recorded",
    EntryState.ABSENT: "absent",
    EntryState.STORED: "there",
    EntryState.MALFORMED: "of a different shape or dtype",
}


def compare_pair(
    tally: Tally,
    pair: Pair,
    then: Recording,
    now: Recording,
    *,
    name: str,
    compare: Callable[[torch.Tensor, torch.Tensor], Comparison] = compare_bitwise,
    has_tensors: bool = True,
) -> int:
    """Add a pair whose digests differ; return the number of elements compared by value. Without
    tensors, the digests are reported in place of values.
    """
    place: dict[str, Any] = {"parameter": name, "rank": pair.rank, "step": pair.step}
    if pair.kind is None:
        reason = f"{name} of rank {pair.rank} at step {pair.step} differed between two runs"
        actual, expected = _show_value(pair.two, pair.one), _show_value(pair.one, pair.two)
        tally.fail(reason, actual=actual, expected=expected, **place)
        return 0
    if {pair.one.state, pair.two.state} != {EntryState.STORED}:
        there, here = _WORDS[pair.one.state], _WORDS[pair.two.state]
        reason = f"{name} of rank {pair.rank} at step {pair.step} was {there} in one run, {here} in"
        tally.fail(f"{reason} the other", actual=here, expected=there, **place)
        return 0
    found = [
        recording.tensor(pair.rank, pair.kind, pair.slot, pair.index) if has_tensors else None
        for recording in (now, then)
    ]
    if found[0] is None or found[1] is None:
        reason = f"{name} of rank {pair.rank} at step {pair.step} has a different digest"
        tally.fail(reason, actual=_show_value(pair.two), expected=_show_value(pair.one), **place)
        return 0
    forms = [f"{one.dtype} {tuple(one.shape)}" for one in found if one is not None]
    if forms[0] != forms[1]:
        reason = f"{name} has a different shape or dtype"
        tally.fail(reason, actual=forms[0], expected=forms[1], **place)
        return 0
    comparison = compare(found[0], found[1])
    tally.add(comparison, **place)
    return comparison.elements


def _show_value(value: Any, other: Any = None) -> float | str:
    """Return the value for a report; for a list as text, only the parts that `other` lacks."""
    if isinstance(value, Entry):
        return f"digest {value.digest.hex()[:8]}"
    if isinstance(value, bytes):
        return value.hex()[:8]
    if isinstance(value, str) and isinstance(other, str):
        return ", ".join(part for part in value.split(", ") if part not in other.split(", "))
    return value if isinstance(value, float) else "different IDs"
