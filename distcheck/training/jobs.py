"""The jobs that the front gives to forked processes, and what some of them answer.

No torch here: the front writes these, the process that does the job reads them. The constants name
the function that does each job; descriptors are passed in the order that each job names.
"""

from typing import Any

import msgspec

from distcheck.contract import Contract, Order, Training
from distcheck.records import Case, Delay, ModelLayout
from distcheck.records.expected_events import Happening
from distcheck.training.traces.layout import TraceLayout
from distcheck.worlds.rendezvous import Rendezvous

EXAMINE = "distcheck.verification.inspection:examine"
INSPECT = "distcheck.verification.inspection:inspect_cases"
CALIBRATE = "distcheck.judge.oracles.calibration:calibrate_rank"
RECORD = "distcheck.training.rank:record"
TRAIN = "distcheck.training.rank:train"
JUDGE = "distcheck.judge.job:judge"
OBSERVE = "distcheck.judge.diagnosis.observation:observe_job"
SAVE = "distcheck.training.traces.files:save_job"
LOAD = "distcheck.training.traces.files:load_job"


class InspectionJob(msgspec.Struct, frozen=True, kw_only=True):
    """Cases to look at. Descriptor: the data, if `has_data`."""

    cases: tuple[Case, ...]
    description: bytes
    has_data: bool


class CaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a case turned out to be."""

    contract: Contract
    strategy_file: str
    strategy_line: int = 0
    syncs_statistics: bool = False  # whether the strategy's file mentions SyncBatchNorm
    model: ModelLayout
    train_size: int
    saved_bytes_per_sample: int
    own_sampler: bool
    draws_random_numbers: bool
    normalises_batches: bool = False
    rows_apart: bool = False  # BatchNorm sees rows that are not one sample's after the other's
    rounds_to: tuple[str, ...] = ()  # dtypes of parameters, and shorter ones of the forward pass
    makes_groups: bool = False  # whether the workload divides its parameters into groups
    updates_again: bool = True  # whether an optimizer that is built anew can repeat a step
    takes_loss: bool = True  # whether another --loss may be declared for the strategy
    note: str = ""
    own_backward: bool = False
    own_update: bool = False
    training: Training = Training()  # what the workload wants of the loop
    must_happen: tuple[Happening, ...] = ()  # in a run that shows what the workload is for
    kinds: tuple[str, ...] = ()  # classes of the modules that hold parameters or buffers
    groups: int = 1  # of the optimizer's parameters
    schedule: bool = False  # whether the workload changes its optimizer from step to step
    frozen: int = 0  # parameters that do not train when the model is built


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: the machine, and one entry per case."""

    environment: dict[str, Any]
    cases: tuple[CaseFacts, ...]


class CalibrationJob(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is to try."""

    rendezvous: Rendezvous
    orders: tuple[Order, ...]
    dtypes: tuple[str, ...]
    device: str = "cpu"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Per order that was tried: why it does not hold; an empty text where it does."""

    failures: tuple[tuple[Order, str], ...] = ()

    def failure(self, contract: Contract) -> str:
        """Why the contract's order cannot be relied on; empty where it can."""
        return next((why for order, why in self.failures if order == contract.order), "")


class RecordJob(msgspec.Struct, frozen=True, kw_only=True):
    """Train `case.steps` steps and record them.

    `delays` are those of this world; `memory_seed` is that of what the rank allocates before it
    loads anything (None: nothing). Descriptors: the listening socket, the trace, then the data (if
    `has_data`), then the first run's trace (if `has_baseline`).
    """

    case: Case
    rendezvous: Rendezvous
    layout: TraceLayout
    description: bytes
    has_data: bool
    has_baseline: bool
    delays: tuple[Delay, ...] = ()
    memory_seed: int | None = None


class TrainJob(msgspec.Struct, frozen=True, kw_only=True):
    """Train for `epochs` epochs of at most `steps` steps (None: all of them), recording nothing.

    An empty `case.strategy` synchronises nothing. Descriptors: the listening socket, then the
    data (if `has_data`). Every rank says an `EpochFigures` per epoch, rank 0 a `RunningLoss`
    every `log_every` steps.
    """

    case: Case
    rendezvous: Rendezvous
    description: bytes
    has_data: bool
    epochs: int
    steps: int | None
    log_every: int


class RunningLoss(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0's mean loss since it last said one."""

    epoch: int
    step: int
    steps: int
    loss: float


class EpochFigures(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rank's epoch: summed loss over its samples, and seconds of every step.

    `correct` of `tested` test samples were classified right; 0 of 0 on ranks other than 0.
    """

    rank: int
    epoch: int
    loss_sum: float
    samples: int
    step_s: tuple[float, ...]
    correct: int
    tested: int


class JudgeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to judge: `planned` lists (check, layer); `steps` are the steps to judge.

    With `of_rerun` the rerun is judged in the first run's place. Descriptors: the trace, then the
    data (if `has_data`), then the rerun's trace (if `has_rerun`).
    """

    case: Case
    contract: Contract
    layout: TraceLayout
    description: bytes
    steps: tuple[int, ...]
    planned: tuple[tuple[str, str], ...]
    has_data: bool
    has_rerun: bool
    of_rerun: bool = False


class ObserveJob(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a failed case to look at more closely, the gradients' first; `failed` lists the
    (check, layer) that failed. Descriptors: the trace, then the data (if `has_data`). Answered by
    `distcheck.judge.diagnosis.facts.Facts`.
    """

    case: Case
    contract: Contract
    layout: TraceLayout
    description: bytes
    steps: tuple[int, ...]
    failed: tuple[tuple[str, str], ...]
    has_data: bool
    draws_random_numbers: bool
    takes_loss: bool = True
    update_step: int = -1  # at which parameters failed first


class TraceFilesJob(msgspec.Struct, frozen=True, kw_only=True):
    """Move traces between shared memory and a folder. Descriptors: the traces, rerun last.

    SAVE answers with the digests of the indexes, which LOAD expects in `indexes`. Without
    `tensors`, only the indexes are moved.
    """

    folder: str
    layout: TraceLayout
    indexes: tuple[str, ...] = ()
    tensors: bool = True
