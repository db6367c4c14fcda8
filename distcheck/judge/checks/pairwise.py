"""One thing that two recordings hold, into a tally: by digest first, then by value."""

from collections.abc import Callable
from typing import Any

import torch

from distcheck.judge.checks.comparison import Comparison, bitwise
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.differing import Pair
from distcheck.recordings.recording import Entry, EntryState, Recording

_WORDS = {
    EntryState.UNWRITTEN: "not recorded",
    EntryState.ABSENT: "not there",
    EntryState.STORED: "there",
    EntryState.MALFORMED: "of another shape or dtype",
}


def compare_pair(
    tally: Tally,
    pair: Pair,
    then: Recording,
    now: Recording,
    *,
    name: str,
    compare: Callable[[torch.Tensor, torch.Tensor], Comparison] = bitwise,
    has_tensors: bool = True,
) -> int:
    """Adds a pair whose digests differ; returns how many elements were compared by value. Without
    tensors their digests stand for them.
    """
    place: dict[str, Any] = {"parameter": name, "rank": pair.rank, "step": pair.step}
    if pair.kind is None:
        reason = f"{name} of rank {pair.rank} at step {pair.step} differed between two runs"
        actual, expected = _shown(pair.two, pair.one), _shown(pair.one, pair.two)
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
        reason = f"{name} of rank {pair.rank} at step {pair.step} has another digest"
        tally.fail(reason, actual=_shown(pair.two), expected=_shown(pair.one), **place)
        return 0
    forms = [f"{one.dtype} {tuple(one.shape)}" for one in found if one is not None]
    if forms[0] != forms[1]:
        reason = f"{name} has another shape or dtype"
        tally.fail(reason, actual=forms[0], expected=forms[1], **place)
        return 0
    comparison = compare(found[0], found[1])
    tally.add(comparison, **place)
    return comparison.elements


def _shown(value: Any, other: Any = None) -> float | str:
    """As a report has it; of a text that is a list, what the other one lacks."""
    if isinstance(value, Entry):
        return f"digest {value.digest.hex()[:8]}"
    if isinstance(value, bytes):
        return value.hex()[:8]
    if isinstance(value, str) and isinstance(other, str):
        return ", ".join(part for part in value.split(", ") if part not in other.split(", "))
    return value if isinstance(value, float) else "other ids"
