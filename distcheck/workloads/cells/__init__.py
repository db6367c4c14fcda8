"""Cells: small trainings, each with one feature that real trainings have and simple ones lack.

`distcheck verify --thorough` runs all cells. A cell is a workload, so `--workload NAME` runs a
single one; this table holds the facts that the front end needs without importing torch. A strategy
that does not support a cell declines it in its contract, and a user excludes it with `--without`.
"""

from collections.abc import Mapping

import msgspec

from distcheck.contract import Contract, Training
from distcheck.errors import UsageError, did_you_mean
from distcheck.records.layers import BITWISE, IN_FLOAT32, IN_FLOAT64, ROUNDING

BATCH = 256  # samples per step over all ranks; some cells rely on it for the end of an epoch


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a cell before it is loaded.

    place      import path of its class
    about      sentence for reports and lists
    without    checks that do not apply to it
    own_batch  True if its epoch length requires steps of exactly 256 samples
    """

    place: str
    about: str
    steps: int = 3
    without: tuple[str, ...] = ()
    own_batch: bool = False

    def batch(self, asked: int, world: int) -> int:
        """Return the samples per step, about 256. If `asked` is divisible by `world`, so is the
        result: code for equal shards is correct in a training that has no others.
        """
        equal = asked % world == 0 and not self.own_batch
        return max(BATCH // world * world if equal else BATCH, world)


CELLS: Mapping[str, Cell] = {
    "tied_weights": Cell(
        place="distcheck.workloads.cells.models:TiedWeights",
        about="two layers share one weight, whose gradient comes from both",
    ),
    "unused_parameters": Cell(
        place="distcheck.workloads.cells.models:UnusedParameters",
        about="the loss never reaches one layer: its p.grad is None, on every rank",
    ),
    "unused_later": Cell(
        place="distcheck.workloads.cells.models:UnusedLater",
        about="from step 2 on one layer is unused: its p.grad is None from then on",
        steps=4,
    ),
    "frozen_parameters": Cell(
        place="distcheck.workloads.cells.models:FrozenParameters",
        about="one layer does not train (requires_grad=False): its p.grad is None",
    ),
    "frozen_later": Cell(
        place="distcheck.workloads.cells.models:FrozenLater",
        about="one layer stops training at step 2 (requires_grad=False from then on)",
        steps=4,
    ),
    "unfrozen_later": Cell(
        place="distcheck.workloads.cells.models:UnfrozenLater",
        about="one layer is unfrozen at step 2 (requires_grad=False until then)",
        steps=4,
    ),
    "called_twice": Cell(
        place="distcheck.workloads.cells.models:ModelCalledTwice",
        about="the model is called twice before one backward",
    ),
    "dropout": Cell(
        place="distcheck.workloads.cells.models:WithDropout",
        about="every rank draws different dropout masks",
    ),
    "reassigned_buffers": Cell(
        place="distcheck.workloads.cells.models:ReassignedBuffers",
        about="a buffer is replaced by a new tensor in every forward pass",
    ),
    "one_element": Cell(
        place="distcheck.workloads.cells.sizes:OneElement",
        about="parameters of a single element, with and without dimensions",
    ),
    "zero_size": Cell(
        place="distcheck.workloads.cells.sizes:ZeroSize",
        about="parameters without elements, between others",
    ),
    "indivisible_sizes": Cell(
        place="distcheck.workloads.cells.sizes:IndivisibleSizes",
        about="parameters whose sizes no world size divides, some smaller than the world size",
    ),
    "bucket_boundaries": Cell(
        place="distcheck.workloads.cells.sizes:BucketBoundaries",
        about="parameters of exactly 128 KiB and 1 MiB, and of one element more and less",
    ),
    "channels_last": Cell(
        place="distcheck.workloads.cells.sizes:ChannelsLast",
        about="convolutions in channels_last: gradients have a different memory layout",
    ),
    "transposed": Cell(
        place="distcheck.workloads.cells.sizes:Transposed",
        about="parameters that are transposed views: their gradients are not contiguous",
    ),
    "one_storage": Cell(
        place="distcheck.workloads.cells.sizes:SharedStorage",
        about="parameters that are views of the same storage",
    ),
    "mixed_dtypes": Cell(
        place="distcheck.workloads.cells.dtypes:MixedDtypes",
        about="parameters in float32, float64 and bfloat16",
        without=(IN_FLOAT32, IN_FLOAT64),
    ),
    "complex": Cell(
        place="distcheck.workloads.cells.dtypes:ComplexParameters",
        about="complex parameters, whose gradients have a real and an imaginary part",
    ),
    "sparse": Cell(
        place="distcheck.workloads.cells.dtypes:SparseGradients",
        about="an embedding with sparse gradients, whose nonzero rows differ across ranks",
        # torch may sum duplicates of a row at any time.
        without=(BITWISE, ROUNDING),
    ),
    "ragged_batch": Cell(
        place="distcheck.workloads.cells.schedules:RaggedBatch",
        about="the last batch of the epoch is smaller",
        own_batch=True,
        steps=4,
    ),
    "two_epochs": Cell(
        place="distcheck.workloads.cells.schedules:TwoEpochs",
        about="two epochs in different orders",
        own_batch=True,
        steps=4,
    ),
    "accumulation": Cell(
        place="distcheck.workloads.cells.schedules:Accumulation",
        about="two backward passes per step, the first inside no_sync() if the strategy has it",
    ),
    "clipping": Cell(
        place="distcheck.workloads.cells.schedules:Clipping",
        about="the loop clips gradients by their norm after synchronization",
    ),
    "loss_scaling": Cell(
        place="distcheck.workloads.cells.schedules:LossScaling",
        about="a GradScaler, and a gradient that overflows on one rank: every rank skips the step",
        own_batch=True,
        steps=4,
    ),
    "adamw": Cell(
        place="distcheck.workloads.composite:WithAdamW",
        about="the composite model with AdamW and two groups, whose learning rates change at "
        "every step",
        without=(IN_FLOAT32, IN_FLOAT64),
    ),
    "schedule": Cell(
        place="distcheck.workloads.cells.schedules:Schedule",
        about="the learning rate changes at every step, starting at 0",
        steps=4,
    ),
    "zero_on_some": Cell(
        place="distcheck.workloads.cells.some_ranks:ZeroOnSome",
        about="the gradient of one layer is zero on all ranks but one, and of a second layer on "
        "one rank only",
    ),
    "different_starts": Cell(
        place="distcheck.workloads.cells.some_ranks:DifferentStarts",
        about="ranks begin with different parameters and must receive those of rank 0",
    ),
    "non_finite": Cell(
        place="distcheck.workloads.cells.extremes:NonFiniteGradients",
        about="gradients with infinities and NaN on some ranks, and no GradScaler",
    ),
    "huge_gradients": Cell(
        place="distcheck.workloads.cells.extremes:HugeGradients",
        about="gradients of 1e30, whose squares overflow float32",
    ),
    "denormal_gradients": Cell(
        place="distcheck.workloads.cells.extremes:DenormalGradients",
        about="gradients below the smallest normal number of float32",
    ),
    "over_25_mib": Cell(
        place="distcheck.workloads.cells.sizes:Over25MiB",
        about="one parameter of more than 25 MiB",
        steps=1,
    ),
    "over_2_24_elements": Cell(
        place="distcheck.workloads.cells.sizes:Over2To24",
        about="one parameter of more than 2^24 elements",
        steps=1,
    ),
    "complex128": Cell(
        place="distcheck.workloads.cells.dtypes:Complex128Parameters",
        about="complex parameters with float64 components",
    ),
    "equal_twins": Cell(
        place="distcheck.workloads.cells.modules:EqualTwins",
        about="four layers of the same shape, which begin with the same parameters",
    ),
    "odd_modules": Cell(
        place="distcheck.workloads.cells.modules:OddModules",
        about="LSTM, GRU, attention, Bilinear, parametrizations, containers of parameters",
    ),
    "integer_buffers": Cell(
        place="distcheck.workloads.cells.modules:IntegerBuffers",
        about="int64, int32 and bool buffers, one beyond the exact integers of float32",
    ),
    "eval_mode": Cell(
        place="distcheck.workloads.cells.modules:InEvalMode",
        about="the model starts in eval mode and trains in it for two steps",
        steps=4,
    ),
    "kept_gradients": Cell(
        place="distcheck.workloads.cells.schedules:KeptGradients",
        about="the loop clears gradients with zero_grad(set_to_none=False)",
    ),
    "evaluation": Cell(
        place="distcheck.workloads.cells.schedules:Evaluation",
        about="between steps, a forward pass in eval mode, without gradients",
    ),
    "resume": Cell(
        place="distcheck.workloads.cells.schedules:Resume",
        about="after step 1 everything is rebuilt and loaded from a checkpoint",
        steps=4,
    ),
    # Last: many a strategy that is right elsewhere ends the run here.
    "absent_on_some": Cell(
        place="distcheck.workloads.cells.some_ranks:AbsentOnSome",
        about="one layer is used on one rank only, one on all but one, one in one step: elsewhere "
        "p.grad is None",
    ),
}


def class_of_cell(spec: str) -> str:
    """Return the import path of a cell's class; return the name of any other workload unchanged."""
    return CELLS[spec].place if spec in CELLS else spec


def check_names(names: tuple[str, ...]) -> None:
    """Raise UsageError for a name that is not a cell."""
    for name in names:
        if name not in CELLS:
            meant = did_you_mean(name, CELLS)
            raise UsageError(
                f"--without {name!r} is not a cell of --thorough{meant}; "
                f"choose from {', '.join(CELLS)}"
            )


def _shown_by(workload: str, training: Training) -> list[str]:
    """Return the cells whose feature a workload has: itself, and those of its training loop."""
    loop = {
        "accumulation": training.accumulate > 1,
        "clipping": training.clip_norm is not None,
        "loss_scaling": training.loss_scale is not None,
        "resume": training.resume_before is not None,
        "kept_gradients": training.keeps_gradients,
        "evaluation": training.evaluates,
    }
    return [name for name in CELLS if name == workload or loop.get(name, False)]


def why_declined(workload: str, contract: Contract, training: Training, *, own_update: bool) -> str:
    """Return the reason that a strategy cannot train a cell, or a workload with that `training`:
    its contract declines it, or the loop cannot provide a requirement. Empty if it can.
    `own_update` is True if the strategy takes the optimizer's step, or synchronizes within it.
    """
    for name in _shown_by(workload, training):
        if name in contract.declines:
            what = "it" if name == workload else name
            return f"its contract declines {what} ({CELLS[name].about})"
    if workload == "different_starts" and contract.initial_state is None:
        return (
            'it does not promise initial_state="rank 0" in a contract: ranks have to begin with '
            "the same parameters, so there is nothing to broadcast"
        )
    scales, clips = training.loss_scale is not None, training.clip_norm is not None
    if (clips or scales) and own_update:
        return (
            "it synchronizes gradients inside the optimizer step, after the loop would have used "
            "them"
        )
    if clips and contract.gradients == "owner":
        return (
            "the loop clips by the norm of a rank's gradients, but gradients are only on "
            "their owners"
        )
    return ""
