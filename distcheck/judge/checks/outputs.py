"""In a layout, the model's outputs equal those of a single process for the same samples.

A loss hides some errors of a model: cross-entropy does not change if a constant is added to all
logits, and a mean over samples does not depend on the order of rows.
"""

from collections.abc import Sequence

from distcheck.judge.checks.comparison import Comparison
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.matching import comparison_for_form
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.forms import ExpectedOutputs
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.layout import OUTPUTS
from distcheck.records import FindingKind
from distcheck.records.layers import NO_OUTPUTS


def compare(evidence: Evidence, tally: Tally) -> None:
    """Compare the outputs of each rank with those expected for its data coordinate's samples."""
    mesh = evidence.mesh
    if mesh is None:
        return
    for expectation in evidence.expectations:
        written = all(header.written for header in expectation.headers)
        if not written or not isinstance(expectation.what, ExpectedOutputs):
            continue
        for data in range(mesh.data):
            _compare_shard(evidence, expectation, data, mesh.ranks_of(data), tally)


def _compare_shard(
    evidence: Evidence, expectation: Expectation, data: int, ranks: Sequence[int], tally: Tally
) -> None:
    trace, step, form = evidence.trace, expectation.step, expectation.what.expected[data]
    compare, known, has_outputs = comparison_for_form(form, tally), dict[bytes, Comparison](), False
    assert compare is not None, "there is an expectation"
    for rank in ranks:
        entry = trace.entry(rank, Kind.OUTPUT, step, 0)
        has_outputs = has_outputs or entry.state.is_there
        if entry.state is EntryState.MALFORMED:
            spec = trace.layout.outputs[0]
            row = f"{' x '.join(map(str, spec.shape[1:]))} {spec.dtype}"
            tally.missing(
                f"at step {step}, rank {rank} computed its loss from outputs without the shape "
                f"and dtype of one row per sample ({row})"
            )
        if entry.state is not EntryState.STORED:
            continue
        if entry.digest not in known:
            tensor = trace.tensor(rank, Kind.OUTPUT, step, 0)
            assert tensor is not None, "what is stored has bytes"
            known[entry.digest] = compare(tensor[: len(form.expected)])
        tally.add(known[entry.digest], parameter=OUTPUTS, rank=rank, step=step)
    if not has_outputs:
        tally.remark(NO_OUTPUTS, FindingKind.NO_OUTPUTS)
