"""The operators that torch ran in one step of one rank: a digest of what each was given, and of
what it has made of that.
"""

import msgspec

MOST_OPS = 20_000  # of one step
COMPILED = "torch.compile"


class OpCall(msgspec.Struct, frozen=True):
    """A call of an operator, or of a region that torch.compile has compiled: within which `module`,
    in which `part` of a step. `outputs` is empty where it is over later, as a collective is;
    `draws`: whether it draws random numbers.
    """

    name: str
    inputs: str
    outputs: str
    module: str = ""
    part: str = "forward"
    draws: bool = False


class Ops(msgspec.Struct, frozen=True):
    """Those of a step in their order, and how many are not there since they were too many."""

    calls: tuple[OpCall, ...] = ()
    left_out: int = 0
