"""What two recordings of one training have in common, and where they part."""

import msgspec

from distcheck.records import Difference


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one kind differed, over all steps and ranks."""

    kind: str
    tensors: int
    changed: int


class TraceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What two traces have in common.

    first        where bits differ first, in the order in which a step computes them; None: nowhere
    kind         what that is: initial state, sample ids, gradients, ...
    beyond       the place, at that same step, that is worst beyond its bound; None: all within
    beyond_kind  what that is, of two jobs, whose later steps are judged as well
    judged       elements at that step for which a bound could be derived
    not_judged   tensors at that step that differ and have a bound, where digests alone are known
    by_digest    whether one of the traces holds digests alone: nothing is known of distances
    moments      per kind, how many tensors were compared and how many changed
    drift        per step, the relative L2 distance of rank 0's parameters after it; empty by digest
    yardstick    per step, the same distance of a run whose parameters were moved by one ULP
    why_not      why nothing could be compared; empty where it could
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
