"""The interface of every recording, of a verification or of a job. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Kind(IntEnum):
    """Kinds of recorded tensors. Gradients and outputs belong to a step. All other kinds belong to
    a moment: slot k is the state before step k, and slot k + 1 the state after it.
    """

    LOCAL_GRADIENT = 0
    GRADIENT = 1
    PARAMETER = 2
    BUFFER = 3
    OPTIMIZER = 4
    OUTPUT = 5  # outputs of forward, in a layout: a row per sample of the shard
    EXCHANGED = 6  # of a job: reduced gradients, before clipping yields GRADIENT

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


OF_A_STEP = (Kind.LOCAL_GRADIENT, Kind.GRADIENT, Kind.OUTPUT, Kind.EXCHANGED)
STATE = (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER)


class EntryState(IntEnum):
    """States of a table entry."""

    UNWRITTEN = 0  # the rank never reached it
    ABSENT = 1  # there was no such tensor (a gradient of None)
    STORED = 2  # bytes are in the trace `source`, region of `rank`
    MALFORMED = 3  # another shape or dtype than the layout's

    @property
    def is_there(self) -> bool:
        """Return True if the rank had a tensor, of the right shape or not."""
        return self in (EntryState.STORED, EntryState.MALFORMED)


class EntrySource(IntEnum):
    """The trace that holds the bytes of an entry."""

    OWN = 0
    BASELINE = 1  # the first run, if this is the rerun


@dataclass(frozen=True)
class Entry:
    """A table entry: a rank's tensor in one slot, its 128-bit digest, and the `memory_order` of a
    parameter or buffer (0: unknown). `together` is True if the tensor was unsharded collectively,
    so that its bits are those of all ranks.
    """

    state: EntryState
    digest: bytes
    source: EntrySource = EntrySource.OWN
    holder: int = 0
    order: int = 0
    together: bool = False


class Header(Protocol):
    """The record of a rank's step without tensors."""

    @property
    def ids(self) -> tuple[object, ...]:
        """Identifiers of the rank's samples, in order."""

    @property
    def loss(self) -> float:
        """Initial loss of backward; NaN if there was none."""

    @property
    def optimizer(self) -> str:
        """Settings of the optimizer, if they may change from step to step."""
        ...

    @property
    def rng_digest(self) -> bytes:
        """A digest of the RNG states at the start of the step."""


class Recording(Protocol):
    """The recorded steps of all ranks, numbered from 0."""

    @property
    def world(self) -> int:
        """The number of ranks."""

    def names(self, kind: Kind) -> Sequence[str]:
        """Return the names of the tensors of a kind, by index."""

    def steps_written(self) -> int:
        """Return the number of steps, from the first, that every rank has completed."""

    def header(self, rank: int, step: int) -> Header:
        """Return the record of a rank's step without tensors."""

    def entry(self, rank: int, kind: Kind, slot: int, index: int) -> Entry:
        """Return the entry of a rank's tensor, with its digest."""

    def tensor(self, rank: int, kind: Kind, slot: int, index: int) -> "torch.Tensor | None":
        """Return the recorded tensor; None if it was not kept."""
