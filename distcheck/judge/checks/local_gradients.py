"""Every rank's gradients before any communication are those of its shard."""

from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import comparison_for_form, match_ranks
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.recording import EntryState, Kind


def compare(evidence: Evidence, tally: Tally) -> None:
    """Compare each rank bitwise with its recomputed shard, or with the closed form (exact)."""
    for expectation in evidence.expectations:
        for rank, own in zip(evidence.with_data, expectation.what.parts, strict=True):
            for index, form in enumerate(own):
                _note_unseen(evidence, tally, rank, expectation.step, index)
                match_ranks(
                    tally, evidence.trace, Kind.LOCAL_GRADIENT, expectation.step, index,
                    ranks=[rank], compare=comparison_for_form(form, tally),
                )  # fmt: skip


def _note_unseen(evidence: Evidence, tally: Tally, rank: int, step: int, index: int) -> None:
    """Warn once that the recorder missed a gradient in a completed step."""
    trace = evidence.trace
    entry = trace.entry(rank, Kind.LOCAL_GRADIENT, step, index)
    if entry.state is EntryState.UNWRITTEN and trace.header(rank, step).written:
        tally.remark(
            "the code passed parameters themselves to a collective during backward, which makes "
            "torch drop their hooks: some local gradients were not recorded and are not "
            "compared; pass parameter.data to the collective"
        )
