"""Estimates the duration of a case, from an earlier run on this machine or by a rough model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distcheck.errors import DistcheckError
from distcheck.machine.resources import cores
from distcheck.records import Case
from distcheck.reports.json_report import read_document

START_S = 3.0  # torch is imported once, in the helper
INTERPRETERS_S = 2.0  # and in each further interpreter of a rerun, concurrently

# Measured on one quiet core of 2024: the start and end of a world; the start of a rank; a sample's
# forward and backward (mean of float32 and float64 if both are run by default).
_WORLD_S, _RANK_S = 0.3, 0.1
_SAMPLE_S = {"exact": 2e-5, "mlp": 3e-5, "cnn": 2e-4, "composite": 4e-4, "vgg11": 1.1e-2,
    "twelve_steps": 1e-6,
}  # fmt: skip
_UNKNOWN_SAMPLE_S = 2e-4  # user's workload: Heuristic: as a cnn
_REFERENCES = 3.0  # batches that judges compute in addition to the ranks


def estimated_s(case: Case) -> float:
    """Return seconds by the rough model, which depends only on the case, not on the machine."""
    sample_s = _SAMPLE_S.get(case.workload, _UNKNOWN_SAMPLE_S)
    sample_s *= 2.0 if case.dtype == "float64" else 1.0
    batches_s = case.batch * case.steps * sample_s
    worlds = 2 if case.rerun else 1
    return worlds * (_WORLD_S + _RANK_S * case.world + batches_s) + _REFERENCES * batches_s


def measured_s(folder: Path) -> dict[tuple[Any, ...], float]:
    """Return measured seconds by cell from the reports under `folder`, newest first. Judges run
    concurrently with the worlds, so their time is divided by their number.
    """
    found: dict[tuple[Any, ...], float] = {}
    for file in sorted(folder.glob("runs/*/report.json")):
        try:
            document = read_document(file)
            found |= {_cell(c): _spent_s(c) for c in document["cases"] if c["verdict"] == "pass"}
        except (DistcheckError, KeyError, TypeError):
            continue  # another version's, or incomplete: the model is used
    return found


_ALIKE = (
    "strategy", "world", "backend", "device", "dtype", "workload", "data", "batch", "steps",
)  # fmt: skip


def cost_key(case: Case) -> tuple[Any, ...]:
    """Return the values that must be equal for two cases to cost the same."""
    return (*(getattr(case, name) for name in _ALIKE), case.rerun)


def _cell(case: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(case["case"][name] for name in _ALIKE), "rerun" in case["timings_s"])


def _spent_s(case: Mapping[str, Any]) -> float:
    spent = case["timings_s"]
    judges = 2 * cores()  # as many as the session runs
    others = sum(s for what, s in spent.items() if what not in ("world", "rerun"))
    return float(spent.get("world", 0.0) + spent.get("rerun", 0.0) + others / judges)
