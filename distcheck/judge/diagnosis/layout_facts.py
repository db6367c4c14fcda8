"""What is measured of wrong gradients in a model-parallel layout: plain numbers. No torch."""

import msgspec


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a tensor that has all its wrong elements: `where` in words, and by what factor they
    are off; None where they are no multiple of the right ones.
    """

    where: str
    factor: float | None


class LayoutParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter whose gradient is wrong at a step.

    `factor`: every wrong rank holds that multiple of the right gradient. `shares`: the axis along
    which what ranks hold adds up to it. `shard`: every rank holds the gradient of its own data
    coordinate's samples; `even`: the mean of all of them, unweighted. `earlier`: it is that of the
    step before; `added`: with it added. `mixed`: the axis
    whose ranks hold different pieces, each the mean or the sum of all of them. `lost`: the
    micro-batches whose gradients it lacks. `distance` is that
    from the right gradient, as a share of its norm.
    """

    name: str
    module: str
    wrong: tuple[int, ...]
    absent: tuple[int, ...] = ()
    factor: float | None = None
    shares: str = ""
    shard: bool = False
    even: bool = False
    earlier: bool = False
    added: bool = False
    mixed: str = ""
    lost: tuple[int, ...] = ()
    region: Region | None = None
    distance: float = 0.0


class WrongOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the model returned wrongly on a rank: `factor` times the right numbers; each sample's
    off by one number (`shifted`); or the right rows in another order (`reordered`). `distance` is
    that from the right ones, as a share of their norm.
    """

    rank: int
    factor: float | None = None
    shifted: bool = False
    reordered: bool = False
    distance: float = 0.0


class LayoutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a layout; `by_tokens`: ranks count by tokens, not samples. `parameters` are the
    wrong ones, in the order of the model; `right` are the names of modules whose gradients are all
    right, and that come after the last wrong one. `loss` and `expected_loss` are those of the ranks
    that have one; `apart`: ranks that read the same samples had losses further from each other than
    rounding explains. `outputs` are those of the first rank that has wrong ones.
    """

    step: int
    axes: tuple[tuple[str, int], ...]
    micro_batches: int
    total: int
    by_tokens: bool = False
    parameters: tuple[LayoutParameter, ...] = ()
    right: tuple[str, ...] = ()
    loss_is_wrong: bool = False
    loss: float = 0.0
    expected_loss: float = 0.0
    apart: bool = False
    outputs: WrongOutputs | None = None
