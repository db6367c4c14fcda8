"""Every rank holds the full batch's gradient after synchronization: the central check.

exact     bitwise, against the closed form (or within the rounding bound, if no order is promised)
bitwise   bitwise, against the shards reduced in the declared order
rounding  elementwise, within the rounding bound of any order (or as a projection of the mean, if
          low-rank compression is accepted)
full batch float32, full batch float64
          per tensor, relative L2 norm against the full batch in a single process (full batch
          float32: shard by shard if rounding decides the side of a kink that a sample is on)
"""

import torch

from distcheck.judge.checks.comparison import Comparison
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.matching import (
    Compare,
    comparison_for_form,
    compressed_comparison,
    match_ranks,
    report_omitted_tensors,
)
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.compression import CompressedForm
from distcheck.judge.oracles.forms import Form, TensorsOfEachRank
from distcheck.recordings.recording import Kind
from distcheck.records import FindingKind, TensorSpec


def compare(evidence: Evidence, tally: Tally) -> None:
    for expectation in evidence.expectations:
        forms = expectation.what
        if forms is None:
            continue
        if isinstance(forms, TensorsOfEachRank):
            # Each rank must step by the gradient of its own shard, bit for bit.
            for rank, parts in enumerate(forms.parts):
                for index, own in enumerate(parts):
                    match_ranks(
                        tally, evidence.trace, Kind.GRADIENT, expectation.step, index,
                        ranks=[rank], compare=comparison_for_form(own, tally),
                    )  # fmt: skip
            continue
        if forms.opening:
            tally.remark(forms.opening)
        kept: list[float] = []
        for index, spec in enumerate(evidence.trace.layout.model.parameters):
            shown = expectation.shown[index]
            if shown is not None:
                tally.record_revealed(shown, parameter=spec.name, step=expectation.step)
            compare_with = _comparison(forms.of(index), tally, spec, expectation.step, kept)
            match_ranks(
                tally, evidence.trace, Kind.GRADIENT, expectation.step, index,
                ranks=evidence.holding, compare=compare_with, zero_will_do=True,
            )  # fmt: skip
            if evidence.mesh is not None:
                report_omitted_tensors(
                    tally, evidence.trace, Kind.GRADIENT, expectation.step, index, evidence.holding
                )
        _remark_on_compression(expectation, kept, tally)
        if forms.closing:
            tally.remark(forms.closing)
        if forms.excuse:
            tally.excuse(forms.excuse)


def _comparison(
    form: Form | None, tally: Tally, spec: TensorSpec, step: int, kept: list[float]
) -> Compare | None:
    if not isinstance(form, CompressedForm):
        return comparison_for_form(form, tally)

    def as_compressed(actual: torch.Tensor) -> Comparison:
        found = form.fit(actual)
        kept.append(found.kept)
        if found.why:
            tally.remark(f"{spec.name} at step {step}: {found.why}")
        return compressed_comparison(actual, form, found)

    return as_compressed


def _remark_on_compression(expectation: Expectation, kept: list[float], tally: Tally) -> None:
    """Report the fraction of the norm that compression kept; this is not judged."""
    compressed = [share for share in kept if share < 1.0]
    if compressed:
        least, most = (f"{100 * share:.2g}" for share in (min(compressed), max(compressed)))
        tally.remark(
            f"step {expectation.step}: {len(compressed)} of {len(kept)} tensors were compressed, "
            f"{least}% to {most}% of their norm kept",
            FindingKind.COMPRESSED,
        )
