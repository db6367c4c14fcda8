"""What was measured of a case that failed: plain numbers, from which causes are derived. No torch.

One step's gradients are described by how each rank's result y is made of the W shard gradients
g_r (the mean gradient of rank r's shard, whatever a strategy did to its loss). With the columns
g_r put through a QR factorization, G = Q R, the distance of y from any combination is known from
a few numbers:

    |y - G c|^2 = |R c - Q^T y|^2 + |y - Q Q^T y|^2

so a cause that says what the weights c would be can be tried without the tensors. A result that
was computed as sum c_r g_r in any order is within

    gamma(k) * sum_r |c_r| |g_r|  +  k * tiny * sqrt(n)

of it in the L2 norm: the bound of `oracles/rounding.py`, elementwise there, by the triangle
inequality here. k is W + 5: W - 1 additions, two roundings each for the rank's weight and for the
scale, two for a further factor.
"""

from math import isclose

import msgspec

from distcheck.records import LossName

LEAST_FOR_A_GRID = 16  # elements; of fewer, all could be numbers of a shorter dtype by chance

Vector = tuple[float, ...]


class ParameterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter whose gradient is wrong on some rank.

    `norms` [W] are those of the shard gradients, `basis` the rows of R, `projected` [W] per rank
    Q^T y, `remainder` [W] the norm of what is left of y, `floor` the bound's absolute part.
    `wrong` lists the ranks, `of_mean` and `of_own` [W] say how many elements are the mean and how
    many the rank's own gradient (of `elements`; `of_either` counts those that are one or both).
    `kinds` names what else elements may be beside the mean (`zero`, `own / W`, `sum`, `any rank's`)
    and says per rank how many are one or the other. `shorter` names per rank the dtype whose
    roundings are of the size of the errors, empty where none's are; `on_grid` says per rank whether
    its result, or W times that, holds numbers of that dtype only; `of_terms` whether it is the mean
    of the ranks' gradients rounded to it, one by one. `coarse` [W] is how far quantizing may take
    each rank's gradient, as a norm, where that is accepted.
    """

    name: str
    elements: int
    norms: Vector
    basis: tuple[Vector, ...]
    projected: tuple[Vector, ...]
    remainder: Vector
    floor: float
    wrong: tuple[int, ...]
    of_mean: tuple[int, ...]
    of_own: tuple[int, ...]
    of_either: tuple[int, ...]
    gamma: float = 0.0  # of its own dtype; 0: the step's
    shorter: tuple[str, ...]
    on_grid: tuple[bool, ...]
    of_terms: tuple[bool, ...] = ()
    kinds: tuple[tuple[str, tuple[int, ...]], ...] = ()
    coarse: Vector = ()


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A wrong gradient of one rank that is something else, within that thing's own bound.

    kind     what it is: `earlier` (the mean of step `step`), `sum` (of the means from step `step`
             on), `added` (the mean, plus what the rank held at step `step`), `left` (the mean, plus
             the share of that which some ranks have in a mean), `parameter` (the mean of
             parameter `other`), `mixed` (the mean of this parameter's gradients on some ranks
             and of `other`'s on `ranks`), `permuted` (the mean's elements in another order)
    distance and bound are L2 norms.
    """

    kind: str
    rank: int
    parameter: str
    distance: float
    bound: float
    step: int = -1
    other: str = ""
    ranks: tuple[int, ...] = ()


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Least squares of one rank's wrong gradients on the shard gradients, parameters scaled alike.

    `tolerance` [W] is how far rounding may move each coefficient; `residual` what is left, as a
    share of the result. Coefficients mean nothing where the shards' gradients do not tell ranks
    apart (`identified` is False).
    """

    coefficients: Vector
    tolerance: Vector
    residual: float
    identified: bool


class NonFiniteGradient(msgspec.Struct, frozen=True, kw_only=True):
    """The first gradient with an infinity or a NaN; `before` are the ranks whose own shard's
    gradient has one already. `hidden`: it has none, where the mean of those gradients has.
    """

    rank: int
    parameter: str
    count: int
    before: tuple[int, ...]
    hidden: bool = False


class LeftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A rank on which backward was seen to leave something else than its shard's gradient:
    `distance` of it, as a share of that gradient, in `parameters`; `source` is the rank whose
    shard's gradient it is, if it is one's (-1: none's). `buffers` are those with which it is the
    shard's gradient to the bit, if another rank's are taken in place of those that are promised;
    `autocast` is the dtype under whose autocast the shard has it.
    """

    rank: int
    parameters: tuple[str, ...]
    distance: float
    source: int = -1
    buffers: tuple[str, ...] = ()
    autocast: str = ""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One step that failed.

    Ranks are positions here, in all that is said by rank, and below: those with data, from which
    alone means are made, numbered from 0. `ranks` [W] has the numbers that they had in the world
    that was run (empty: the same), which words about them take from `number`.

    `total` counts the parameters that are wrong, and of the others those whose mean is not every
    rank's own gradient as well: what is zero everywhere says nothing of an exchange, and is
    counted in `silent`.

    `shares` [W] are n_r / N, by samples or tokens. `samples`, `tokens` and `positions` [W] are the
    numbers of a rank's shard where ranks count by tokens (empty elsewhere; positions also where no
    padding is known); `summed`: backward started from the sum over a rank's tokens.

    `left_norms` [W] are the norms of all that backward left on each rank. `left_factors` [W] say
    what multiple of the shard's gradient that was as far as it was recorded (None: not seen, or no
    multiple), `left` lists the ranks where it was not that; where ranks do not hold the mean of it
    either, `parameters` are measured by what was left. `alike` are groups of ranks whose gradients
    agree to the bit, `unchanged` the ranks whose parameters the step did not move although they
    should have. `undeclared`: nothing is promised or accepted of the code, so that an option may
    say what it does otherwise. `mean_of_left` says whether ranks hold the right mean of what
    backward was seen to leave, which then was not the shards' gradients. `missing` lists
    (parameter, rank) without a gradient where there should be one; `missing_elsewhere` says whether
    that is the whole mismatch, in that backward left no gradient there, the other ranks hold their
    own, and all else is right.
    """

    step: int
    ranks: tuple[int, ...] = ()
    shares: Vector
    gamma: float
    unit: float
    parameters: tuple[ParameterFacts, ...]
    total: int
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    summed: bool = False
    micro_batches: tuple[int, ...] = ()  # of a shard, in all ways in which they can be counted
    silent: int = 0  # parameters besides, which say nothing of an exchange
    fits: tuple[Fit, ...]
    left_norms: Vector
    left_factors: tuple[float | None, ...]
    left: tuple[LeftFacts, ...] = ()
    left_elements: int
    mean_of_left: bool
    matches: tuple[Match, ...]
    alike: tuple[tuple[int, ...], ...]
    unchanged: tuple[int, ...]
    missing: tuple[tuple[str, int], ...]
    missing_elsewhere: bool = False
    not_finite: NonFiniteGradient | None
    undeclared: bool = True

    def number(self, position: int) -> int:
        return self.ranks[position] if self.ranks else position


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Two ranks that read the same samples in one epoch: how many, and of how many each read."""

    ranks: tuple[int, int]
    shared: int
    read: int
    whole_steps: bool  # at every step both read the very same samples


class UpdateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose parameters, or whose optimizer's state, are not what the optimizer makes of what
    ranks recorded: on which `ranks` (as the world that was run numbers them), of which names. The
    update is `factor` times the right one plus `decay` times the parameters, up to `rest` (a share
    of it); `unchanged`, where those parameters stayed as they were. `owners`: each of those
    parameters is right on one rank alone, and ranks divide the optimizer's state. `norms`: where
    the loop clips and ranks hold pieces of parameters, the norms of the pieces by whose own norm
    the update was clipped, where that explains it. `counted`: where the loop clips in a layout, the
    parameters that count `times` in the norm by which the update was clipped, where that explains
    it.
    """

    step: int
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    state: tuple[str, ...]
    factor: float
    decay: float
    rest: float
    unchanged: bool
    owners: bool = False
    norms: Vector = ()
    counted: tuple[str, ...] = ()
    times: int = 1


class PassFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A step with several backward passes: `weights` [W][W][passes] say per rank what each rank's
    passes count for in what it holds.
    """

    step: int
    passes: int
    weights: tuple[tuple[Vector, ...], ...]


class MisplacedGradient(msgspec.Struct, frozen=True, kw_only=True):
    """A gradient that is right on rank `holder`, and wrong or absent on `owner`, whose optimizer
    updates the parameter.
    """

    step: int
    name: str
    owner: int
    holder: int


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a tensor that has all its wrong elements: `where` in words, and by what factor they
    are off; None where they are no multiple of the right ones.
    """

    where: str
    factor: float | None


MOST_EARLIER = 4  # steps; a gradient that is staler has no name
SAME_FACTOR = 1e-4  # Heuristic: relative distance below which two factors are one


class LayoutParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter whose gradient is wrong at a step.

    `factor`: every wrong rank holds that multiple of the right gradient, which rounding may have
    moved by up to `factor_error`. `shares`: the axis along
    which what ranks hold adds up to it. `shard`: every rank holds the gradient of its own data
    coordinate's samples; `even`: the mean of all of them, unweighted. `earlier`: it is that of the
    step before; `added`: with it added. `mixed`: the axis
    whose ranks hold different pieces, each the mean or the sum of all of them. `lost`: the
    micro-batches whose gradients it lacks. `unexchanged`: every rank holds what code that exchanges
    by itself leaves where it exchanges nothing. `distance` is that from the right gradient, as a
    share of its norm.
    """

    name: str
    module: str
    wrong: tuple[int, ...]
    absent: tuple[int, ...] = ()
    factor: float | None = None
    factor_error: float = 0.0
    shares: str = ""
    shard: bool = False
    even: bool = False
    earlier: bool = False
    added: bool = False
    mixed: str = ""
    lost: tuple[int, ...] = ()
    region: Region | None = None
    unexchanged: bool = False
    distance: float = 0.0

    def is_scaled_by(self, factor: float) -> bool:
        """Return True if the gradient is `factor` times the right one, within its rounding."""
        return self.factor is not None and isclose(
            self.factor, factor, rel_tol=SAME_FACTOR, abs_tol=self.factor_error
        )


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
    rounding explains. `form` is that of code that exchanges by itself (`loss`, `metric`). `outputs`
    are those of the first rank that has wrong ones.
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
    form: str = ""


class LineMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Through which lines a parameter's gradient went at a step, over all ranks: those of calls
    that were `given` it, and those that `perhaps` carried copies of it; "" is a call whose line is
    not known. `reducing` are those that only reduce. `never_on` lists the ranks on which it went
    through no call.
    """

    step: int
    parameter: str
    given: tuple[str, ...]
    perhaps: tuple[str, ...]
    reducing: tuple[str, ...]
    never_on: tuple[int, ...]


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured. `steps` has at most three, the first failing one of the gradients
    first. `other_order` names the order whose bits the gradients have where the promised one's they
    have not; `batch_weights` [W], the weights with which the shards' gradients add up to the whole
    batch's, where the mean over all samples does not. `same_randomness` lists groups of ranks that
    began a forward pass from one state, for a workload that draws random numbers. `right_under`
    names the loss contracts, other than the declared one, under which every gradient of every rank
    and step would be right within the rounding bound. `lost` says of which ranks no gradient can
    come back from the loss. `begins_alike`: all ranks begin with the same bits. `averaged_every`:
    parameters were averaged after every so many steps, and rightly. `average`: of a wrong average
    of parameters, where such averages are accepted, the same facts as of gradients.
    `scaled_projection`: where low-rank gradients are accepted, by what the projections of rank 0
    must be divided to be right ones. `elsewhere`: of gradients that owners do not have and other
    ranks do. `layout`: of a model-parallel layout, what is measured in place of `steps`.
    `forward_twice`: wrong buffers are those that a second forward pass on the same batch leaves.
    `ways` are those of gradients at the steps that were looked at, where they are known. Outside of
    `steps`, ranks have the numbers of the world that was run.
    """

    world: int
    steps: tuple[StepFacts, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    same_randomness: tuple[tuple[int, ...], ...] = ()
    other_order: str = ""
    batch_weights: Vector = ()
    right_under: tuple[LossName, ...] = ()
    lost: str = ""
    begins_alike: bool = False
    averaged_every: int = 0
    update: UpdateFacts | None = None
    average: StepFacts | None = None
    passes: PassFacts | None = None
    scaled_projection: float | None = None
    elsewhere: tuple[MisplacedGradient, ...] = ()
    layout: LayoutFacts | None = None
    forward_twice: bool = False
    ways: tuple[LineMeasurements, ...] = ()
    trouble: str = ""
