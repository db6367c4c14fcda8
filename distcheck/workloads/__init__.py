"""The yardsticks that strategies are measured with, one file each; each defines `workload`.

What the front must know of them without importing torch is here.
"""

from collections.abc import Mapping

import msgspec

from distcheck.records.layers import IN_FLOAT32


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a workload before it is loaded; the defaults are those of any user's.

    steps     3 show what begins after the first exchange, and buckets that DDP has rebuilt; 12,
              where a step costs little, what begins later
    data      what it trains on whatever `--data` says; empty where it takes that
    in_float64  whether its float64 case costs seconds, not minutes
    without   the layers that have nothing to say about it
    least     samples that each rank must have: BatchNorm cannot normalize a single one
    """

    steps: int = 3
    data: str = ""
    in_float64: bool = False
    without: tuple[str, ...] = ()
    least: int = 1


ABOUT: Mapping[str, About] = {
    "lattice": About(steps=12, data="lattice"),
    "mlp": About(in_float64=True),
    "transformer": About(in_float64=True),
    "experts": About(in_float64=True),
    "tokens": About(data="synthetic", in_float64=True),
    "features": About(data="synthetic", in_float64=True),
    "cnn": About(in_float64=True),
    "twelve_steps": About(steps=12, data="synthetic", without=(IN_FLOAT32,)),
    # In float32 it has dropout, and a whole batch would draw other masks.
    "composite": About(data="synthetic", in_float64=True, without=(IN_FLOAT32,), least=2),
}
# The float64 case beside a float32 one is there for full batch float64, which looks for what shards
# mean: that is the same at every step. Two, so that the second starts from parameters that were
# updated.
STEPS_IN_FLOAT64 = 2


class InDefaultRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the default run does with a workload besides training and judging it once.

    if_it_can  right code may be unable to train it: where ranks crash or hang, it does not count
    promised   it is for a strategy alone that promises this, as `@strategy(...)` has it
    steps      fewer than its own, where another workload shows what begins late
    """

    in_float64: bool = False
    rerun: bool = False
    if_it_can: bool = False
    promised: Mapping[str, str] = {}
    steps: int | None = None


# What one workload shows for all is done with one: the rerun where collectives are few, float64
# where the model is rich, many steps where they cost nothing.
DEFAULT_RUN: Mapping[str, InDefaultRun] = {
    "lattice": InDefaultRun(steps=3),
    "cnn": InDefaultRun(rerun=True),
    "composite": InDefaultRun(in_float64=True),
    "twelve_steps": InDefaultRun(),
    "tokens": InDefaultRun(promised={"loss": "tokens"}),
    "absent_on_some": InDefaultRun(if_it_can=True),
}


def about(name: str) -> About:
    """What is known of a workload, a person's own included; of a variant (`lattice:no-scalar`),
    what is known of its workload.
    """
    return ABOUT.get(name.partition(":")[0], About())
