"""Events that a workload requires in its run. Does not import torch.

A training that exists to test one feature (a short last batch, a step that a GradScaler skips)
needs a run with that event, so enough steps and ranks. A workload lists such events as
`must_happen`. `checks/purpose.py` searches for them in the recorded trace. If one is missing, the
case is `unknown`.
"""

from typing import ClassVar, Literal

import msgspec

PURPOSE = "purpose"  # the name of the check

# The ranks with data on which a property holds at one step; "some ranks" excludes all of them.
On = Literal["every rank", "some ranks", "one rank", "every rank but one"]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One event. `expected` is the text for a report, a template for the event's values; `ranks` is
    the necessary number of ranks with data.
    """

    expected: ClassVar[str]
    ranks: ClassVar[int] = 1

    @property
    def says(self) -> str:
        values = {
            name: ", ".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in msgspec.structs.asdict(self).items()
        }
        return self.expected.format(**values)

    @property
    def least_ranks(self) -> int:
        """The number of ranks with data that are necessary for the event."""
        return 2 if getattr(self, "on", "every rank") != "every rank" else self.ranks


class ShortBatch(_Event, frozen=True, kw_only=True):
    expected = "a step with fewer samples than the batch size"


class SampleOrderChanged(_Event, frozen=True, kw_only=True):
    """In a second epoch, a rank reads different samples, or in a different order."""

    expected = "a second epoch in a different order"


class Resumed(_Event, frozen=True, kw_only=True):
    expected = "a step after the run is resumed from a checkpoint"


class LearningRateChanged(_Event, frozen=True, kw_only=True):
    expected = "steps with different learning rates"


class AccumulatedPasses(_Event, frozen=True, kw_only=True):
    expected = "several backward passes in a step, on every rank"


class GradientsZeroedInPlace(_Event, frozen=True, kw_only=True):
    expected = "a step after zero_grad(set_to_none=False)"


class EvaluatedBeforeStep(_Event, frozen=True, kw_only=True):
    expected = "a step after a forward pass in eval mode"


class GradientsClipped(_Event, frozen=True, kw_only=True):
    """The norm of the reduced gradients is above the limit."""

    expected = "synchronized gradients with a norm above the limit for clipping"


class ScalerSkippedStep(_Event, frozen=True, kw_only=True):
    """A GradScaler skips a step with a nonfinite gradient, and does not skip a step without one."""

    expected = "a step that the GradScaler skips, and one that it does not skip"


class ModelCalledTwice(_Event, frozen=True, kw_only=True):
    """The model is called more than once in a forward pass."""

    expected = "a model that is called at least twice before backward"


class RankRandomNumbersDiffer(_Event, frozen=True, kw_only=True):
    """Each rank draws different random numbers in the forward pass."""

    expected = "random numbers in the forward pass that differ on every rank"
    ranks = 2


class InitialParametersDiffer(_Event, frozen=True, kw_only=True):
    expected = "parameters that differ between ranks before the strategy receives the model"
    ranks = 2


class NoGradient(_Event, frozen=True, kw_only=True):
    """A parameter has no gradient (None); with `after_one`, every rank had one before."""

    expected = "no gradient (None) of {parameter} on {on}"
    parameter: str
    on: On = "every rank"
    after_one: bool = False

    @property
    def says(self) -> str:
        return super().says + ", after a step in which it has one" * self.after_one


class ZeroGradient(_Event, frozen=True, kw_only=True):
    expected = "a gradient of {parameter} that is zero on {on}"
    parameter: str
    on: On = "every rank"


class ParameterFrozen(_Event, frozen=True, kw_only=True):
    """A parameter does not train at a step; with `after_training`, it trained before."""

    expected = "{parameter} frozen"
    parameter: str
    after_training: bool = False

    @property
    def says(self) -> str:
        return super().says + ", after a step in which it trains" * self.after_training


class ParameterUnfrozen(_Event, frozen=True, kw_only=True):
    expected = "{parameter} trained after a step in which it is frozen"
    parameter: str


class NonfiniteGradient(_Event, frozen=True, kw_only=True):
    """A parameter's gradient has inf or NaN on a rank, without a GradScaler."""

    expected = "a gradient of {parameter} that is not finite, without a GradScaler"
    parameter: str


class GradientMagnitude(_Event, frozen=True, kw_only=True):
    """A parameter's nonzero gradient elements are within [least, most], on every rank."""

    expected = "gradients of {parameter} with magnitudes from {least:.3g} to {most:.3g}"
    parameter: str
    least: float
    most: float


class NonzeroRowsDiffer(_Event, frozen=True, kw_only=True):
    """A parameter's gradient has rows that are zero on one rank and nonzero on a different rank."""

    expected = "gradients of {parameter} with different nonzero rows on different ranks"
    ranks = 2
    parameter: str


class TokensPerSampleDiffer(_Event, frozen=True, kw_only=True):
    """Ranks have different numbers of tokens per sample, unless one rank has all data."""

    expected = "ranks with different numbers of tokens per sample"


class PaddedPositions(_Event, frozen=True, kw_only=True):
    expected = "padded positions"


class BufferChanged(_Event, frozen=True, kw_only=True):
    expected = "the buffer {buffer} changed by a step"
    buffer: str


class IntegerBufferChanged(_Event, frozen=True, kw_only=True):
    """An integer buffer changes in a step, to a magnitude of at least `least`."""

    expected = "the integer buffer {buffer} changed by a step, to at least {least:,}"
    buffer: str
    least: int = 0


class StepInEvalMode(_Event, frozen=True, kw_only=True):
    """One step runs in eval mode, without a change of `buffer`, and one step in training mode."""

    expected = "a step in eval mode, which does not change {buffer}, and one in training mode"
    buffer: str


class GradientShapes(_Event, frozen=True, kw_only=True):
    expected = "gradients of shapes {shapes} on every rank"
    shapes: tuple[tuple[int, ...], ...]


class GradientWithMoreElements(_Event, frozen=True, kw_only=True):
    expected = "a gradient of more than {elements:,} elements on every rank"
    elements: int


class GradientWithMoreBytes(_Event, frozen=True, kw_only=True):
    expected = "a gradient of more than {nbytes:,} bytes on every rank"
    nbytes: int


class IndivisibleParameter(_Event, frozen=True, kw_only=True):
    expected = "a parameter whose number of elements is not divisible by the world size"
    ranks = 2


class GradientDtypes(_Event, frozen=True, kw_only=True):
    """Gradients of all these dtypes are nonzero; if complex, in both parts."""

    expected = "nonzero gradients of dtypes {dtypes}"
    dtypes: tuple[str, ...]


class PermutedMemoryLayout(_Event, frozen=True, kw_only=True):
    """The order of a parameter's dimensions in memory differs from the order of its indices."""

    expected = "a parameter whose memory layout is not in index order"


class TiedParameter(_Event, frozen=True, kw_only=True):
    expected = "a gradient of a parameter that has two names"


class SharedStorage(_Event, frozen=True, kw_only=True):
    expected = "gradients of parameters that are views of the same storage"


class SameShapeParameters(_Event, frozen=True, kw_only=True):
    expected = "at least {least} parameters of the same shape and dtype, with different gradients"
    least: int


class ModuleClasses(_Event, frozen=True, kw_only=True):
    """The model has modules or parameters of these classes, and all have a gradient."""

    expected = "{kinds} in the model, and a gradient of every parameter"
    kinds: tuple[str, ...]


Happening = (
    ShortBatch | SampleOrderChanged | Resumed | LearningRateChanged | AccumulatedPasses
    | GradientsZeroedInPlace | EvaluatedBeforeStep | GradientsClipped | ScalerSkippedStep
    | ModelCalledTwice | RankRandomNumbersDiffer | InitialParametersDiffer | NoGradient
    | ZeroGradient | ParameterFrozen | ParameterUnfrozen | NonfiniteGradient | GradientMagnitude
    | NonzeroRowsDiffer | TokensPerSampleDiffer | PaddedPositions | BufferChanged
    | IntegerBufferChanged | StepInEvalMode | GradientShapes | GradientWithMoreElements
    | GradientWithMoreBytes | IndivisibleParameter | GradientDtypes | PermutedMemoryLayout
    | TiedParameter | SharedStorage | SameShapeParameters | ModuleClasses
)  # fmt: skip


def ranks_required(happenings: tuple[Happening, ...]) -> int:
    """Return the number of ranks with data that the events of a workload require."""
    return max((one.least_ranks for one in happenings), default=1)
