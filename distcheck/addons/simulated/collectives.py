"""Computes the results of a collective on every rank from the inputs of all ranks.

Ranks are group ranks. Reductions use one of these orders:

gloo                bit-identical to gloo on the CPU: see `backends/gloo.py`
ring                a ring with one chunk for each rank, as NCCL and MPI libraries use for long
                    vectors: chunk c is ((x[c-1] + x[c-2]) + ...) + x[c], indices modulo the world
                    size
tree                neighbors first: (x0 + x1) + (x2 + x3), then their sums; a rank without a
                    neighbor waits for the next level
recursive-halving   ranks at half the distance first: x[i] + x[i + p/2], with p the largest power of
                    two within the world size; ranks from p on first add their vectors to those of
                    ranks 0, 1, ...
rank                ((x0 + x1) + x2) + ...
"""

from collections.abc import Callable, Sequence

import torch

from distcheck.addons.simulated.calls import SimulatedCall
from distcheck.backends import gloo
from distcheck.machine import compat

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def reduce_in_order(
    order: str, collective: str, shards: list[torch.Tensor], combine: Combine = torch.add
) -> torch.Tensor:
    """Return a new vector [n]: the vectors [n] of all ranks, given in rank order, reduced with
    `combine` in one of the `ORDERS`. `collective` is "all_reduce" or "reduce".
    """
    if len(shards) == 1:
        return shards[0].clone()
    if order == "gloo":
        bounds = gloo.chunk_bounds if collective != "reduce" else gloo.reduce_chunk_bounds
        found = bounds(shards[0].numel(), shards[0].element_size(), len(shards))
        return gloo.ring_sum(shards, found, combine)
    return _IN_ORDER[order](shards, combine)


def _ring(shards: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    elements, world = shards[0].numel(), len(shards)
    chunk = -(-elements // world)
    bounds = [(min(c * chunk, elements), min((c + 1) * chunk, elements)) for c in range(world)]
    return gloo.ring_sum(shards, bounds, combine)


def _tree(shards: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    level = torch.stack(shards)
    while len(level) > 1:
        pairs = combine(level[0 : len(level) - 1 : 2], level[1::2])
        level = torch.cat([pairs, level[-1:]]) if len(level) % 2 else pairs
    return level[0]


def _recursive_halving(shards: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    level = torch.stack(shards)
    power = 1 << (len(shards).bit_length() - 1)
    beyond = len(shards) - power
    if beyond:
        level[:beyond] = combine(level[:beyond], level[power:])
        level = level[:power]
    while len(level) > 1:
        level = combine(level[: len(level) // 2], level[len(level) // 2 :])
    return level[0]


def _rank(shards: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    total = shards[0]
    for shard in shards[1:]:
        total = combine(total, shard)
    return total


_IN_ORDER: dict[str, Callable[[list[torch.Tensor], Combine], torch.Tensor]] = {
    "ring": _ring,
    "tree": _tree,
    "recursive-halving": _recursive_halving,
    "rank": _rank,
}


_COMBINE: dict[str, Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_FEW = 4  # Heuristic: number of tensors that are copied one by one
REDUCE_OPERATIONS = tuple(_COMBINE)


def compute_results(calls: Sequence[SimulatedCall], order: str) -> None:
    """Compute a collective: fill `results` of each of its calls, which are given in group order."""
    if calls[0].kind in _COMPUTE:
        with torch.no_grad():
            _COMPUTE[calls[0].kind](calls, order)
    for call in calls:
        call.complete = True


def consecutive_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements [n] that gloo reads from a tensor of n elements: n consecutive elements
    of memory, starting at the tensor's first. For a tensor with gaps, they are not its own
    elements.
    """
    tensor = tensor.data.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not _has_memory(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return True if the storage holds n consecutive elements from the tensor's first on. Some
    expanded tensors have fewer, because their elements share memory.
    """
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    return bool(tensor.storage_offset() + tensor.numel() <= whole)


def write_call_results(call: SimulatedCall) -> None:
    """Write the results to the output tensors without changing their version counters. A backend
    that writes to the tensors' memory does not change them either.
    """
    with torch.no_grad():
        if call.by_index and len(call.outputs) > _FEW:
            shapes = [tensor.shape for tensor in call.outputs]
            results = [r.view(s) for r, s in zip(call.results, shapes, strict=True)]
            compat.copy_each([tensor.data for tensor in call.outputs], results)
            call.outputs = []
        for output, result in zip(call.outputs, call.results, strict=False):
            data = output.data
            if call.by_index or not _has_memory(data):
                data.copy_(result.view(data.shape))
            else:
                consecutive_elements(data).copy_(result)
    call.delivered, call.inputs, call.outputs, call.results = True, [], [], []


def _concatenate(call: SimulatedCall) -> torch.Tensor:
    parts = [
        tensor.data.reshape(-1) if call.by_index else consecutive_elements(tensor)
        for tensor in call.inputs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _reduce_calls(calls: Sequence[SimulatedCall], order: str, collective: str) -> torch.Tensor:
    return _reduce_vectors([_concatenate(call) for call in calls], calls[0].op, order, collective)


def _reduce_vectors(
    vectors: list[torch.Tensor], op: str, order: str, collective: str
) -> torch.Tensor:
    total = reduce_in_order(order, collective, vectors, _COMBINE[op])
    return total.div_(len(vectors)) if op == "AVG" else total


def _split_like(whole: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(whole.split([tensor.numel() for tensor in tensors])) if tensors else []


def _all_reduce(calls: Sequence[SimulatedCall], order: str) -> None:
    total = _reduce_calls(calls, order, "all_reduce")
    for call in calls:
        call.results = _split_like(total, call.outputs)


def _reduce(calls: Sequence[SimulatedCall], order: str) -> None:
    total = _reduce_calls(calls, order, "reduce")
    for call in calls:
        call.results = [total] if call.outputs else []


def _reduce_scatter(calls: Sequence[SimulatedCall], order: str) -> None:
    """Compute a reduce_scatter. gloo reduces each tensor of a list to its rank, but reduces a
    single tensor as a whole (measured with torch 2.15, world sizes 5 and 7).
    """
    if order == "gloo" and all(len(call.inputs) == len(calls) for call in calls):
        for place, call in enumerate(calls):
            parts = [consecutive_elements(other.inputs[place]) for other in calls]
            call.results = [_reduce_vectors(parts, calls[0].op, order, "reduce")]
        return
    total = _reduce_calls(calls, order, "all_reduce")
    given = next((call.inputs for call in calls if len(call.inputs) == len(calls)), ())
    parts = _split_like(total, given) if given else list(total.chunk(len(calls)))
    for call, part in zip(calls, parts, strict=False):
        call.results = [part]


def _broadcast(calls: Sequence[SimulatedCall], order: str) -> None:
    root = next(call for call in calls if call.rank == call.root)
    given = [consecutive_elements(tensor).clone() for tensor in root.inputs]
    for call in calls:
        call.results = given if call is not root else []


def _all_gather(calls: Sequence[SimulatedCall], order: str) -> None:
    given = torch.cat([_concatenate(call) for call in calls])
    cut: dict[int, list[torch.Tensor]] = {}  # by the number of outputs, which fixes their sizes
    for call in calls:
        count = len(call.outputs)
        if count not in cut:
            cut[count] = _split_like(given, call.outputs)
        call.results = cut[count]


def _scatter(calls: Sequence[SimulatedCall], order: str) -> None:
    root = next(call for call in calls if call.rank == call.root)
    for call, part in zip(calls, root.inputs, strict=True):
        call.results = [consecutive_elements(part).clone()]


def _all_to_all(calls: Sequence[SimulatedCall], order: str) -> None:
    sent = [_concatenate(call).split(list(call.in_splits)) for call in calls]
    for place, call in enumerate(calls):
        received = torch.cat([parts[place] for parts in sent])
        call.results = _split_like(received, call.outputs)


_COMPUTE: dict[str, Callable[[Sequence[SimulatedCall], str], None]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _all_gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
