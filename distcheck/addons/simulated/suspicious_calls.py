"""Detects calls that gloo accepts but that are rarely intended. Their results may be correct, so
each finding is only a warning.

warning                finding
other-shapes           ranks pass equally many elements in different shapes or memory layouts
tensor-with-gaps       gloo reads contiguous memory from the first element on, gaps included
overlapping-outputs    outputs of one call share memory, so only the output written last remains
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from distcheck.addons.simulated.calls import SimulatedCall, is_called_by_theirs
from distcheck.addons.simulated.in_flight import memory_in_flight, memory_span, share_bytes
from distcheck.records import posted_calls

_MOST_SAID = 4  # Heuristic: warnings of one name
_MANY = 64  # outputs; more are checked on rank 0 only: 1,024 ranks have a million


class SuspiciousCalls:
    """Checks the calls of a world."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], str] = {}  # by the name and the line

    def in_words(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the message of each warning."""
        counts: dict[str, int] = {}
        for (name, _), text in self._said.items():
            counts[name] = counts.get(name, 0) + 1
            if counts[name] <= _MOST_SAID:
                yield name, text

    def posted(self, call: SimulatedCall) -> None:
        self._look_for_gaps(call)
        if len(call.outputs) > 1 and (len(call.outputs) <= _MANY or call.rank == 0):
            self._look_for_overlaps(call)

    def met(self, calls: Sequence[SimulatedCall]) -> None:
        """Check calls that match: those of a collective, or a send and its receive."""
        first = calls[0]
        if first.is_message:
            sent, received = calls
            if sent.sizes != received.sizes:
                self._warn(
                    "other-shapes",
                    received,
                    f"{_describe_call(sent)} and {_describe_call(received)}: the number of "
                    "elements matches, but the shape does not",
                )
        elif first.kind not in ("all_to_all", "barrier"):
            self._look_at_shapes(calls)

    def _look_at_shapes(self, calls: Sequence[SimulatedCall]) -> None:
        alike = [call for call in calls if call.name == calls[0].name]
        if len({_shapes(call) for call in alike}) > 1:
            said = posted_calls.calls_in_words(alike)
            self._warn(
                "other-shapes",
                alike[0],
                f"{said}: the numbers of elements match, but the shapes do not",
            )
            return
        tensors = {call: call.inputs or call.outputs for call in alike}
        if calls[0].by_index or all(t.is_contiguous() for own in tensors.values() for t in own):
            return
        orders: dict[tuple[tuple[int, ...], ...], list[SimulatedCall]] = {}
        for call, own in tensors.items():
            orders.setdefault(tuple(map(_order, own)), []).append(call)
        if len(orders) > 1:
            said = " and ".join(
                f"{posted_calls.calls_in_words(own)} with strides {', '.join(map(str, order))}"
                for order, own in orders.items()
            )
            self._warn("other-shapes", alike[0], f"{said}: elements are read in memory order")

    def _look_for_gaps(self, call: SimulatedCall) -> None:
        if call.by_index:
            return
        for tensor in (*call.inputs, *call.outputs):
            if not tensor.is_contiguous() and memory_span(tensor) > tensor.numel() > 1:
                strides = "x".join(map(str, tensor.stride()))
                self._warn(
                    "tensor-with-gaps",
                    call,
                    f"{_describe_call(call)} on a tensor with gaps (strides {strides}): gloo "
                    f"reads {tensor.numel()} consecutive elements from memory, starting at its "
                    "first; pass a contiguous tensor, and copy the result back",
                )
                return

    def _look_for_overlaps(self, call: SimulatedCall) -> None:
        held = [memory_in_flight(call, output, True) for output in call.outputs]
        places = [(one, number) for number, one in enumerate(held) if one is not None]
        places.sort(key=lambda place: (place[0].address, place[0].begin))
        for (one, number), (other, next_number) in pairwise(places):
            if one.address == other.address and (
                one.tensor is other.tensor or share_bytes(one, other)
            ):
                first, second = sorted((number, next_number))
                self._warn(
                    "overlapping-outputs",
                    call,
                    f"{_describe_call(call)} with outputs {first} and {second} that share memory: "
                    "the last write wins",
                )
                return

    def _warn(self, name: str, call: SimulatedCall, text: str) -> None:
        if (name, call.where) not in self._said and is_called_by_theirs(call.stack):
            self._said[name, call.where] = text


def _describe_call(call: SimulatedCall) -> str:
    return f"rank {call.rank} called {call.in_words()}{call.where}"


def _shapes(call: SimulatedCall) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that must be equal on all ranks. For a scatter these are the shapes of the
    outputs, because only the root has inputs.
    """
    return tuple(tuple(t.shape) for t in call.outputs) if call.kind == "scatter" else call.sizes


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the dimensions whose size exceeds 1."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in pairs if size > 1)
