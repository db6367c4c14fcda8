"""What `distcheck train --json` writes, as it is read again, from a file of any origin."""

from pathlib import Path

import msgspec

from distcheck.errors import UsageError
from distcheck.records.decoding import decode_json, read_bounded

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
    try:
        run = decode_json(read_bounded(path), TrainedRun)
    except OSError as error:
        raise UsageError(f"--beside {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"--beside {path} holds no figures of distcheck train: {error}; give a file that "
            "distcheck train --json has written"
        ) from error
    if run.schema != SCHEMA:
        raise UsageError(
            f"--beside {path} has the schema {run.schema!r}; this version reads {SCHEMA!r}"
        )
    return run
