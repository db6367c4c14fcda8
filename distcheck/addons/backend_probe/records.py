"""Results of a sweep (a verdict per cell, and the exit code), and the front end's requests to
probing processes. Does not import torch.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from distcheck.errors import ExitCode
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.rendezvous import Rendezvous

VerdictName = Literal["right", "refused", "wrong", "crashes", "hangs", "not tried"]
Status = Literal["right", "wrong", "refused", "absent"]


NOT_CALLED = "not called, transposed is refused: "  # prefix of such a cell's detail


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the table. `dtype` and `reduction` are empty if the operation has none."""

    operation: str
    reduction: str
    form: str
    dtype: str

    @property
    def row(self) -> str:
        """The operation with its reduction, such as "all_reduce SUM"."""
        return f"{self.operation} {self.reduction}".strip()

    @property
    def name(self) -> str:
        """The full name of the cell, such as "all_reduce SUM, strided, float32"."""
        form = "" if self.form == "plain" else self.form
        return ", ".join(filter(None, [self.row, form, self.dtype]))

    @property
    def key(self) -> str:
        return self.key_in(self.form)

    def key_in(self, form: str) -> str:
        """Return the key of the cell with the same operation and dtype in another form."""
        return f"{self.row}/{form}/{self.dtype}"


class ProbedCell(Cell, frozen=True, kw_only=True):
    """Result of one cell. `elements` were compared over all ranks."""

    verdict: VerdictName
    detail: str
    elements: int


class Probe(Cell, frozen=True, kw_only=True):
    """One cell to probe; `salt` changes all values from cell to cell."""

    salt: int

    def ended(self, verdict: VerdictName, detail: str, elements: int = 0) -> ProbedCell:
        """Return the result of this cell."""
        return ProbedCell(
            operation=self.operation,
            reduction=self.reduction,
            form=self.form,
            dtype=self.dtype,
            verdict=verdict,
            detail=detail,
            elements=elements,
        )


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one rank in one probe; "absent" if it is not in the probed group. `elements` is the
    number of compared ones, including those around the buffers.
    """

    index: int
    status: Status
    detail: str = ""
    elements: int = 0


class BackendResults(msgspec.Struct, frozen=True, kw_only=True):
    """One backend on one device. `missing` is the reason why it cannot be probed here; empty if it
    can. `failure` is its failure before any probe.
    """

    backend: str
    device: str
    world: int
    missing: str
    failure: str
    environment: dict[str, Any]
    cells: tuple[ProbedCell, ...]


class ProbeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with another verdict than in an earlier sweep."""

    backend: str
    device: str
    cell: ProbedCell
    before: VerdictName

    @property
    def excused(self) -> bool:
        """True if it is better now. Wrong instead of crashed is not better: no error shows it."""
        verdict = self.cell.verdict
        return verdict == "right" or (verdict == "refused" and self.before != "right")


def exit_code_of(
    sweeps: Sequence[BackendResults], baseline: "Baseline | None" = None, *, asked: bool
) -> ExitCode:
    """Return the exit code. Cells with the verdict of the baseline are ignored; a missing backend
    counts if the user `asked` for it by name.

    A wrong result takes precedence over a failed rank, as in `distcheck verify`.
    """
    verdicts: set[VerdictName] = set()
    compared = False
    for sweep in sweeps:
        for cell in sweep.cells:
            compared = compared or cell.verdict in ("right", "wrong")
            before = baseline.verdict(sweep, cell) if baseline is not None else None
            if before == cell.verdict:
                continue
            lost = before == "right" and cell.verdict == "refused"
            verdicts.add("wrong" if lost else cell.verdict)
    if "wrong" in verdicts:
        return ExitCode.MISMATCH
    if verdicts & {"crashes", "hangs", "not tried"} or any(sweep.failure for sweep in sweeps):
        return ExitCode.RANK_FAILED
    if asked and any(sweep.missing for sweep in sweeps):
        return ExitCode.CANNOT_RUN
    if baseline is not None and not baseline.overlap(sweeps)[0]:
        return ExitCode.UNKNOWN  # a comparison was requested, and none was made
    return ExitCode.PASS if compared else ExitCode.UNKNOWN


class Baseline:
    """The verdicts of an earlier sweep."""

    def __init__(self, sweeps: Sequence[BackendResults]) -> None:
        self._verdicts = {
            (sweep.backend, sweep.device, sweep.world, cell.key): cell.verdict
            for sweep in sweeps
            for cell in sweep.cells
        }

    def verdict(self, sweep: BackendResults, cell: ProbedCell) -> VerdictName | None:
        return self._verdicts.get((sweep.backend, sweep.device, sweep.world, cell.key))

    def overlap(self, sweeps: Sequence[BackendResults]) -> tuple[int, int]:
        """Return how many of its cells were probed now, and how many it has."""
        probed = sum(
            self.verdict(sweep, cell) is not None for sweep in sweeps for cell in sweep.cells
        )
        return probed, len(self._verdicts)

    def changes(self, sweeps: Sequence[BackendResults]) -> list[ProbeChange]:
        found = []
        for sweep in sweeps:
            for cell in sweep.cells:
                before = self.verdict(sweep, cell)
                if before not in (None, cell.verdict):
                    found.append(
                        ProbeChange(
                            backend=sweep.backend, device=sweep.device, cell=cell, before=before
                        )
                    )
        return found


class AvailabilityRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the availability of a backend, by name or place, with `world` ranks here."""

    backend: str
    device: str
    world: int


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Availability of a backend; `missing` is empty if it is available."""

    device: str
    missing: str
    environment: dict[str, Any]


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Probes of one rank.

    `first` is the number of `probes[0]` in the whole sweep. Every rank sends a `RankResult` per
    probe. The job returns early if a fresh world must continue. `refused` are the keys of probes
    that earlier worlds found refused, each with the reason.
    """

    rendezvous: Rendezvous
    device: str
    first: int
    probes: tuple[Probe, ...]
    refused: dict[str, str]


LOOK = Job(
    "distcheck.addons.backend_probe.rank:report_availability", AvailabilityRequest, Availability
)
PROBE = Job("distcheck.addons.backend_probe.rank:probe", ProbeRequest, type(None), (STORE,))
