"""What `distcheck train --json` writes, as it is read again, from a file of any origin."""

from pathlib import Path

import msgspec

from distcheck.records.decoding import read_written

SCHEMA = "distcheck.training/1"


class TrainedCase(msgspec.Struct, frozen=True, kw_only=True):
    """What was trained; without a `strategy`, one process."""

    strategy: str
    world: int
    workload: str
    data: str
    batch: int
    seed: int
    dtype: str


class TrainedEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of an epoch; a loss of None is not a finite number."""

    loss: float | None
    accuracy: float | None
    tested: int
    mean_step_s: float
    step_losses: tuple[float | None, ...] = ()
    step_s: tuple[float, ...] = ()


class TrainedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    schema: str
    case: TrainedCase
    epochs: tuple[TrainedEpoch, ...]


def read_training(path: Path) -> TrainedRun:
    """A document of `train --json`. Raises UsageError."""
    return read_written(
        path, TrainedRun, schema=SCHEMA, name=f"--overlay {path}",
        why="holds no figures of distcheck train: {error}; give a file that distcheck train --json "
        "has written",
    )  # fmt: skip
