"""Every rank starts with the parameters and buffers of a single process."""

from functools import partial

from distcheck.judge.checks.comparison import compare_bitwise
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import match_ranks, report_omitted_tensors
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.recording import Kind


def compare(evidence: Evidence, tally: Tally) -> None:
    """Compare bitwise with a model built from the same seed; only step 0 has an initial state."""
    for expectation in evidence.expectations:
        if expectation.what is None:
            continue
        parts = {
            Kind.PARAMETER: expectation.what.parameters,
            Kind.BUFFER: expectation.what.buffers,
        }
        for kind, tensors in parts.items():
            for index, expected in enumerate(tensors):
                match_ranks(
                    tally, evidence.trace, kind, 0, index, ranks=evidence.ranks,
                    compare=partial(compare_bitwise, expected=expected), slot=0,
                )  # fmt: skip
                if evidence.mesh is not None and kind is Kind.PARAMETER:
                    report_omitted_tensors(tally, evidence.trace, kind, 0, index, evidence.ranks)
