"""Requests of the front end to processes that inspect, calibrate and train, and their results.

Does not import torch: the front end writes requests, and the process that runs the job reads them.
The jobs are declared at the end.
"""

from typing import Any

import msgspec

from distcheck.contract import Contract, Order, Training
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Adaptation, Case, Delay, ModelLayout, TensorSpec
from distcheck.records.expected_events import Happening
from distcheck.records.ledger import Ledger
from distcheck.records.run_facts import UsedFeature
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.rendezvous import Rendezvous


class InspectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Cases to inspect. At most `ranks_here` ranks of their worlds will run on this machine."""

    cases: tuple[Case, ...]
    description: bytes
    ranks_here: int = 1


# Traits that a model's parameters may have: see `verification/contents.py`.
TRAITS = ("tied", "sparse", "not_contiguous", "views")


class CaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a case that an inspection finds."""

    contract: Contract
    strategy_file: str
    strategy_line: int = 0
    syncs_statistics: bool = False  # True if the strategy's file mentions SyncBatchNorm
    model: ModelLayout
    output: TensorSpec | None = None  # the model's output for one sample
    train_size: int
    saved_bytes_per_sample: int
    own_sampler: bool
    draws_random_numbers: bool
    normalizes_batches: bool = False
    rows_apart: bool = False  # rows of a sample are not consecutive in BatchNorm
    rounds_to: tuple[str, ...] = ()  # dtypes of parameters, and lower-precision ones in forward
    makes_groups: bool = False  # True if the workload defines parameter groups
    updates_again: bool = True  # True if a rebuilt optimizer can repeat a step
    takes_loss: bool = True  # True if another --loss may be declared for the strategy
    note: str = ""
    uses: tuple[UsedFeature, ...] = ()  # features of the strategy's code
    exchanges: bool = True  # True if the strategy's code names a collective
    marks: tuple[str, ...] = ()  # attributes that it looks up, unknown to torch
    refusal: str = ""  # by the form selected first, if another is tried
    guessed: bool = False  # True if the form was guessed
    own_backward: bool = False
    own_update: bool = False
    own_clip: bool = False
    training: Training = Training()  # requirements of the workload for the loop
    must_happen: tuple[Happening, ...] = ()  # events that the workload requires in a run
    by_tokens: bool = False  # True if the workload counts tokens
    kinds: tuple[str, ...] = ()  # classes of modules with parameters or buffers
    groups: int = 1  # parameter groups of the optimizer
    schedule: bool = False  # True if the workload changes its optimizer between steps
    frozen: int = 0  # parameters that are frozen when the model is built
    traits: tuple[str, ...] = ()  # of its parameters, from TRAITS


class CodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Results of an inspection: the machine, and one entry per case."""

    environment: dict[str, Any]
    cases: tuple[CaseFacts, ...]


class CalibrationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Reduction orders and dtypes that one rank calibrates."""

    rendezvous: Rendezvous
    orders: tuple[Order, ...]
    dtypes: tuple[str, ...]
    device: str = "cpu"


class CalibrationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result for each calibrated order: the reason that it does not hold, or "" if it holds."""

    failures: tuple[tuple[Order, str], ...] = ()

    def failure(self, contract: Contract) -> str:
        """Return the reason that the contract's order is unreliable, or "" if it is reliable."""
        return next((why for order, why in self.failures if order == contract.order), "")


class RecordRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to train `case.steps` steps and record them.

    `delays` are the delays of this world. `memory_seed` is the seed of the rank's allocations
    before any import (None: none). A rerun receives the first run's trace as `baseline`.
    """

    case: Case
    rendezvous: Rendezvous
    layout: TraceLayout
    description: bytes
    delays: tuple[Delay, ...] = ()
    memory_seed: int | None = None


class DigestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to train `case.steps` steps, and return a digest of values after each."""

    case: Case
    rendezvous: Rendezvous
    description: bytes


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to train for `epochs` epochs of at most `steps` steps (None: all) without recording.

    An empty `case.strategy` disables gradient synchronization. Every rank sends `EpochFigures` per
    epoch, and rank 0 a `RunningLoss` every `log_every` steps.
    """

    case: Case
    rendezvous: Rendezvous
    description: bytes
    epochs: int
    steps: int | None
    log_every: int


class RunningLoss(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0's mean loss since its previous report."""

    epoch: int
    step: int
    steps: int
    loss: float


class EpochFigures(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rank's epoch: summed loss over its samples, and seconds of every step.

    losses   mean losses of the steps, over `sizes` samples; 0 samples if the rank has no loss
    correct  number of correctly classified test samples, of `tested`; 0 of 0 on ranks other than 0,
             and if no rank has the full model
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
    CalibrationResult,
    (STORE,),
)
RECORD = Job(
    "distcheck.training.rank:record",
    RecordRequest,
    tuple[Ledger, ...],
    (STORE, "trace", "data", "baseline"),
)
DIGEST = Job("distcheck.training.rank:digest", DigestRequest, tuple[str, ...], (STORE, "data"))
TRAIN = Job("distcheck.training.rank:train", TrainRequest, type(None), (STORE, "data"))
