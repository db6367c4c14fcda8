"""Process group of a simulated world, which posts c10d's collectives and messages as simulated
calls; and the store for its rendezvous.
"""

import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Store  # type: ignore[attr-defined]

from distcheck.addons.simulated import collectives, world
from distcheck.addons.simulated.calls import SimulatedCall, calling_stack
from distcheck.addons.simulated.work import SimulatedWork
from distcheck.addons.simulated.world import SimulatedWorld
from distcheck.backends._python_group import (
    PythonGroup,
    Tensors,
    check_length,
    check_list,
    check_parts,
    elements_by_rank,
)
from distcheck.records.posted_calls import call_timeout_s
from distcheck.worlds.callers import is_tested_code

TORCH_NAME = "distcheck_simulated"


def register() -> str:
    """Register this process group as a backend of torch, and return its name."""
    if not hasattr(dist.Backend, TORCH_NAME.upper()):
        dist.Backend.register_backend(TORCH_NAME, create, extended_api=True, devices=["cpu"])
    return TORCH_NAME


def create(options: Any, _: Any) -> "SimulatedGroup":
    return SimulatedGroup(options)


class SimulatedGroup(PythonGroup):
    """A process group, as one rank holds it."""

    torch_name = TORCH_NAME

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._world = world.current_world()
        self._ranks = list(options.global_ranks_in_group) or list(range(self._size))
        self._channel, self._made = self._world.enter_group(self._name, self._ranks)
        self._destroyed = False
        self._limit_s = options.timeout.total_seconds()

    def set_timeout(self, timeout: Any) -> None:
        """Set the timeout of later calls. It replaces the timeout passed at creation."""
        self._limit_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Mark the group as destroyed by `destroy_process_group`. No call may follow."""
        self._destroyed = True
        if self._made is not None:
            self._made.destroyed = True

    abort = shutdown

    # -- collectives ----------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Copy the root's elements to all ranks. `opts` is an options object or the root."""
        tensors, root = _to_list(tensors), self._ranks[getattr(opts, "rootRank", opts)]
        return self._post(
            opts, "broadcast", "broadcast", tensors, tensors, counts=tensors, root=root
        )

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce a tensor over all ranks, with the result on all ranks. `opts` is an options object
        or the reduce operation.
        """
        tensors, op = _to_list(tensors), self._operation("all_reduce", opts)
        return self._post(opts, "all_reduce", "all_reduce", tensors, tensors, counts=tensors, op=op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        kind, op = "all_reduce_coalesced", self._operation("all_reduce_coalesced", opts)
        return self._post(opts, kind, kind, tensors, tensors, counts=tensors, op=op)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """Reduce a tensor over all ranks, with the result on the root. The tensors of other ranks
        do not change.
        """
        root, op = self._ranks[opts.rootRank], self._operation("reduce", opts)
        results = tensors if opts.rootRank == self._rank else []
        return self._post(
            opts, "reduce", "reduce", tensors, results, counts=tensors, op=op, root=root
        )

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Gather the inputs of all ranks on every rank, in one output tensor per input."""
        (output,), (tensor,) = outputs, inputs
        check_list("all_gather", self._size, output, tensor)
        return self._post(opts, "all_gather", "all_gather", inputs, output, counts=inputs)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """Gather the inputs of all ranks on every rank, concatenated in one tensor."""
        name = "all_gather_into_tensor"
        check_parts(name, self._size, whole=output, part=tensor)
        return self._post(opts, "all_gather", name, [tensor], [output], counts=[tensor])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """Gather the inputs of all ranks on the root, in one output tensor per input."""
        results = outputs[0] if self._rank == opts.rootRank else []
        if self._rank == opts.rootRank:
            check_list("gather", self._size, results, inputs[0])
        root = self._ranks[opts.rootRank]
        return self._post(opts, "gather", "gather", inputs, results, counts=inputs, root=root)

    def gather_single(self, output: torch.Tensor | None, tensor: torch.Tensor, opts: Any) -> Any:
        """Gather the inputs of all ranks on the root, concatenated in one tensor (torch 2.15)."""
        results = []
        if self._rank == opts.rootRank and output is not None:
            check_parts("gather_single", self._size, whole=output, part=tensor)
            results = [output]
        root = self._ranks[opts.rootRank]
        return self._post(
            opts, "gather", "gather_single", [tensor], results, counts=[tensor], root=root
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        parts = inputs[0] if self._rank == opts.rootRank else []
        if self._rank == opts.rootRank:
            check_list("scatter", self._size, parts, outputs[0])
        root = self._ranks[opts.rootRank]
        return self._post(opts, "scatter", "scatter", parts, outputs, counts=outputs, root=root)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        """Reduce the r-th tensors of all ranks' lists to rank r. The tensors of a list may differ
        in size.
        """
        (output,), (parts,) = outputs, inputs
        name = "reduce_scatter"
        check_length(name, self._size, parts)
        if (own := parts[self._rank].numel()) != output.numel():
            raise ValueError(f"{name}: a chunk of {own} elements for an output of {output.numel()}")
        op = self._operation(name, opts)
        return self._post(opts, name, name, parts, [output], counts=parts, op=op)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Reduce a tensor over all ranks and split it into equal parts; part r goes to rank r."""
        name = "reduce_scatter_tensor"
        check_parts(name, self._size, whole=tensor, part=output)
        op = self._operation(name, opts)
        return self._post(opts, "reduce_scatter", name, [tensor], [output], counts=[tensor], op=op)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Send the r-th tensor of every rank's list to rank r. The tensors of a list may differ in
        size.
        """
        for tensors in (outputs, inputs):
            check_length("all_to_all", self._size, tensors)
        sent, received = (tuple(t.numel() for t in tensors) for tensors in (inputs, outputs))
        return self._post(
            opts, "all_to_all", "all_to_all", inputs, outputs, in_splits=sent, out_splits=received
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Send rows of one tensor to each rank: the same number to each, or the numbers in the
        splits.
        """
        name = "all_to_all_single"
        self._check_contiguous(name, [output, tensor])
        sent = elements_by_rank(name, self._size, tensor, input_splits or ())
        received = elements_by_rank(name, self._size, output, output_splits or ())
        return self._post(
            opts, "all_to_all", name, [tensor], [output],
            in_splits=tuple(sent), out_splits=tuple(received),
        )  # fmt: skip

    def barrier(self, opts: Any = None) -> Any:
        """Complete once every rank has called it."""
        return self._post(opts, "barrier", "barrier", [], [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Complete once every rank has called it, or raise after a timeout."""
        work = self._post(None, "monitored_barrier", "monitored_barrier", [], [])
        work.wait(*((timeout,) if timeout is not None else ()))

    # -- messages -------------------------------------------------------------------------------

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        """Send one tensor to one rank. As with gloo, the send completes when that rank receives the
        tensor.
        """
        peer = self._ranks[destination]
        self._check_contiguous("send", tensors)
        return self._post(None, "send", "send", tensors, [], counts=tensors, peer=peer, tag=tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Receive one tensor from one rank. The message must fill the tensor."""
        peer = self._ranks[source]
        self._check_contiguous("recv", tensors)
        return self._post(None, "recv", "recv", [], tensors, counts=tensors, peer=peer, tag=tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive one tensor from any rank. The message that was sent first is received first."""
        self._check_contiguous("recv", tensors)
        return self._post(None, "recv", "recv", [], tensors, counts=tensors, tag=tag)

    # -- posting a call --------------------------------------------------------------------------

    def _post(
        self,
        opts: Any,
        kind: str,
        name: str,
        inputs: Tensors,
        outputs: Tensors,
        *,
        counts: Sequence[torch.Tensor] = (),
        **about: Any,
    ) -> SimulatedWork:
        """Post a call. `counts` are the tensors whose sizes must be equal on all ranks. `about`
        holds the remaining fields of the call: `op`, `root`, `peer`, `tag`, `in_splits` and
        `out_splits`.
        """
        rank = self._world.running_rank(f"calls {name}")
        if self._destroyed:
            raise RuntimeError(f"{name}: the group was destroyed by destroy_process_group")
        self._check(name, [*inputs, *outputs])
        if self._made is not None:
            self._made.call()
        is_message = kind in ("send", "recv")
        call = SimulatedCall(
            kind=kind,
            name=name,
            rank=rank,
            group=self._channel.name,
            number=self._channel.number_for(rank, is_message=is_message),
            inputs=inputs,
            outputs=outputs,
            counts=_element_counts(kind, counts),
            stack=calling_stack(),
            **about,
        )
        limit_s = call_timeout_s(opts) or self._limit_s
        if limit_s < self._world.usual_limit_s:
            call.limit_s = limit_s
        self._world.post(self._channel, call)
        return SimulatedWork(self._world, [call], outputs)

    def _together(self, works: Sequence[SimulatedWork], results: Tensors) -> SimulatedWork:
        return SimulatedWork(self._world, [call for w in works for call in w._calls], results)

    def _operation(self, name: str, opts: Any) -> str:
        op = getattr(opts, "reduceOp", ReduceOp.SUM if opts is None else opts)
        names = collectives.REDUCE_OPERATIONS
        found = next((known for known in names if op == getattr(ReduceOp, known)), "")
        if not found:
            self._world.refuse(f"{name} with the reduce operation {op}")
        return found

    def _check(self, name: str, tensors: Tensors) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                self._world.refuse(f"{name} of a tensor on {tensor.device}")
            if tensor.layout is not torch.strided or tensor.is_quantized:
                self._world.refuse(f"{name} of a tensor of layout {tensor.layout}")
            if tensor.dtype != tensors[0].dtype:
                raise ValueError(
                    f"{name}: tensors of {tensors[0].dtype} and {tensor.dtype} together"
                )

    def _check_contiguous(self, name: str, tensors: Tensors) -> None:
        """Raise ValueError for a tensor with gaps, if gloo refuses it in this operation."""
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"{name}: tensors must be contiguous")


def _element_counts(kind: str, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the numbers of elements that must be equal on all ranks. For reduce_scatter they are
    summed, because ranks may pass the same parts as a list or as one tensor.
    """
    counts = tuple(tensor.numel() for tensor in tensors)
    return (sum(counts),) if kind == "reduce_scatter" and len(set(counts)) == 1 else counts


def _to_list(given: Any) -> Tensors:
    return [given] if isinstance(given, torch.Tensor) else list(given)


_USUAL_LIMIT: timedelta = Store().timeout  # type: ignore[attr-defined]


class SimulatedStore(Store):
    """The store of a simulated world, as one rank sees it."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__()
        self._world = world
        world.stores.append(self)  # torch itself keeps only the C++ half alive

    def set(self, key: str, value: Any) -> None:
        self._world.stored[key] = _to_bytes(value)
        self._world.wake_store()

    def get(self, key: str) -> bytes:
        """Return a value. Waits until it is set."""
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        self._world.wait_for_store(
            [key], limit.total_seconds() if limit < _USUAL_LIMIT else math.inf
        )
        return self._world.stored[key]

    def append(self, key: str, value: Any) -> None:
        self.set(key, self._world.stored.get(key, b"") + _to_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a number that is initially 0, and return the sum. Adding 0 counts as
        polling.
        """
        if not amount:
            self._world.scheduler.give_way()
        total = int(self._world.stored.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Store `desired` if the current value is `expected`, or if there is no value and
        `expected` is empty. Return the value that is stored afterwards.
        """
        known = self._world.stored.get(key)
        expected = _to_bytes(expected)
        if known == expected or (known is None and not expected):
            self.set(key, desired)
        else:
            self._world.scheduler.give_way()
        found: bytes = self._world.stored.get(key, expected)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set. Lets other ranks run first."""
        if not all(key in self._world.stored for key in keys):
            self._world.scheduler.give_way()
        return all(key in self._world.stored for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Let other ranks run until all keys are set. After a timeout, torch's own code waits
        again.
        """
        limit_s = math.inf
        if timeout is not None and is_tested_code(sys._getframe(1).f_code.co_filename):
            limit_s = timeout.total_seconds()
        self._world.wait_for_store(keys, limit_s)

    def delete_key(self, key: str) -> bool:
        return self._world.stored.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815 (what torch's other stores call)

    def num_keys(self) -> int:
        """Return the number of stored values. Lets other ranks run first."""
        self._world.scheduler.give_way()
        return len(self._world.stored)

    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are implemented."""
        return True


def _to_bytes(value: Any) -> bytes:
    found: bytes = value.encode() if isinstance(value, str) else bytes(value)
    return found
