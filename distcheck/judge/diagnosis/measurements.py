"""Measurements of a failed case: plain numbers, from which causes are derived. Does not import
torch.

For one step, facts describe each rank's result y in terms of the W shard gradients g_r (the mean
gradient of rank r's shard, whatever a strategy did to its loss). With a QR factorization of the
columns g_r, G = Q R, the distance of y from any combination follows from a few numbers:

    |y - G c|^2 = |R c - Q^T y|^2 + |y - Q Q^T y|^2

so a cause that predicts weights c can be tested without the tensors. A result that was computed as
sum c_r g_r in any order is within

    gamma(k) * sum_r |c_r| |g_r|  +  k * tiny * sqrt(n)

of it in the L2 norm: the bound of `oracles/rounding.py`, elementwise there, by the triangle
inequality here. k is W + 5: W - 1 additions, two roundings each for the rank's weight and for the
scale, two for a further factor.
"""

from math import isclose

import msgspec

from distcheck.records import LossName

LEAST_FOR_A_GRID = 16  # elements; fewer may be representable in a lower precision by chance

Vector = tuple[float, ...]


class ParameterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter whose gradient is wrong on some rank. Vectors have one number per rank.

    norms, basis, projected, remainder   norms of the shard gradients; rows of R; Q^T y; norm of the
               residual of y
    floor      the absolute part of the bound
    wrong      ranks with a wrong gradient
    of_mean, of_own, of_either   numbers of elements (of `elements`) that equal the mean, the rank's
               local gradient, or any of the two
    kinds      further values of elements (`zero`, `own / W`, `sum`, `any rank's`, `some ranks'`)
               with the number of elements that equal them or the mean
    shorter    the dtype whose rounding matches the errors, or ""
    on_grid    True if the result, or W times the result, is representable in that dtype
    of_terms   True if the result is the mean of the ranks' gradients, each rounded to that dtype
    coarse     bound of the L2 error of quantizing the rank's gradient, if accepted
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
    gamma: float = 0.0  # of its dtype; 0: the step's
    shorter: tuple[str, ...]
    on_grid: tuple[bool, ...]
    of_terms: tuple[bool, ...] = ()
    kinds: tuple[tuple[str, tuple[int, ...]], ...] = ()
    coarse: Vector = ()


class GradientMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A wrong gradient of one rank that matches a known tensor within that tensor's bound.

        kind   `earlier`    the mean of step `step`
               `sum`        the sum of the means from step `step` on
               `added`      the mean plus the rank's gradient at step `step`
               `left`       the mean plus some ranks' part of the mean at step `step`
               `parameter`  the mean of parameter `other`
               `mixed`      the mean of this parameter's gradients on some ranks and of `other`'s
                            gradients on `ranks`
               `permuted`   the elements of the mean in a different order

    `distance` and `bound` are L2 norms.
    """

    kind: str
    rank: int
    parameter: str
    distance: float
    bound: float
    step: int = -1
    other: str = ""
    ranks: tuple[int, ...] = ()


class GradientFit(msgspec.Struct, frozen=True, kw_only=True):
    """Least-squares fit of one rank's wrong gradients to the shard gradients, with scaled
    parameters.

    `tolerance` [W] is the rounding error of each coefficient. `residual` is relative to the result.
    If `identified` is False, the shards' gradients are too similar, and coefficients mean nothing.
    """

    coefficients: Vector
    tolerance: Vector
    residual: float
    identified: bool


class NonFiniteGradient(msgspec.Struct, frozen=True, kw_only=True):
    """The first gradient with inf or NaN. On ranks in `before`, the shard's gradient already has
    one. `hidden`: the gradient is finite although the mean of the shards' gradients is not.
    """

    rank: int
    parameter: str
    count: int
    before: tuple[int, ...]
    hidden: bool = False


class LocalGradientFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose recorded local gradient differs from its shard's gradient, in `parameters`.

    distance  relative to the shard's gradient
    source    the rank whose shard's gradient it equals; -1: none
    buffers   buffers that must come from a different rank for the shard's gradient to match bitwise
    autocast  the dtype under whose autocast the gradient matches
    """

    rank: int
    parameters: tuple[str, ...]
    distance: float
    source: int = -1
    buffers: tuple[str, ...] = ()
    autocast: str = ""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One failed step.

    Ranks here and below are positions among the ranks with data, which alone contribute to means.
    `ranks` [W] has their numbers in the world (empty: the same), for use in texts (`number`).

    total      number of parameters that are wrong, or whose mean differs from a rank's gradient;
               `silent`: number of parameters that are zero everywhere and so reveal nothing
    shares     [W] n_r / N, by samples or tokens; `mean` describes their mean
    samples, tokens, positions   [W] of a rank's shard, if ranks are weighted by tokens; otherwise
               empty, `positions` also if padding is unknown
    summed     True if backward started from the sum over a rank's tokens
    left_norms, left_factors   [W] total norms of local gradients, and their factors relative to the
               shard's gradient (None: not recorded, or not a multiple)
    left       ranks with a wrong local gradient. If ranks do not hold the mean of the local
               gradients either, `parameters` are measured relative to it; otherwise `mean_of_left`
               is True
    plain      parameters that are wrong relative to the unweighted mean, if shards are uneven
    `alike`    groups of ranks with bit-identical gradients
    unchanged  ranks whose parameters the step should have updated, but did not
    undeclared True if the code promises nothing and no deviation is accepted; an option may do so
    missing    (parameter, rank) without an expected gradient
    missing_elsewhere   True if this is the whole mismatch: backward produced no gradient there, the
               other ranks hold their local gradients, and all other gradients are right
    removed    parameters without a gradient on every rank, although backward produced one
    """

    step: int
    ranks: tuple[int, ...] = ()
    shares: Vector
    gamma: float
    unit: float
    parameters: tuple[ParameterFacts, ...]
    plain: tuple[ParameterFacts, ...] = ()
    mean: str = "the mean over all samples"
    total: int
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    summed: bool = False
    micro_batches: tuple[int, ...] = ()  # of a shard, by every way of counting
    silent: int = 0  # further parameters, which show nothing about synchronization
    fits: tuple[GradientFit, ...]
    left_norms: Vector
    left_factors: tuple[float | None, ...]
    left: tuple[LocalGradientFacts, ...] = ()
    left_elements: int
    mean_of_left: bool
    matches: tuple[GradientMatch, ...]
    alike: tuple[tuple[int, ...], ...]
    unchanged: tuple[int, ...]
    missing: tuple[tuple[str, int], ...]
    missing_elsewhere: bool = False
    removed: tuple[str, ...] = ()
    not_finite: NonFiniteGradient | None
    undeclared: bool = True

    def number(self, position: int) -> int:
        return self.ranks[position] if self.ranks else position


class SampleOverlap(msgspec.Struct, frozen=True, kw_only=True):
    """Two ranks that read the same samples in an epoch: number shared, and read by each."""

    ranks: tuple[int, int]
    shared: int
    read: int
    whole_steps: bool  # identical samples at every step


class UpdateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose parameters or optimizer state differ from the optimizer's update of recorded
    values.

    `ranks` (numbered as in the world) and names locate it. The update is `factor` times the right
    update plus `decay` times the parameters, up to the relative residual `rest`.

    unchanged  True if the parameters stayed the same
    owners     True if each parameter is right on one rank only, and optimizer state is sharded
    norms      with sharded parameters: norms of the shards by which each was clipped separately
    counted    in a layout: parameters that have weight `times` in the clipping norm

    `norms` and `counted` are set only if they explain the update.
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
    """A step with several backward passes. `weights` [W][W][passes] has, for each rank, the weights
    of all ranks' passes in its result.
    """

    step: int
    passes: int
    weights: tuple[tuple[Vector, ...], ...]


class MisplacedGradient(msgspec.Struct, frozen=True, kw_only=True):
    """A gradient that is right on `holder`, but not on `owner`, whose optimizer needs it."""

    step: int
    name: str
    owner: int
    holder: int


class WrongRegion(msgspec.Struct, frozen=True, kw_only=True):
    """A box with all wrong elements of a tensor, as text, and their common factor or None."""

    where: str
    factor: float | None


MOST_EARLIER = 4  # steps; older gradients are not named
SAME_FACTOR = 1e-4  # Heuristic: relative distance below which two factors are one


class LayoutParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter whose gradient is wrong at a step.

    factor    every wrong rank holds this multiple of the right gradient, up to a rounding error of
              `factor_error`
    shares    axis along which the ranks' tensors sum to the right gradient
    shard     True if every rank holds the gradient of the samples of its data coordinate
    even      True if every rank holds the unweighted mean of these
    earlier   True if it is the gradient of the previous step; `added`: plus that gradient
    mixed     axis whose ranks have different shards, but hold the mean or sum of all shards
    lost      micro-batches that are not included
    unexchanged   True if every rank holds the result without communication, for code that
              communicates in forward
    distance  relative to the norm of the right gradient
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
    region: WrongRegion | None = None
    unexchanged: bool = False
    distance: float = 0.0

    def is_scaled_by(self, factor: float) -> bool:
        """Return True if the gradient is `factor` times the right gradient, within rounding."""
        return self.factor is not None and isclose(
            self.factor, factor, rel_tol=SAME_FACTOR, abs_tol=self.factor_error
        )


class WrongOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Wrong outputs of the model on a rank; `distance` is relative to the norm of the right
    outputs.

    factor     outputs are this multiple of the right ones
    shifted    True if the outputs of each sample differ by a constant
    reordered  True if rows are in a different order
    """

    rank: int
    factor: float | None = None
    shifted: bool = False
    reordered: bool = False
    distance: float = 0.0


class LayoutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a layout.

    parameters  wrong parameters, in model order
    right       the modules after the last wrong one; all their gradients are right
    by_tokens   True if ranks are weighted by tokens, not samples
    loss, expected_loss   of the ranks with a loss
    `apart`     True if losses of ranks with the same samples differ by more than rounding
    form        `loss` or `metric`, for code that communicates in forward
    outputs     the first wrong outputs
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
    """The source lines that a parameter's gradient passed through at a step, over all ranks.

    `given` are lines of calls that received the gradient, and `perhaps` lines of calls that may
    have received copies; "" is a call with an unknown line. `reducing` are lines that only reduce.
    `never_on` lists the ranks on which the gradient passed through no call.
    """

    step: int
    parameter: str
    given: tuple[str, ...]
    perhaps: tuple[str, ...]
    reducing: tuple[str, ...]
    never_on: tuple[int, ...]


class CompressionFacts(msgspec.Struct, frozen=True):
    """Wrong gradients of a step under an accepted compression.

    factor   between rank 0's gradients and right ones; 0.0 if there is none
    mistake  a mistake in words that explains all of them, or ""
    why      the reason that the first one is wrong
    """

    factor: float = 0.0
    mistake: str = ""
    why: str = ""


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of a case; ranks outside `steps` are numbered as in the world.

    steps            at most three, the first step with failing gradients first
    same_randomness  groups of ranks that started a forward pass from one RNG state, for a
                     workload that draws random numbers
    other_order      the reduction order that the bits match, if it is not the promised one
    batch_weights    [W] weights with which the shards' gradients sum to the full batch's gradient,
                     if the mean over all samples does not
    right_under      undeclared loss contracts under which every gradient is within the rounding
                     bound
    lost             ranks to which no gradient can come back from the loss
    design           the acceptance that the run fits, if ranks combine parameters by a design;
                     `mistake`: a known mistake in such a combination; `average`: facts of a wrong
                     average
    compression      wrong gradients of an accepted design that compresses them
    compressor       the acceptance that gradients fit, if a known compressor made them
    elsewhere        right gradients that a rank holds in place of the owner
    layout           replaces `steps` for a model-parallel layout
    forward_twice    True if wrong buffers are those after a second forward pass on the same batch
    ways             source lines of gradients at the measured steps, if known
    """

    world: int
    steps: tuple[StepFacts, ...] = ()
    overlaps: tuple[SampleOverlap, ...] = ()
    same_randomness: tuple[tuple[int, ...], ...] = ()
    other_order: str = ""
    batch_weights: Vector = ()
    right_under: tuple[LossName, ...] = ()
    lost: str = ""
    begins_alike: bool = False
    design: str = ""
    mistake: str = ""
    update: UpdateFacts | None = None
    average: StepFacts | None = None
    passes: PassFacts | None = None
    compression: CompressionFacts | None = None
    compressor: str = ""
    elsewhere: tuple[MisplacedGradient, ...] = ()
    layout: LayoutFacts | None = None
    forward_twice: bool = False
    ways: tuple[LineMeasurements, ...] = ()
    trouble: str = ""
