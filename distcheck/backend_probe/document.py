"""A sweep as `distcheck.backends/1`, and back; docs/capabilities.md explains every key."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from distcheck.backend_probe.records import (
    Baseline,
    Probe,
    ProbeChange,
    ProbedCell,
    Sweep,
    VerdictName,
)
from distcheck.errors import ExitCode, UsageError
from distcheck.records.decoding import decode_json, read_bounded
from distcheck.reports import json_report
from distcheck.reports.document import made_from

SCHEMA = "distcheck.backends/1"


class _CellEntry(msgspec.Struct, kw_only=True):
    operation: str
    reduction: str
    form: str
    dtype: str
    verdict: VerdictName
    detail: str
    elements: int


class _BackendEntry(msgspec.Struct, kw_only=True):
    backend: str
    device: str
    world: int
    missing: str
    failure: str
    environment: dict[str, Any]
    cells: list[_CellEntry]


class _Document(msgspec.Struct, kw_only=True):
    schema: str
    exit_code: int
    backends: list[_BackendEntry]
    changes: list[dict[str, Any]]


def render_json(
    sweeps: Sequence[Sweep], changes: Sequence[ProbeChange], exit_code: ExitCode
) -> str:
    document = _Document(
        schema=SCHEMA,
        exit_code=int(exit_code),
        backends=[
            made_from(
                _BackendEntry,
                sweep,
                cells=[made_from(_CellEntry, cell.probe, cell) for cell in sweep.cells],
            )
            for sweep in sweeps
        ],
        changes=[
            {"backend": c.backend, "device": c.device, "cell": c.cell.probe.name,
             "before": c.before, "now": c.cell.verdict}
            for c in changes
        ],
    )  # fmt: skip
    return json_report.render(msgspec.to_builtins(document))


def read_sweeps(path: Path) -> list[Sweep]:
    """The sweeps of an earlier document. Raises UsageError for anything else."""
    try:
        document = decode_json(read_bounded(path), _Document)
    except OSError as error:
        raise UsageError(f"--baseline {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(
            f"--baseline {path} was not written by distcheck backends --json: {error}"
        ) from error
    if document.schema != SCHEMA:
        raise UsageError(
            f"--baseline {path} has the schema {document.schema!r}; this version reads {SCHEMA!r}"
        )
    return [
        made_from(Sweep, entry, cells=tuple(_cell_of(cell) for cell in entry.cells))
        for entry in document.backends
    ]


def read_baseline(path: str | None) -> Baseline | None:
    """What `--baseline` names, if anything."""
    return None if path is None else Baseline(read_sweeps(Path(path)))


def _cell_of(entry: _CellEntry) -> ProbedCell:
    return made_from(ProbedCell, entry, probe=made_from(Probe, entry, salt=0))
