"""What a case is likely to cost: what an earlier run of it took here, or a rough model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distcheck.errors import DistcheckError
from distcheck.machine.resources import cores
from distcheck.records import Case
from distcheck.reports.json_report import read_document

START_S = 3.0  # torch is imported once, in the helper
INTERPRETERS_S = 2.0  # and in each of a rerun's further interpreters, beside what goes on

# Of the rough model, for one quiet core of 2024: a world begins and ends; a rank begins; a sample
# goes forwards and backwards (the mean of a float32 and a float64 one where both are usual).
_WORLD_S, _RANK_S = 0.3, 0.1
_SAMPLE_S = {"lattice": 2e-5, "mlp": 3e-5, "cnn": 2e-4, "composite": 4e-4, "vgg11": 1.1e-2,
    "twelve_steps": 1e-6,
}  # fmt: skip
_UNKNOWN_SAMPLE_S = 2e-4  # a user's own workload: taken for a cnn
_REFERENCES = 3.0  # batches that the judges compute beside the ranks' own


def rough_s(case: Case) -> float:
    """Return seconds by the rough model, from the case alone: the same on every machine."""
    sample_s = _SAMPLE_S.get(case.workload, _UNKNOWN_SAMPLE_S)
    sample_s *= 2.0 if case.dtype == "float64" else 1.0
    batches_s = case.batch * case.steps * sample_s
    worlds = 2 if case.rerun else 1
    return worlds * (_WORLD_S + _RANK_S * case.world + batches_s) + _REFERENCES * batches_s


def recorded_s(folder: Path) -> dict[tuple[Any, ...], float]:
    """Return seconds by cell, from the reports that were kept under `folder`, the newest counting.
    Judges run beside the worlds, so theirs are shared out among them.
    """
    found: dict[tuple[Any, ...], float] = {}
    for file in sorted(folder.glob("runs/*/report.json")):
        try:
            document = read_document(file)
            found |= {_cell(c): _spent_s(c) for c in document["cases"] if c["verdict"] == "pass"}
        except (DistcheckError, KeyError, TypeError):
            continue  # of another version, or not written to the end: the model will do
    return found


_ALIKE = (
    "strategy", "world", "backend", "device", "dtype", "workload", "data", "batch", "steps",
)  # fmt: skip


def cell_of(case: Case) -> tuple[Any, ...]:
    """What must be alike for a case to cost what another did."""
    return (*(getattr(case, name) for name in _ALIKE), case.rerun)


def _cell(case: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(case[name] for name in _ALIKE), "rerun" in case["timings_s"])


def _spent_s(case: Mapping[str, Any]) -> float:
    spent = case["timings_s"]
    judges = 2 * cores()  # as many as the session lets run
    others = sum(s for what, s in spent.items() if what not in ("world", "rerun"))
    return float(spent.get("world", 0.0) + spent.get("rerun", 0.0) + others / judges)
