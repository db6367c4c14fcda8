"""Results of probing a backend (a verdict per cell, and the exit code), and the requests that the
front end sends to probing processes. This module does not import torch.
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
    """One cell of the table: an operation, a reduction, a form and a dtype. `dtype` and `reduction`
    are empty if the operation has none.
    """

    operation: str
    reduction: str
    form: str
    dtype: str

    @property
    def row(self) -> str:
        """Name of the table row: the operation and its reduction, such as "all_reduce SUM"."""
        return f"{self.operation} {self.reduction}".strip()

    @property
    def name(self) -> str:
        """Full name of the cell, such as "all_reduce SUM, strided, float32"."""
        form = "" if self.form == "plain" else self.form
        return ", ".join(filter(None, [self.row, form, self.dtype]))

    @property
    def key(self) -> str:
        return self.key_in(self.form)

    def key_in(self, form: str) -> str:
        """Return the key of the cell that has the same operation and dtype in another form."""
        return f"{self.row}/{form}/{self.dtype}"


class ProbedCell(Cell, frozen=True, kw_only=True):
    """A cell and its verdict. `elements` is the number of elements compared on all ranks."""

    verdict: VerdictName
    detail: str
    elements: int


class Probe(Cell, frozen=True, kw_only=True):
    """A cell to probe. `salt` changes all values from cell to cell."""

    salt: int

    def ended(self, verdict: VerdictName, detail: str, elements: int = 0) -> ProbedCell:
        """Return this probe's cell with its verdict."""
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
    """Result of one probe on one rank. The status is "absent" if the rank is not in the probed
    group. `elements` is the number of compared elements, including those around the buffers.
    """

    index: int
    status: Status
    detail: str = ""
    elements: int = 0


class BackendResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one backend on one device. `missing` is the reason why the backend is not
    available here, or empty. `failure` is an error that occurred before any probe, or empty.
    """

    backend: str
    device: str
    world: int
    missing: str
    failure: str
    environment: dict[str, Any]
    cells: tuple[ProbedCell, ...]


class ProbeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A cell whose verdict differs from that in the baseline."""

    backend: str
    device: str
    cell: ProbedCell
    before: VerdictName

    @property
    def excused(self) -> bool:
        """True if the verdict is better than in the baseline. A wrong result is not better than a
        crash, because no error reveals it.
        """
        verdict = self.cell.verdict
        return verdict == "right" or (verdict == "refused" and self.before != "right")


def exit_code_of(
    sweeps: Sequence[BackendResults], baseline: "Baseline | None" = None, *, asked: bool
) -> ExitCode:
    """Return the exit code. Cells with the same verdict as in the baseline do not affect it. A
    missing backend affects it only if the user `asked` for that backend by name.

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
    """Verdicts of an earlier run, to which a new run is compared."""

    def __init__(self, sweeps: Sequence[BackendResults]) -> None:
        self._verdicts = {
            (sweep.backend, sweep.device, sweep.world, cell.key): cell.verdict
            for sweep in sweeps
            for cell in sweep.cells
        }

    def verdict(self, sweep: BackendResults, cell: ProbedCell) -> VerdictName | None:
        return self._verdicts.get((sweep.backend, sweep.device, sweep.world, cell.key))

    def overlap(self, sweeps: Sequence[BackendResults]) -> tuple[int, int]:
        """Return the number of baseline cells that were probed now, and the number of all baseline
        cells.
        """
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
    """Asks whether a backend (a name, or the place of its code) can run `world` ranks on this
    machine.
    """

    backend: str
    device: str
    world: int


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Availability of a backend; `missing` is empty if it is available."""

    device: str
    missing: str
    environment: dict[str, Any]


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The probes that a rank runs.

    `first` is the index of `probes[0]` among all probes. Every rank sends a `RankResult` per probe,
    and stops early if a new world must continue. `refused` maps the keys of probes that earlier
    worlds found refused to the reasons.
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
