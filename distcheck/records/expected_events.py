"""What a workload declares must happen in its run. No torch.

A training that is there for one thing (a short last batch, a step that a GradScaler skips) shows
nothing of it in a run where that did not happen: too few steps, too few ranks. A workload lists
such events as `must_happen`. They are looked for in the recorded trace (`checks/purpose.py`), and a
case in which one of them is missing is `unknown`.
"""

from typing import ClassVar, Literal

import msgspec

PURPOSE = "purpose"  # the name of the check

# On how many of the ranks with data something holds at one step; "some ranks" is not all of them.
On = Literal["every rank", "some ranks", "one rank", "every rank but one"]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One event. `expected` says it for a report, with the event's own values filled in; `ranks` is
    how many ranks with data it takes.
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
        """How many ranks with data it takes for it to happen at all."""
        return 2 if getattr(self, "on", "every rank") != "every rank" else self.ranks


class ShortBatch(_Event, frozen=True, kw_only=True):
    expected = "a step with fewer samples than the batch has"


class OtherOrder(_Event, frozen=True, kw_only=True):
    """A second epoch began, and a rank read other samples, or in another order."""

    expected = "a second epoch, in another order"


class Resumed(_Event, frozen=True, kw_only=True):
    expected = "a step after the run is resumed from a checkpoint"


class RateChanged(_Event, frozen=True, kw_only=True):
    expected = "steps with different learning rates"


class Accumulated(_Event, frozen=True, kw_only=True):
    expected = "several backward passes in a step, on every rank"


class GradientsKept(_Event, frozen=True, kw_only=True):
    expected = "a step after zero_grad(set_to_none=False)"


class Evaluated(_Event, frozen=True, kw_only=True):
    expected = "a step after a forward pass in eval mode"


class Clipped(_Event, frozen=True, kw_only=True):
    """The norm of the synchronized gradients was above the limit."""

    expected = "synchronized gradients with a norm above the limit that the loop clips to"


class ScalerSkips(_Event, frozen=True, kw_only=True):
    """A GradScaler met a gradient that is not finite, and a step without one."""

    expected = "a step that the GradScaler skips, and one that it takes"


class CalledTwice(_Event, frozen=True, kw_only=True):
    """The model is called more than once in a forward pass."""

    expected = "a model that is called at least twice before backward"


class OwnRandomNumbers(_Event, frozen=True, kw_only=True):
    """Every rank drew random numbers, others than the other ranks."""

    expected = "random numbers in the forward pass, different ones on every rank"
    ranks = 2


class StartsApart(_Event, frozen=True, kw_only=True):
    expected = "parameters that differ between ranks before the strategy is given the model"
    ranks = 2


class NoGradient(_Event, frozen=True, kw_only=True):
    """A parameter had no gradient (None) at a step; with `after_one`, after a step in which every
    rank had one.
    """

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


class Frozen(_Event, frozen=True, kw_only=True):
    """A parameter did not train at a step; with `after_training`, after a step in which it did."""

    expected = "{parameter} frozen"
    parameter: str
    after_training: bool = False

    @property
    def says(self) -> str:
        return super().says + ", after a step in which it trains" * self.after_training


class Unfrozen(_Event, frozen=True, kw_only=True):
    expected = "{parameter} trained after a step in which it is frozen"
    parameter: str


class NotFinite(_Event, frozen=True, kw_only=True):
    """A parameter's gradient held an infinity or a NaN on a rank, and no GradScaler was there."""

    expected = "a gradient of {parameter} that is not finite, without a GradScaler"
    parameter: str


class Magnitude(_Event, frozen=True, kw_only=True):
    """At a step, every element of a parameter's gradient that is not zero had a size within
    [least, most], on every rank.
    """

    expected = "gradients of {parameter} with sizes from {least:.3g} to {most:.3g}"
    parameter: str
    least: float
    most: float


class RowsApart(_Event, frozen=True, kw_only=True):
    """A parameter's gradient had rows that are zero on one rank and not on another."""

    expected = "gradients of {parameter} with other rows on one rank than on another"
    ranks = 2
    parameter: str


class TokensApart(_Event, frozen=True, kw_only=True):
    """At some step ranks had different numbers of tokens per sample; of a single rank with data,
    nothing is expected.
    """

    expected = "ranks with different numbers of tokens per sample"


class Padding(_Event, frozen=True, kw_only=True):
    expected = "positions of padding"


class BufferReplaced(_Event, frozen=True, kw_only=True):
    expected = "the buffer {buffer} changed by a step"
    buffer: str


class IntegersChanged(_Event, frozen=True, kw_only=True):
    """A buffer of integers had another value after a step, of at least `least` in size."""

    expected = "the buffer of integers {buffer} changed by a step, to at least {least:,}"
    buffer: str
    least: int = 0


class EvalMode(_Event, frozen=True, kw_only=True):
    """A step was taken in eval mode, with `buffer` left alone, and another in training mode."""

    expected = "a step in eval mode, which leaves {buffer} alone, and one in training mode"
    buffer: str


class Shapes(_Event, frozen=True, kw_only=True):
    expected = "gradients of shapes {shapes} on every rank"
    shapes: tuple[tuple[int, ...], ...]


class MoreElements(_Event, frozen=True, kw_only=True):
    expected = "a gradient of more than {elements:,} elements on every rank"
    elements: int


class MoreBytes(_Event, frozen=True, kw_only=True):
    expected = "a gradient of more than {nbytes:,} bytes on every rank"
    nbytes: int


class Remainder(_Event, frozen=True, kw_only=True):
    expected = "a parameter whose number of elements the number of ranks does not divide"
    ranks = 2


class Dtypes(_Event, frozen=True, kw_only=True):
    """Gradients of these dtypes were not zero, in both parts where they are complex."""

    expected = "gradients of dtypes {dtypes} that are not zero"
    dtypes: tuple[str, ...]


class Permuted(_Event, frozen=True, kw_only=True):
    """A parameter's dimensions lay in memory in another order than that of its indices."""

    expected = "a parameter that lies in memory in another order than that of its indices"


class Tied(_Event, frozen=True, kw_only=True):
    expected = "a gradient of a parameter that has two names"


class OneStorage(_Event, frozen=True, kw_only=True):
    expected = "gradients of parameters that are views of one storage"


class Twins(_Event, frozen=True, kw_only=True):
    expected = "at least {least} parameters of one shape and dtype, with different gradients"
    least: int


class Kinds(_Event, frozen=True, kw_only=True):
    """The model holds modules or parameters of these classes, and every parameter had a gradient
    on some rank.
    """

    expected = "{kinds} in the model, and a gradient of every parameter"
    kinds: tuple[str, ...]


Happening = (
    ShortBatch | OtherOrder | Resumed | RateChanged | Accumulated | GradientsKept | Evaluated
    | Clipped | ScalerSkips | CalledTwice | OwnRandomNumbers | StartsApart | NoGradient
    | ZeroGradient | Frozen | Unfrozen | NotFinite | Magnitude | RowsApart | TokensApart
    | Padding | BufferReplaced | IntegersChanged | EvalMode | Shapes | MoreElements | MoreBytes
    | Remainder | Dtypes | Permuted | Tied | OneStorage | Twins | Kinds
)  # fmt: skip


def least_ranks(happenings: tuple[Happening, ...]) -> int:
    """How many ranks with data a workload needs for all that must happen in it."""
    return max((one.least_ranks for one in happenings), default=1)
