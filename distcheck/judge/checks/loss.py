"""Every rank's loss is that of its shard, and their weighted mean is the batch's loss."""

from collections.abc import Sequence

from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.matching import comparison_for_form
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.forms import Form, MeanLoss, RankLosses, with_positive_zero
from distcheck.recordings.traces.layout import has_loss
from distcheck.records.mesh import Mesh


def compare(evidence: Evidence, tally: Tally) -> None:
    """Compare each rank bitwise, or in full batch layers the weighted mean with the batch."""
    for expectation in evidence.expectations:
        if not all(header.written for header in expectation.headers):
            continue
        if isinstance(expectation.what, MeanLoss):
            _compare_mean(evidence, expectation, expectation.what, tally)
        else:
            _compare_ranks(evidence, expectation, expectation.what, tally)


def _compare_ranks(
    evidence: Evidence, expectation: Expectation, losses: RankLosses, tally: Tally
) -> None:
    for rank, header, form in zip(
        evidence.with_data, expectation.headers, losses.forms, strict=True
    ):
        _compare_loss(tally, [rank], expectation.step, header.loss, form)


def _compare_mean(
    evidence: Evidence, expectation: Expectation, expected: MeanLoss, tally: Tally
) -> None:
    if expected.remark:
        tally.remark(expected.remark)
    if evidence.mesh is not None:
        _compare_in_mesh(evidence, evidence.mesh, expectation, expected, tally)
        return
    mean = _mean(expectation, [header.loss for header in expectation.headers])
    _compare_loss(tally, evidence.with_data, expectation.step, mean, expected.form)


def _compare_in_mesh(
    evidence: Evidence, mesh: Mesh, expectation: Expectation, expected: MeanLoss, tally: Tally
) -> None:
    """Compare the mean over ranks at the same place in every data coordinate with the batch's loss;
    in a pipeline, ranks of some places have none.
    """
    step, shown = expectation.step, False
    for ranks in mesh.along("data"):
        losses = [evidence.trace.header(rank, step).loss for rank in ranks]
        if not all(map(has_loss, losses)):
            continue
        mean = _mean(expectation, losses)
        _compare_loss(tally, ranks, step, mean, expected.form)
        shown = True
    if not shown:
        tally.missing(
            f"backward() returned no loss at step {step} on any rank of some data coordinate; "
            "return it on the rank that has it"
        )


def _compare_loss(tally: Tally, ranks: Sequence[int], step: int, loss: float, form: Form) -> None:
    compare_with = comparison_for_form(form, tally)
    assert compare_with is not None, "there is a form"
    comparison = compare_with(with_positive_zero(loss))
    for rank in ranks:
        tally.add(comparison, parameter="loss", rank=rank, step=step)


def _mean(expectation: Expectation, losses: Sequence[float]) -> float:
    sizes = [header.loss_count for header in expectation.headers]
    weights = [size * len(sizes) / max(1, sum(sizes)) for size in sizes]
    pairs = zip(losses, weights, strict=True)
    return sum(loss * weight / len(losses) for loss, weight in pairs)
