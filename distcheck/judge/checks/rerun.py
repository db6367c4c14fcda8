"""A second world of new ranks with the same seeds produces the same bits everywhere."""

from distcheck.judge.checks.comparison import Comparison
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import compare_pair
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.differing import pairs_of_step
from distcheck.recordings.recording import Kind

OVER_STEPS = True  # judges all recorded steps together


def compare(evidence: Evidence, tally: Tally) -> None:
    """Compare all recorded values of both runs by digest; if digests differ, compare the values."""
    if evidence.rerun is None:
        return
    layout, then, now = evidence.trace.layout, evidence.trace, evidence.rerun
    unseen = Kind.LOCAL_GRADIENT if evidence.contract.sync == "out-of-sight" else None
    for step in range(min(then.steps_written(), now.steps_written())):
        for pair in pairs_of_step(then, now, step):
            if pair.kind is None:
                if not pair.is_same:
                    compare_pair(tally, pair, then, now, name=pair.name)
                continue
            if pair.kind is unseen:
                continue
            name = f"{pair.name} ({pair.kind.label})"
            if pair.is_same:
                same = Comparison(layout.specs(pair.kind)[pair.index].elements)
                tally.add(same, parameter=name, rank=pair.rank, step=step)
            else:
                compare_pair(tally, pair, then, now, name=name)
