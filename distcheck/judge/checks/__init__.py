"""The checks: pure functions from a recording and an expectation to a verdict.

One file per check, in report order:

    outcome, data, initial_state, outputs, local_gradients, gradients, loss, parameters, buffers,
    agreement, rerun

A check module defines `compare(evidence, tally)`. The layer is `tally.layer`. The plan decides if a
check is judged step by step or over the whole run. A check trains nothing, stores nothing, starts
no process, reads no clock, and does not depend on other checks: expectations are computed before
(`judge/job.py`) and frozen. It receives one step at a time in order, or all steps at once with
`OVER_STEPS = True`. Only `outcome` needs no trace; the front-end process judges it. `purpose`
cannot fail: it reports if the events that a workload exists for have happened.

Shared parts:

    evidence.py     the input of a check
    matching.py     one tensor of every rank against one expectation, or a pair of two recordings
    comparison.py   two tensors: bitwise, within a bound, by relative norm
    tally.py        accumulates comparisons, and keeps the worst and the first place
    merging.py      merges the results of one check, and compares them with the required coverage
    sensitivity.py  the simplest mistakes that a comparison would have revealed
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from distcheck.judge.checks.evidence import Evidence
    from distcheck.judge.checks.tally import Tally

# For each check, the tensors that it compares on every rank, case and step: "parameters", "buffers"
# or "optimizer". "" if that depends on the case; then the plan decides.
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
    """Interface of a check module."""

    def compare(self, evidence: "Evidence", tally: "Tally") -> None:
        """Compare everything that the check covers, and record it in the tally."""
        ...


def module_names() -> dict[str, str]:
    """Return the module of every check by name of the check, in report order."""
    return {name.replace("_", " "): f"{__name__}.{name}" for name in ORDER}


def load_check(name: str) -> Check:
    place = f"{__name__}.{name.replace(' ', '_')}"
    module: Check = importlib.import_module(place)  # type: ignore[assignment]
    return module
