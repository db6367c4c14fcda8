"""Common parts of two recordings of one training, and their first divergence."""

import msgspec

from distcheck.records import Difference


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The number of differences of one kind, over all steps and ranks."""

    kind: str
    tensors: int
    changed: int


class TraceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two traces.

    first        first bitwise difference in execution order; None: there is none
    kind         its kind: initial state, sample ids, gradients, ...
    beyond       the place, at that same step, that is worst beyond its bound; None: all within
    beyond_kind  its kind, for two jobs, whose later steps are judged as well
    judged       elements at that step for which a bound could be derived
    not_judged   differing tensors at that step that have a bound, but only digests
    by_digest    if True, one of the traces has only digests: distances are unknown
    moments      per kind, the numbers of compared and changed tensors
    drift        per step, the relative L2 distance of rank 0's parameters after it; empty by digest
    yardstick    per step, the same distance for a run perturbed by one ULP
    why_not      why nothing could be compared, or ""
    """

    first: Difference | None = None
    kind: str = ""
    beyond: Difference | None = None
    beyond_kind: str = ""
    judged: int = 0
    not_judged: int = 0
    by_digest: bool = False
    moments: tuple[Moment, ...] = ()
    drift: tuple[float, ...] = ()
    noise_floor: tuple[float, ...] = ()
    why_not: str = ""
