"""After the sync every rank holds the gradient of the whole batch: the check that matters most.

lattice   bitwise, against the closed form
X         bitwise, against the shards reduced in the declared order
R         elementwise, within the rounding bound of any order
S32, S64  per tensor, relative L2 norm against the whole batch in one process
"""

from functools import partial

from distcheck.checks.comparison import bitwise, by_norm, equal_numbers, within
from distcheck.checks.evidence import Evidence
from distcheck.checks.lattice_tensors import as_tensor
from distcheck.checks.matching import Compare, match_ranks
from distcheck.checks.tally import Tally
from distcheck.oracles.expectation import StepExpectation
from distcheck.records import TensorSpec
from distcheck.traces.layout import Kind

NAME = "gradients"
SCOPE = "step"


def compare(evidence: Evidence, tally: Tally) -> None:
    """Every parameter of every rank."""
    for expectation in evidence.expectations:
        for index, spec in enumerate(evidence.trace.layout.model.parameters):
            match_ranks(
                tally,
                evidence.trace,
                kind=Kind.GRADIENT,
                slot=expectation.step,
                step=expectation.step,
                index=index,
                ranks=evidence.ranks,
                compare=_comparison(expectation, tally.layer, index, spec),
            )
        if tally.layer in ("S32", "S64"):
            _remark_on_full_batch(expectation, tally)


def _comparison(
    expectation: StepExpectation, layer: str, index: int, spec: TensorSpec
) -> Compare | None:
    if layer == "lattice":
        return partial(
            equal_numbers, expected=as_tensor(spec, expectation.lattice.synced[spec.name])
        )
    if layer == "X":
        exact = expectation.order_exact[index]
        return None if exact is None else partial(bitwise, expected=exact)
    if layer == "R":
        interval = expectation.interval(index)
        if interval is None:
            return None
        return partial(within, expected=interval.mean, bound=interval.bound)
    full = expectation.full_batch.gradients[index]
    if full is None:
        return None
    tolerance = expectation.full_batch_tolerance(layer, spec.name)
    return partial(by_norm, expected=full, tolerance=tolerance)


def _remark_on_full_batch(expectation: StepExpectation, tally: Tally) -> None:
    if expectation.normalises_batches and expectation.step == 0:
        sizes = ", ".join(str(len(header.ids)) for header in expectation.headers)
        tally.remark(
            "BatchNorm: expected is the ghost batch, in which each rank normalises its own "
            f"shard ({sizes}); its gradient is {expectation.ghost_distance():.2f} (relative L2) "
            "from that of full-batch training, because statistics of a shard are not those of "
            "the batch; no gradient sync can change that"
        )
