"""Layout of the trace of one world.

A trace is one file of fixed layout (a memfd: shared memory without a name, so nothing remains when
processes die). Every rank writes into separate regions:

    step headers    per rank and step: sample ids, loss, RNG states, order of gradients
    slot table      per rank, kind, slot and tensor: digest and place of the bytes
    data            per rank, kind, slot and tensor: the bytes

The file is sparse: an unwritten region uses no memory. Ranks with equal bits store them once: the
table entries of all ranks refer to the first copy. This keeps the trace of a correct run small.
"""

import mmap
import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated

import msgspec

from distcheck.machine.seeds import LIBRARY_STATES_BYTES
from distcheck.recordings.recording import OF_A_STEP, Kind
from distcheck.records import ModelLayout, TensorSpec
from distcheck.records.decoding import Steps, World

# Supported dtypes: those that torch copies, without bytes shared between elements.
BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4,
    "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex128": 16, "complex64": 8, "complex32": 4, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

OUTPUTS = "outputs"  # name of the table of model outputs
NO_DIGEST = bytes(16)
_ALIGNMENT = 64
CPU_RNG_STATE_BYTES = 5056  # torch's CPU generator: a Mersenne twister and its cache
RNG_STATE_BYTES = CPU_RNG_STATE_BYTES + 16  # plus CUDA's, on a GPU: seed and offset

ENTRY = struct.Struct("<16sBBHI")  # digest, state, source, rank with the bytes, memory order
# written (0: not; else the micro-batches of the strategy's backward), settings, implementation of
# the optimizer, samples, loss, factor on the loss, epoch, RNG bytes, RNG digest, library states'
# bytes, tokens, positions
HEADER = struct.Struct("<BHHIddqI16sIqq")
# The loss of a rank without one: a NaN whose bits no computation yields.
NO_LOSS: float = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0D15_7C4E))[0]
_MOST_ORDERED = 8  # dimensions: four bits each
# Replaces a memory order: all ranks unsharded the tensor together, and hold one result.
TOGETHER = 0xFFFFFFFF
# Marks a gradient that is complete on one rank only, given in the lower half: other ranks' values
# are kept but not compared.
OWNED_BY = 0xFFFF0000


def spec_bytes(spec: TensorSpec) -> int:
    return spec.elements * BYTES[spec.dtype]


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the order of a tensor's dimensions in memory, outermost first, four bits each. Return
    0 if only one order is possible, or if there are too many dimensions.

    If several dimensions have the same stride, at most one has a size other than 1; it is the
    innermost of them.
    """
    if len(shape) > _MOST_ORDERED:
        return 0
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d], d))
    return sum(d << (4 * place) for place, d in enumerate(reversed(order)))


def strides_in(order: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor with its dimensions in this order."""
    strides, stride = [0] * len(shape), 1
    for place in range(len(shape)):
        dimension = (order >> (4 * place)) & 15
        strides[dimension] = stride
        stride *= max(1, shape[dimension])
    return tuple(strides)


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class TraceLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Byte offsets of everything in the trace of `world` ranks over `steps` steps.

    `outputs` is the table of model outputs for at most `max_shard` samples, if recorded.
    `line_bytes` is the space for the source lines of a step, or 0.
    """

    world: World
    steps: Steps
    max_shard: int
    model: ModelLayout
    outputs: tuple[TensorSpec, ...] = ()
    line_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0

    def specs(self, kind: Kind) -> tuple[TensorSpec, ...]:
        """Return the tensors of a kind; gradients have the shapes of parameters."""
        if kind is Kind.BUFFER:
            return self.model.buffers
        if kind is Kind.OPTIMIZER:
            return self.model.optimizer
        if kind is Kind.OUTPUT:
            return self.outputs
        if kind is Kind.EXCHANGED:
            return ()
        return self.model.parameters

    def slots(self, kind: Kind) -> int:
        """Return the number of slots: one per step, or one more for the state before the first."""
        return self.steps if kind in OF_A_STEP else self.steps + 1

    @cached_property
    def header_bytes(self) -> int:
        ready_order = 4 * len(self.model.parameters)
        states = RNG_STATE_BYTES + LIBRARY_STATES_BYTES
        return _align(HEADER.size + states + 8 * self.max_shard + ready_order + self.line_bytes)

    @cached_property
    def _entries_before(self) -> list[int]:
        """Per kind, the number of preceding table entries of one rank; then the total."""
        return [0, *accumulate(self.slots(kind) * len(self.specs(kind)) for kind in Kind)]

    @cached_property
    def entries_per_rank(self) -> int:
        return self._entries_before[-1]

    @cached_property
    def table_offset(self) -> int:
        return self.world * self.steps * self.header_bytes

    @cached_property
    def index_bytes(self) -> int:
        """Size of headers and tables, which a reader maps together."""
        return _align(self.table_offset + self.world * self.entries_per_rank * ENTRY.size)

    @cached_property
    def _tensor_offsets(self) -> dict[Kind, tuple[list[int], int]]:
        """Per kind: each tensor's offset within a slot, and the size of a slot."""
        offsets: dict[Kind, tuple[list[int], int]] = {}
        for kind in Kind:
            starts, total = [], 0
            for spec in self.specs(kind):
                starts.append(total)
                total = _align(total + spec_bytes(spec))
            offsets[kind] = (starts, total)
        return offsets

    @cached_property
    def _data_before(self) -> list[int]:
        sizes = (self.slots(kind) * self._tensor_offsets[kind][1] for kind in Kind)
        return [0, *accumulate(sizes)]

    @cached_property
    def data_bytes_per_rank(self) -> int:
        """Size of one rank's data without sharing."""
        return self._data_before[-1]

    @cached_property
    def total_bytes(self) -> int:
        """Size of the whole (sparse) file."""
        return self.index_bytes + self.world * self.data_bytes_per_rank

    def header_offset(self, rank: int, step: int) -> int:
        return (rank * self.steps + step) * self.header_bytes

    def lines_offset(self, rank: int, step: int) -> int:
        return self.header_offset(rank, step + 1) - self.line_bytes

    def entry_offset(self, rank: int, kind: Kind, slot: int, index: int) -> int:
        entry = (
            rank * self.entries_per_rank
            + self._entries_before[kind]
            + slot * len(self.specs(kind))
            + index
        )
        return self.table_offset + entry * ENTRY.size

    def data_offset(self, rank: int, kind: Kind, slot: int, index: int) -> int:
        starts, slot_bytes = self._tensor_offsets[kind]
        within = self._data_before[kind] + slot * slot_bytes + starts[index]
        return self.index_bytes + rank * self.data_bytes_per_rank + within

    def regions_of(self, rank: int) -> list[tuple[int, int]]:
        """Return (offset, length) of the regions that a rank may have written."""
        table_bytes = self.entries_per_rank * ENTRY.size
        return [
            (self.header_offset(rank, 0), self.steps * self.header_bytes),
            (self.table_offset + rank * table_bytes, table_bytes),
            (self.index_bytes + rank * self.data_bytes_per_rank, self.data_bytes_per_rank),
        ]


def has_loss(loss: float) -> bool:
    """Return False for the marker of a rank without a loss."""
    return struct.pack("<d", loss) != struct.pack("<d", NO_LOSS)


def steps_written(index: "mmap.mmap | bytes", layout: TraceLayout) -> int:
    """Return the number of steps that every rank completed; `index` is the trace's start."""
    for step in range(layout.steps):
        if not all(index[layout.header_offset(rank, step)] for rank in range(layout.world)):
            return step
    return layout.steps
