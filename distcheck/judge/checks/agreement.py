"""All ranks hold bitwise equal gradients, parameters and (unless sharded) optimizer state.

Agreement proves little, because all ranks may hold the same wrong value. But replicas that differ
in one bit diverge further, whatever the bounds. If ranks combine parameters by an accepted design,
only parameters agree, and only within groups of ranks (`Agreement`). Tensors that ranks unshard
collectively are always equal, and do not count as compared.
"""

from functools import partial

from distcheck.judge.checks.comparison import compare_bitwise
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import match_ranks
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.forms import Agreement
from distcheck.recordings.recording import EntryState, Kind
from distcheck.records.layers import TOGETHER


def compare(evidence: Evidence, tally: Tally) -> None:
    """Compare every rank with the first rank that has data, by digest, then by value."""
    layout, trace = evidence.trace.layout, evidence.trace
    _remark_on_idle(evidence, tally)
    kinds = [Kind.GRADIENT, Kind.PARAMETER]
    if evidence.contract.optimizer_state != "sharded":
        kinds.append(Kind.OPTIMIZER)
    found = set[Kind]()
    for expectation in evidence.expectations:
        agreed: Agreement | None = expectation.what
        if agreed is not None and agreed.remark:
            tally.remark(agreed.remark)
        for kind in kinds if agreed is None else [Kind.PARAMETER]:
            slot = expectation.step + (kind is not Kind.GRADIENT)
            indices = range(len(layout.specs(kind)))
            everyone = [[evidence.holding]] * len(indices)
            groups = everyone if agreed is None else agreed.groups
            for index, ranks in [(i, ranks) for i in indices for ranks in groups[i]]:
                compared_with = evidence.with_data[0] if agreed is None else ranks[0]
                state = trace.entry(compared_with, kind, slot, index).state
                if state not in (EntryState.STORED, EntryState.ABSENT):
                    continue  # nothing to agree with: counted as not compared
                together = trace.entry(compared_with, kind, slot, index).together
                name = layout.specs(kind)[index].name
                tally.record_may_differ(name, expectation.step, can=not together)
                if together:
                    found.add(kind)
                first = trace.tensor(compared_with, kind, slot, index)
                alike = None if first is None else partial(compare_bitwise, expected=first)
                match_ranks(
                    tally, trace, kind, expectation.step, index,
                    ranks=ranks, compare=alike,
                )  # fmt: skip
    if found:
        names = [kind.name.lower() for kind in Kind if kind in found]
        tally.remark(f"{TOGETHER} (of kind {', '.join(names)})")


def _remark_on_idle(evidence: Evidence, tally: Tally) -> None:
    """Warn about ranks without data, which are not compared."""
    idle = [str(rank) for rank in evidence.ranks if rank not in evidence.holding]
    if idle:
        tally.remark(
            f"rank {', '.join(idle)}, without data, kept its gradients at zero: it is not "
            "compared, because neither the mean nor the parameters are expected on it"
        )
