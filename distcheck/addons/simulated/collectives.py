"""Results of each collective on every rank, from the inputs of all ranks (group ranks)."""

from collections.abc import Callable, Sequence

import torch

from distcheck.addons.simulated import orders
from distcheck.addons.simulated.calls import SimulatedCall
from distcheck.machine import compat

_COMBINE: dict[str, orders.Combine] = {
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


def compute(calls: Sequence[SimulatedCall], order: str) -> None:
    """Fill `results` of every call of one collective; `calls` are in group order."""
    if calls[0].kind in _COMPUTE:
        with torch.no_grad():
            _COMPUTE[calls[0].kind](calls, order)
    for call in calls:
        call.complete = True


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return as many elements [n] as a tensor has, consecutive in memory from its first one, which
    is what gloo reads. For a tensor with gaps these differ from its elements.
    """
    tensor = tensor.data.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not _has_memory(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return True if the storage holds that many elements from the first one on; False for some
    expanded tensors, whose elements share memory.
    """
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    return bool(tensor.storage_offset() + tensor.numel() <= whole)


def deliver(call: SimulatedCall) -> None:
    """Write the results to the output tensors without changing their version counters, as a backend
    does that writes to their memory.
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
                memory_of(data).copy_(result)
    call.delivered, call.inputs, call.outputs, call.results = True, [], [], []


def _whole(call: SimulatedCall) -> torch.Tensor:
    parts = [
        tensor.data.reshape(-1) if call.by_index else memory_of(tensor) for tensor in call.inputs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _reduced(calls: Sequence[SimulatedCall], order: str, collective: str) -> torch.Tensor:
    return _combined([_whole(call) for call in calls], calls[0].op, order, collective)


def _combined(vectors: list[torch.Tensor], op: str, order: str, collective: str) -> torch.Tensor:
    total = orders.reduced(order, collective, vectors, _COMBINE[op])
    return total.div_(len(vectors)) if op == "AVG" else total


def _cut(whole: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(whole.split([tensor.numel() for tensor in tensors])) if tensors else []


def _all_reduce(calls: Sequence[SimulatedCall], order: str) -> None:
    total = _reduced(calls, order, "all_reduce")
    for call in calls:
        call.results = _cut(total, call.outputs)


def _reduce(calls: Sequence[SimulatedCall], order: str) -> None:
    total = _reduced(calls, order, "reduce")
    for call in calls:
        call.results = [total] if call.outputs else []


def _reduce_scatter(calls: Sequence[SimulatedCall], order: str) -> None:
    """Compute reduce_scatter. gloo reduces each tensor of a list to its rank, but a single tensor
    as a whole (measured with torch 2.15, world sizes 5 and 7).
    """
    if order == "gloo" and all(len(call.inputs) == len(calls) for call in calls):
        for place, call in enumerate(calls):
            parts = [memory_of(other.inputs[place]) for other in calls]
            call.results = [_combined(parts, calls[0].op, order, "reduce")]
        return
    total = _reduced(calls, order, "all_reduce")
    given = next((call.inputs for call in calls if len(call.inputs) == len(calls)), ())
    parts = _cut(total, given) if given else list(total.chunk(len(calls)))
    for call, part in zip(calls, parts, strict=False):
        call.results = [part]


def _broadcast(calls: Sequence[SimulatedCall], order: str) -> None:
    root = next(call for call in calls if call.rank == call.root)
    given = [memory_of(tensor).clone() for tensor in root.inputs]
    for call in calls:
        call.results = given if call is not root else []


def _all_gather(calls: Sequence[SimulatedCall], order: str) -> None:
    given = torch.cat([_whole(call) for call in calls])
    cut: dict[int, list[torch.Tensor]] = {}  # by the number of outputs, which fixes their sizes
    for call in calls:
        count = len(call.outputs)
        if count not in cut:
            cut[count] = _cut(given, call.outputs)
        call.results = cut[count]


def _scatter(calls: Sequence[SimulatedCall], order: str) -> None:
    root = next(call for call in calls if call.rank == call.root)
    for call, part in zip(calls, root.inputs, strict=True):
        call.results = [memory_of(part).clone()]


def _all_to_all(calls: Sequence[SimulatedCall], order: str) -> None:
    sent = [_whole(call).split(list(call.in_splits)) for call in calls]
    for place, call in enumerate(calls):
        received = torch.cat([parts[place] for parts in sent])
        call.results = _cut(received, call.outputs)


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
