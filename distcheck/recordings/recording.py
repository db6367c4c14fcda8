"""What every recording offers, of a verification or of a job. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Kind(IntEnum):
    """What is recorded of a step. Gradients and outputs belong to a step, the others to a moment:
    slot k is the state before step k, slot k + 1 that after it.
    """

    LOCAL_GRADIENT = 0
    GRADIENT = 1
    PARAMETER = 2
    BUFFER = 3
    OPTIMIZER = 4
    OUTPUT = 5  # of the model's forward pass, in a layout: a row for each sample of the shard
    EXCHANGED = 6  # of a job: what an exchange has left, before clipping makes a GRADIENT of it

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


OF_A_STEP = (Kind.LOCAL_GRADIENT, Kind.GRADIENT, Kind.OUTPUT, Kind.EXCHANGED)
STATE = (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER)


class EntryState(IntEnum):
    """What a table entry says."""

    UNWRITTEN = 0  # the rank never got there
    ABSENT = 1  # the rank got there and there was no such tensor (a gradient of None)
    STORED = 2  # the bytes are in the trace that `source` names, in the region of `rank`
    MALFORMED = 3  # a tensor of another shape or dtype than the layout's

    @property
    def is_there(self) -> bool:
        """Whether the rank had a tensor, of the right shape or not."""
        return self in (EntryState.STORED, EntryState.MALFORMED)


class EntrySource(IntEnum):
    """Which trace holds the bytes of an entry."""

    OWN = 0
    BASELINE = 1  # the first run, when this one is the rerun


@dataclass(frozen=True)
class Entry:
    """A table entry: what a rank recorded in one slot, its 128-bit digest, and the `memory_order`
    of a parameter or buffer (0: not known). `together`: it was put together from what all ranks
    hold, so that its bits say nothing of one rank's.
    """

    state: EntryState
    digest: bytes
    source: EntrySource = EntrySource.OWN
    holder: int = 0
    order: int = 0
    together: bool = False


class Header(Protocol):
    """What a rank noted of a step beside tensors."""

    @property
    def ids(self) -> tuple[object, ...]:
        """What says which samples it had, in order."""

    @property
    def loss(self) -> float:
        """What its backward pass started from; NaN where there was none."""

    @property
    def optimizer(self) -> str:
        """The optimizer's settings, where they may change from step to step."""
        ...

    @property
    def rng_digest(self) -> bytes:
        """A digest of the random streams that the step began with."""


class Recording(Protocol):
    """What ranks did over some steps, which are numbered from 0 here."""

    @property
    def world(self) -> int:
        """How many ranks there are."""

    def names(self, kind: Kind) -> Sequence[str]:
        """The tensors of a kind, each at its index."""

    def steps_written(self) -> int:
        """How many steps, from the first, every rank has finished."""

    def header(self, rank: int, step: int) -> Header:
        """What a rank noted of a step."""

    def entry(self, rank: int, kind: Kind, slot: int, index: int) -> Entry:
        """What a rank recorded in a slot, by its digest."""

    def tensor(self, rank: int, kind: Kind, slot: int, index: int) -> "torch.Tensor | None":
        """The same as a tensor; None where none was kept."""
