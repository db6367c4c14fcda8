"""Base classes for process groups written in Python. They do not depend on the transport."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work  # type: ignore[attr-defined]

Tensors = list[torch.Tensor]


def check_length(what: str, size: int, many: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless `many` has one tensor for each of `size` ranks."""
    if len(many) != size:
        raise ValueError(f"{what}: {len(many)} tensors for {size} ranks")


def check_list(what: str, size: int, many: Sequence[torch.Tensor], one: torch.Tensor) -> None:
    """Raise ValueError unless `many` has `size` tensors, each with as many elements as `one`."""
    check_length(what, size, many)
    for tensor in many:
        if tensor.numel() != one.numel():
            raise ValueError(
                f"{what}: a tensor of {tensor.numel()} elements among those of {one.numel()}"
            )


def check_parts(what: str, size: int, *, whole: torch.Tensor, part: torch.Tensor) -> None:
    """Raise ValueError unless `whole` has `size` times as many elements as `part`."""
    if whole.numel() != size * part.numel():
        raise ValueError(f"{what}: {whole.numel()} elements are not {size} times {part.numel()}")


def elements_by_rank(
    what: str, size: int, tensor: torch.Tensor, splits: Sequence[int]
) -> list[int]:
    """Return the number of elements for each rank. `splits` are numbers of rows; without them, all
    parts are equal. Raises ValueError if the splits do not fit the tensor.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"{what}: {rows} rows cannot be cut into {size} equal parts")
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"{what}: splits {list(splits)} of {rows} rows, {size} ranks")
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in splits]


class PythonWork(Work):
    """A started operation, or several of them. Its results are available after a wait."""

    _results: Any

    def result(self) -> Any:
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """Wait for the operation and return a completed future of its result."""
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future

    def getFuture(self) -> Any:  # noqa: N802
        """Alias of `get_future`, used by older code."""
        return self.get_future()


class PythonGroup(ProcessGroup):
    """One rank's process group: its rank and size, torch's alternative names of operations, and
    coalesced operations. A subclass defines the operations, under their names without `_base` or
    `_coalesced`.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    torch_name: str  # torch's name of the backend

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._rank, self._size = options.group_rank, options.group_size
        self._name = str(options.group_id)

    def getBackendName(self) -> str:  # noqa: N802
        return self.torch_name

    def name(self) -> str:
        return self.torch_name

    def rank(self) -> int:
        return int(self._rank)

    def size(self) -> int:
        return int(self._size)

    @property
    def group_name(self) -> Any:
        return self._name

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._name = name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    # -- alternative names of operations -----------------------------------------------------------

    def _allgather_base(self, *given: Any, **named: Any) -> Any:
        return self.all_gather_single(*given, **named)

    def _reduce_scatter_base(self, *given: Any, **named: Any) -> Any:
        return self.reduce_scatter_single(*given, **named)

    def alltoall_base(self, *given: Any, **named: Any) -> Any:
        return self.all_to_all_single(*given, **named)

    def allgather_into_tensor_coalesced(self, *given: Any, **named: Any) -> Any:
        return self.all_gather_single_coalesced(*given, **named)

    def reduce_scatter_tensor_coalesced(self, *given: Any, **named: Any) -> Any:
        return self.reduce_scatter_single_coalesced(*given, **named)

    # -- coalesced operations ---------------------------------------------------------------------

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Run `all_gather_into_tensor` for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.all_gather_single(out, data) for out, data in pairs], outputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Run `all_gather` for several tensors; `outputs` holds a list of them for each rank."""
        by_tensor = zip(zip(*outputs, strict=True), inputs, strict=True)
        works = [self.allgather([list(of_ranks)], [data]) for of_ranks, data in by_tensor]
        return self._together(works, [tensor for output in outputs for tensor in output])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Run `reduce_scatter_tensor` for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, data, opts) for output, data in pairs]
        return self._together(works, outputs)

    @abstractmethod
    def _together(self, works: Sequence[Any], results: Tensors) -> Any:
        """Combine several started operations into one Work."""
