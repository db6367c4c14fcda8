"""Reference workloads on which strategies are verified. Each file defines a `workload`. This file
holds the facts that the front end needs without importing torch.
"""

from collections.abc import Mapping

import msgspec

from distcheck.records.layers import IN_FLOAT32


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a workload before it is loaded. The defaults apply to workloads of users.

    steps       3 cover errors that begin after the first synchronization, and rebuilt DDP buckets;
                12, if a step is cheap, cover errors that begin later
    data        a data set that replaces `--data`; empty: `--data` applies
    in_float64  True if its float64 case takes seconds, not minutes
    without     checks that do not apply to it
    least       samples that each rank needs: BatchNorm cannot normalize a single sample
    """

    steps: int = 3
    data: str = ""
    in_float64: bool = False
    without: tuple[str, ...] = ()
    least: int = 1


ABOUT: Mapping[str, WorkloadFacts] = {
    "exact": WorkloadFacts(steps=12, data="exact"),
    "mlp": WorkloadFacts(in_float64=True),
    "transformer": WorkloadFacts(in_float64=True),
    "experts": WorkloadFacts(in_float64=True),
    "tokens": WorkloadFacts(data="synthetic", in_float64=True),
    "features": WorkloadFacts(data="synthetic", in_float64=True),
    "cnn": WorkloadFacts(in_float64=True),
    "twelve_steps": WorkloadFacts(steps=12, data="synthetic", without=(IN_FLOAT32,)),
    # In float32 it has dropout, whose masks would differ in a full-batch run.
    "composite": WorkloadFacts(data="synthetic", in_float64=True, without=(IN_FLOAT32,), least=2),
}
# The float64 case next to a float32 one exists for full batch float64, which checks the rank
# weights, and these are the same at every step. Two steps, so that the second starts from updated
# parameters.
STEPS_IN_FLOAT64 = 2


class UseInDefaultRun(msgspec.Struct, frozen=True, kw_only=True):
    """How the default run uses a workload, in addition to training and judging it once.

    if_it_can  True if correct code may be unable to train it: then crashes and hangs are ignored
    promised   contract (`@strategy(...)`) that a strategy must have; empty: any
    steps      number of steps, if a different workload covers late errors
    """

    in_float64: bool = False
    rerun: bool = False
    if_it_can: bool = False
    promised: Mapping[str, str] = {}
    steps: int | None = None


# Each property is covered by one workload: the rerun where collectives are few, float64 where the
# model is rich, many steps where they are cheap.
DEFAULT_RUN: Mapping[str, UseInDefaultRun] = {
    "exact": UseInDefaultRun(steps=3),
    "cnn": UseInDefaultRun(rerun=True),
    "composite": UseInDefaultRun(in_float64=True),
    "twelve_steps": UseInDefaultRun(),
    "tokens": UseInDefaultRun(promised={"loss": "tokens"}),
    "absent_on_some": UseInDefaultRun(if_it_can=True),
}


def facts_about(name: str) -> WorkloadFacts:
    """Return the facts about a workload, built in or not; a variant has those of its workload."""
    return ABOUT.get(name.partition(":")[0], WorkloadFacts())
