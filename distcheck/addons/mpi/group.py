"""Process group that runs c10d's collectives and point-to-point operations as nonblocking MPI
calls.

Calls without `async_op` are nonblocking as well. MPI matches nonblocking collectives only with
nonblocking ones, and ranks may call the same collective with different values of `async_op`. For
calls without `async_op`, c10d waits.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distcheck.addons.mpi import buffers, calls, runtime
from distcheck.addons.mpi.calls import CombinedMPIWork, MPIWork
from distcheck.addons.mpi.library import TORCH_NAME
from distcheck.addons.mpi.runtime import mpi
from distcheck.backends import _python_group
from distcheck.backends._python_group import PythonGroup, Tensors, check_length, elements_by_rank


def check_tensors(what: str, tensors: Sequence[torch.Tensor], *, written: bool = False) -> None:
    """Raise ValueError if this backend does not support one of the tensors, or if their dtypes
    differ.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{what}: a tensor is on {tensor.device}; backend mpi moves CPU tensors"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{what}: backend mpi moves dense tensors, not {tensor.layout}")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{what}: tensors of {tensors[0].dtype} and {tensor.dtype} together")
        if written and not tensor.is_contiguous() and _overlaps(tensor):
            raise ValueError(
                f"{what}: the result cannot be written to a tensor whose elements share memory "
                f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}); pass a clone"
            )


def check_list(
    what: str,
    size: int,
    many: Sequence[torch.Tensor],
    one: torch.Tensor,
    *,
    written: bool = True,
) -> None:
    """Raise ValueError unless `many` has one supported tensor for each of `size` ranks, each with
    as many elements as `one`.
    """
    check_tensors(what, [one, *many])
    check_tensors(what, many, written=written)
    _python_group.check_list(what, size, many, one)


def check_parts(what: str, size: int, *, whole: torch.Tensor, part: torch.Tensor) -> None:
    """Raise ValueError unless `whole` is a supported tensor with `size` times as many elements as
    `part`.
    """
    check_tensors(what, [whole, part])
    _python_group.check_parts(what, size, whole=whole, part=part)


def _overlaps(tensor: torch.Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 1 and any(size > 1 and stride == 0 for size, stride in strides)


_TAGS = 1 << 14  # MPI guarantees 2^15 - 1


def create(options: Any, _: Any) -> "MPIGroup":
    """Create a process group for torch. This is a collective call of the group's ranks. Raises
    CannotRunError.
    """
    runtime.start()
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        everybody = runtime.world_communicator(options.group_rank, options.group_size)
        return MPIGroup(everybody, options)
    _wait_for_ranks(options, ranks)
    everybody = runtime.created_world_communicator()
    members = everybody.Get_group().Incl(ranks)
    tag = zlib.crc32(str(options.group_id).encode()) % _TAGS
    return MPIGroup(everybody.Create_group(members, tag), options)


def _wait_for_ranks(options: Any, ranks: Sequence[int]) -> None:
    """Wait for the other ranks through torch's store. MPI itself would spin until all ranks create
    the group, and a spinning rank looks like a rank that computes.
    """
    of = ",".join(map(str, ranks))
    options.store.set(f"distcheck/{of}/{options.group_rank}", "")
    options.store.wait([f"distcheck/{of}/{place}" for place in range(len(ranks))])


class MPIGroup(PythonGroup):
    """Process group with two MPI communicators: one for collectives and one for messages."""

    torch_name = TORCH_NAME

    def __init__(self, communicator: Any, options: Any) -> None:
        super().__init__(options)
        self._collective = communicator.Dup()
        self._messages = communicator.Dup()
        self._timeout_s = options.timeout.total_seconds()
        self._most_tag = mpi().COMM_WORLD.Get_attr(mpi().TAG_UB)
        calls.reset_counters(self._name)

    def _get_sequence_number_for_group(self) -> int:
        """Return how many operations of this group this rank has started, including messages."""
        return calls.count_of(self._name)

    def set_timeout(self, timeout: Any) -> None:
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Do nothing. Communicators end with MPI, which other groups still use."""

    abort = shutdown

    # -- collectives ----------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        (tensor,) = tensors
        check_tensors("broadcast", [tensor], written=True)
        data = buffers.contiguous_copy(tensor)
        request = self._collective.Ibcast(buffers.as_mpi_buffer(data), opts.rootRank)
        return self._work("broadcast", request, [tensor], data)

    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        check_tensors("all_reduce", tensors, written=True)
        works = [self._start_allreduce(tensor, opts.reduceOp) for tensor in tensors]
        requests = [request for request, _, _ in works]
        data = [part for _, part, _ in works]

        def finish(_: Any) -> None:
            for tensor, (_request, part, average) in zip(tensors, works, strict=True):
                self._conclude(tensor, part, average=average)

        return self._work_of("all_reduce", requests, tensors, data, finish)

    allreduce_coalesced = allreduce

    def _start_allreduce(self, tensor: torch.Tensor, op: Any) -> tuple[Any, torch.Tensor, bool]:
        data = buffers.contiguous_copy(tensor)
        spec, how = buffers.reduction_buffer("all_reduce", data, op)
        request = self._collective.Iallreduce(mpi().IN_PLACE, spec, how)
        return request, data, buffers.is_averaging_op(op)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        (tensor,) = tensors
        root = opts.rootRank == self._rank
        check_tensors("reduce", [tensor], written=root)
        data = buffers.contiguous_copy(tensor)
        spec, how = buffers.reduction_buffer("reduce", data, opts.reduceOp)
        sent, received = (mpi().IN_PLACE, spec) if root else (spec, None)
        request = self._collective.Ireduce(sent, received, how, opts.rootRank)

        def finish(_: Any) -> None:
            if root:
                self._conclude(tensor, data, average=buffers.is_averaging_op(opts.reduceOp))

        return self._work_of("reduce", [request], [tensor], [data], finish)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        (output,), (tensor,) = outputs, inputs
        check_list("all_gather", self._size, output, tensor)
        gathered = torch.empty(self._size * tensor.numel(), dtype=tensor.dtype)
        data = buffers.contiguous_copy(tensor)
        request = self._collective.Iallgather(
            buffers.as_mpi_buffer(data), buffers.as_mpi_buffer(gathered)
        )
        return self._scattered_work("all_gather", request, gathered, output, data, inputs=inputs)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        check_parts("all_gather_into_tensor", self._size, whole=output, part=tensor)
        check_tensors("all_gather_into_tensor", [output], written=True)
        data, room = buffers.contiguous_copy(tensor), buffers.contiguous_result(output)
        request = self._collective.Iallgather(
            buffers.as_mpi_buffer(data), buffers.as_mpi_buffer(room)
        )
        return self._work("all_gather_into_tensor", request, [output], room, data, inputs=[tensor])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        (tensor,) = inputs
        data = buffers.contiguous_copy(tensor)
        if self._rank != opts.rootRank:
            check_tensors("gather", [tensor])
            request = self._collective.Igather(buffers.as_mpi_buffer(data), None, opts.rootRank)
            return self._work_of("gather", [request], [], [data], None, inputs=inputs)
        (output,) = outputs
        check_list("gather", self._size, output, tensor)
        gathered = torch.empty(self._size * tensor.numel(), dtype=tensor.dtype)
        request = self._collective.Igather(
            buffers.as_mpi_buffer(data), buffers.as_mpi_buffer(gathered), opts.rootRank
        )
        return self._scattered_work("gather", request, gathered, output, data, inputs=inputs)

    def gather_single(self, output: torch.Tensor | None, tensor: torch.Tensor, opts: Any) -> Any:
        data = buffers.contiguous_copy(tensor)
        if self._rank != opts.rootRank:
            check_tensors("gather_single", [tensor])
            request = self._collective.Igather(buffers.as_mpi_buffer(data), None, opts.rootRank)
            return self._work_of("gather_single", [request], [], [data], None, inputs=[tensor])
        assert output is not None
        check_parts("gather_single", self._size, whole=output, part=tensor)
        check_tensors("gather_single", [output], written=True)
        room = buffers.contiguous_result(output)
        request = self._collective.Igather(
            buffers.as_mpi_buffer(data), buffers.as_mpi_buffer(room), opts.rootRank
        )
        return self._work("gather_single", request, [output], room, data, inputs=[tensor])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        (tensor,) = outputs
        check_tensors("scatter", [tensor], written=True)
        room, sent = buffers.contiguous_result(tensor), None
        if self._rank == opts.rootRank:
            (parts,) = inputs
            check_list("scatter", self._size, parts, tensor, written=False)
            sent = buffers.concatenated_elements(parts)
        else:
            parts = []
        request = self._collective.Iscatter(
            None if sent is None else buffers.as_mpi_buffer(sent),
            buffers.as_mpi_buffer(room),
            opts.rootRank,
        )
        return self._work("scatter", request, [tensor], room, sent, inputs=parts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        (output,), (parts,) = outputs, inputs
        check_list("reduce_scatter", self._size, parts, output, written=False)
        return self._reduce_scatter(
            "reduce_scatter",
            output,
            buffers.concatenated_elements(parts),
            opts.reduceOp,
            inputs=parts,
        )

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        check_parts("reduce_scatter_tensor", self._size, whole=tensor, part=output)
        data = buffers.contiguous_copy(tensor)
        return self._reduce_scatter(
            "reduce_scatter_tensor", output, data, opts.reduceOp, inputs=[tensor]
        )

    def _reduce_scatter(
        self, what: str, output: torch.Tensor, data: torch.Tensor, op: Any, *, inputs: Tensors
    ) -> MPIWork:
        check_tensors(what, [output], written=True)
        room = buffers.contiguous_result(output)
        sent, how = buffers.reduction_buffer(what, data, op)
        received, _ = buffers.reduction_buffer(what, room, op)
        request = self._collective.Ireduce_scatter_block(sent, received, how)

        def finish(_: Any) -> None:
            self._conclude(output, room, average=buffers.is_averaging_op(op))

        return self._work_of(what, [request], [output], [data, room], finish, inputs=inputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        check_tensors("all_to_all", [*outputs, *inputs])
        check_tensors("all_to_all", outputs, written=True)
        check_length("all_to_all", self._size, outputs)
        check_length("all_to_all", self._size, inputs)
        sent = buffers.concatenated_elements(inputs)
        received = torch.empty(sum(t.numel() for t in outputs), dtype=sent.dtype)
        request = self._collective.Ialltoallv(
            buffers.buffer_with_counts(sent, [t.numel() for t in inputs]),
            buffers.buffer_with_counts(received, [t.numel() for t in outputs]),
        )
        return self._scattered_work("all_to_all", request, received, outputs, sent, inputs=inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        what = "all_to_all_single"
        check_tensors(what, [output, tensor])
        check_tensors(what, [output], written=True)
        data, room = buffers.contiguous_copy(tensor), buffers.contiguous_result(output)
        request = self._collective.Ialltoallv(
            buffers.buffer_with_counts(
                data, elements_by_rank(what, self._size, tensor, input_splits)
            ),
            buffers.buffer_with_counts(
                room, elements_by_rank(what, self._size, output, output_splits)
            ),
        )
        return self._work(what, request, [output], room, data, inputs=[tensor])

    def barrier(self, opts: Any = None) -> Any:
        return self._work_of("barrier", [self._collective.Ibarrier()], [], [], None)

    # -- messages -------------------------------------------------------------------------------

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        (tensor,) = tensors
        check_tensors("send", [tensor])
        data = buffers.contiguous_copy(tensor)
        request = self._messages.Isend(buffers.as_mpi_buffer(data), destination, self._tag(tag))
        return self._work_of("send", [request], [tensor], [data], None)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        return self._receive(tensors, mpi().ANY_SOURCE, tag)

    def _receive(self, tensors: Tensors, source: int, tag: int) -> Any:
        (tensor,) = tensors
        check_tensors("recv", [tensor], written=True)
        room = buffers.contiguous_result(tensor)
        spec = buffers.as_mpi_buffer(room)
        request = self._messages.Irecv(spec, source, self._tag(tag))

        def finish(status: Any) -> None:
            count = status.Get_count(spec[1])
            if count != room.numel():
                raise ValueError(
                    f"a message of {count} elements arrived for a buffer of {room.numel()}"
                )
            buffers.copy_result_back(tensor, room)

        return self._work_of("recv", [request], [tensor], [room], finish)

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._most_tag:
            raise ValueError(f"tag {tag} is out of range; MPI takes 0 to {self._most_tag}")
        return tag

    def _together(self, works: Sequence[Any], results: Tensors) -> CombinedMPIWork:
        return CombinedMPIWork(list(works), results)

    # -- completion of an operation --------------------------------------------------------------

    def _conclude(self, tensor: torch.Tensor, data: torch.Tensor, *, average: bool) -> None:
        if average:
            data.div_(self._size)
        buffers.copy_result_back(tensor, data)

    def _work(
        self,
        what: str,
        request: Any,
        results: Tensors,
        room: torch.Tensor,
        *keep: Any,
        inputs: Tensors | None = None,
    ) -> MPIWork:
        """Return the work of an operation that writes a single result to `room`."""

        def finish(_: Any) -> None:
            buffers.copy_result_back(results[0], room)

        return self._work_of(what, [request], results, [room, *keep], finish, inputs=inputs)

    def _scattered_work(
        self,
        what: str,
        request: Any,
        together: torch.Tensor,
        results: Tensors,
        *keep: Any,
        inputs: Tensors,
    ) -> MPIWork:
        """Return the work of an operation that writes the concatenation of its results to
        `together`.
        """

        def finish(_: Any) -> None:
            buffers.split_into_tensors(together, results)

        return self._work_of(what, [request], results, [together, *keep], finish, inputs=inputs)

    def _work_of(
        self,
        what: str,
        requests: list[Any],
        results: Tensors,
        keep: list[Any],
        finish: Callable[[Any], None] | None,
        *,
        inputs: Tensors | None = None,
    ) -> MPIWork:
        """Return the work of a started operation. `inputs` defaults to `results`."""
        given = results if inputs is None else inputs
        return MPIWork(
            calls.record_call(what, self._name, given, results),
            requests,
            results=results,
            keep=tuple(keep),
            finish=finish,
            timeout_s=self._timeout_s,
        )
