"""Every rank begins with the parameters and buffers that one machine would begin with."""

from functools import partial

import torch

from distcheck.judge.checks.comparison import bitwise
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import match_ranks
from distcheck.judge.checks.tally import Tally
from distcheck.training.building import trainable
from distcheck.training.traces.layout import Kind


def compare(evidence: Evidence, tally: Tally) -> None:
    """Bitwise, against a model built here from the same seed; only step 0 has an initial state."""
    if not any(expectation.step == 0 for expectation in evidence.expectations):
        return
    model = evidence.ingredients.model()
    parts: dict[Kind, list[torch.Tensor]] = {
        Kind.PARAMETER: [p.detach() for _, p in trainable(model)],
        Kind.BUFFER: list(model.buffers()),
    }
    for kind, tensors in parts.items():
        for index, expected in enumerate(tensors):
            match_ranks(
                tally,
                evidence.trace,
                kind=kind,
                slot=0,
                step=0,
                index=index,
                ranks=evidence.ranks,
                compare=partial(bitwise, expected=expected),
            )
