"""What the front asks of processes that look, calibrate and train; what they answer.

No torch here: the front writes these, the process that does the job reads them. The jobs
themselves are declared at the end.
"""

from typing import Any

import msgspec

from distcheck.contract import Contract, Order, Training
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Adaptation, Case, Delay, ModelLayout, TensorSpec
from distcheck.records.expected_events import Happening
from distcheck.records.run_facts import Use
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.rendezvous import Rendezvous


class InspectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Cases to look at; of their worlds at most `ranks_here` ranks will be on this machine."""

    cases: tuple[Case, ...]
    description: bytes
    ranks_here: int = 1


# What the parameters of a model may have: see `verification/contents.py`.
TRAITS = ("tied", "sparse", "not_contiguous", "views")


class CaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a case turned out to be."""

    contract: Contract
    strategy_file: str
    strategy_line: int = 0
    syncs_statistics: bool = False  # whether the strategy's file mentions SyncBatchNorm
    model: ModelLayout
    output: TensorSpec | None = None  # what the model returns for one sample
    train_size: int
    saved_bytes_per_sample: int
    own_sampler: bool
    draws_random_numbers: bool
    normalizes_batches: bool = False
    rows_apart: bool = False  # BatchNorm sees rows that are not one sample's after the other's
    rounds_to: tuple[str, ...] = ()  # dtypes of parameters, and shorter ones of the forward pass
    makes_groups: bool = False  # whether the workload divides its parameters into groups
    updates_again: bool = True  # whether an optimizer that is built anew can repeat a step
    takes_loss: bool = True  # whether another --loss may be declared for the strategy
    note: str = ""
    uses: tuple[Use, ...] = ()  # by the strategy's code
    exchanges: bool = True  # whether the strategy's code names a collective
    marks: tuple[str, ...] = ()  # attributes that it looks for, and that torch has not
    refusal: str = ""  # by the form that was chosen first, where another is tried
    guessed: bool = False  # how the strategy is called
    own_backward: bool = False
    own_update: bool = False
    own_clip: bool = False
    training: Training = Training()  # what the workload wants of the loop
    must_happen: tuple[Happening, ...] = ()  # in a run that shows what the workload is for
    by_tokens: bool = False  # whether the workload counts tokens
    kinds: tuple[str, ...] = ()  # classes of the modules that hold parameters or buffers
    groups: int = 1  # of the optimizer's parameters
    schedule: bool = False  # whether the workload changes its optimizer from step to step
    frozen: int = 0  # parameters that do not train when the model is built
    traits: tuple[str, ...] = ()  # of its parameters, those of TRAITS


class CodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: the machine, and one entry per case."""

    environment: dict[str, Any]
    cases: tuple[CaseFacts, ...]


class CalibrationRequest(msgspec.Struct, frozen=True, kw_only=True):
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


class RecordRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Train `case.steps` steps and record them.

    `delays` are those of this world; `memory_seed` is that of what the rank allocates before it
    loads anything (None: nothing). A rerun is given the first run's trace as `baseline`.
    """

    case: Case
    rendezvous: Rendezvous
    layout: TraceLayout
    description: bytes
    delays: tuple[Delay, ...] = ()
    memory_seed: int | None = None


class DigestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Train `case.steps` steps; the answer is a digest of the rank's numbers after each."""

    case: Case
    rendezvous: Rendezvous
    description: bytes


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Train for `epochs` epochs of at most `steps` steps (None: all of them), recording nothing.

    An empty `case.strategy` synchronizes nothing. Every rank says an `EpochFigures` per epoch,
    rank 0 a `RunningLoss` every `log_every` steps.
    """

    case: Case
    rendezvous: Rendezvous
    description: bytes
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
    """One rank's epoch: summed loss over its samples, and seconds of every step. `losses` are the
    steps' mean losses over `sizes` samples; 0 samples where the rank has no loss.

    `correct` of `tested` test samples were classified right; 0 of 0 on ranks other than 0, and
    where no rank has the whole model.
    """

    rank: int
    epoch: int
    loss_sum: float
    samples: int
    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    sizes: tuple[int, ...]
    correct: int
    tested: int


EXAMINE = Job("distcheck.verification.inspection:examine", bytes, dict[str, Any])
INSPECT = Job(
    "distcheck.verification.inspection:inspect_cases", InspectionRequest, CodeFacts, ("data",)
)
WAYS = Job(
    "distcheck.verification.inspection:list_ways",
    InspectionRequest,
    tuple[tuple[Adaptation, ...], ...],
)
CALIBRATE = Job(
    "distcheck.judge.oracles.calibration:calibrate_rank",
    CalibrationRequest,
    Calibration,
    (STORE,),
)
RECORD = Job(
    "distcheck.training.rank:record",
    RecordRequest,
    type(None),
    (STORE, "trace", "data", "baseline"),
)
DIGEST = Job("distcheck.training.rank:digest", DigestRequest, tuple[str, ...], (STORE, "data"))
TRAIN = Job("distcheck.training.rank:train", TrainRequest, type(None), (STORE, "data"))
