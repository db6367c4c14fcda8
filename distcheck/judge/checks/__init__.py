"""The checks: pure functions from what was recorded and what was expected to a verdict.

One file a check, in the order of the report:

    outcome, data, initial_state, outputs, local_gradients, gradients, loss, parameters, buffers,
    agreement, rerun

A check module defines `compare(evidence, tally)`; `tally.layer` says by which layer, and the plan
whether it is judged step by step or over the whole run. It trains nothing, keeps nothing, starts no
process, reads no clock, and decides nothing about other checks: what is expected was computed
before (`judge/job.py`), and is frozen. It is given one step at a time, in the order of the
steps; with `OVER_STEPS = True` all at once. `outcome` alone needs no trace and is judged by the
front.

`purpose` cannot fail: it says whether what a workload is for happened.

What they compare with:

    evidence.py     what a check gets to see
    matching.py     one tensor of every rank with one expectation; pairwise.py: two recordings
    comparison.py   two tensors: to the bit, within a bound, by relative norm
    tally.py        adds up what was compared, and keeps the worst and the first place
    merging.py      the results of one check as one, and whether they cover what is required
    sensitivity.py  which of the simplest mistakes a comparison would have shown
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from distcheck.judge.checks.evidence import Evidence
    from distcheck.judge.checks.tally import Tally

# A check, and what of a model it compares on every rank in every case, in every step: "parameters",
# "buffers" or "optimizer". Where that depends on the case it is empty, and the plan decides.
ORDER: Mapping[str, str] = {
    "outcome": "",
    "data": "",
    "initial_state": "",
    "outputs": "",
    "local_gradients": "",
    "gradients": "",
    "loss": "",
    "parameters": "",
    "buffers": "",
    "agreement": "",
    "rerun": "",
}


class Check(Protocol):
    """What a check module offers."""

    def compare(self, evidence: "Evidence", tally: "Tally") -> None:
        """Compares everything it is about, and notes it in the tally."""
        ...


def module_names() -> dict[str, str]:
    """Every check in the order of the report: name to module."""
    return {name.replace("_", " "): f"{__name__}.{name}" for name in ORDER}


def load(name: str) -> Check:
    place = f"{__name__}.{name.replace(' ', '_')}"
    module: Check = importlib.import_module(place)  # type: ignore[assignment]
    return module
