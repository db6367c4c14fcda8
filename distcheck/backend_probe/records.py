"""What a sweep found: a verdict per cell, and the exit code that they add up to; and what the front
asks of the processes that probe. No torch.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from distcheck.errors import ExitCode
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.rendezvous import Rendezvous

VerdictName = Literal["right", "refused", "wrong", "crashes", "hangs", "not tried"]
Status = Literal["right", "wrong", "refused", "absent"]


NOT_CALLED = "not called, transposed is refused: "  # how the detail of such a cell begins


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One cell to try. `dtype` and `reduction` are empty where the operation has none."""

    operation: str
    reduction: str
    form: str
    dtype: str
    salt: int

    @property
    def row(self) -> str:
        """The operation with its reduction: "all_reduce SUM"."""
        return f"{self.operation} {self.reduction}".strip()

    @property
    def name(self) -> str:
        """The whole cell in words: "all_reduce SUM, strided, float32"."""
        form = "" if self.form == "plain" else self.form
        return ", ".join(filter(None, [self.row, form, self.dtype]))

    def key(self, form: str) -> str:
        """Return the cell of the same operation and dtype in another form."""
        return f"{self.row}/{form}/{self.dtype}"


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank fared in one probe; "absent" where it is not in the group that was probed.

    `elements` is how many it compared, those around the buffers included.
    """

    index: int
    status: Status
    detail: str = ""
    elements: int = 0


class ProbedCell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's end. `elements` were compared over all ranks."""

    probe: Probe
    verdict: VerdictName
    detail: str = ""
    elements: int = 0


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """One backend on one device. `missing` says why it cannot be probed here; empty if it can.

    `asked` tells whether a person named it; `failure` how it ended a world before any probe.
    """

    backend: str
    device: str
    world: int
    cells: tuple[ProbedCell, ...] = ()
    missing: str = ""
    failure: str = ""
    asked: bool = True
    environment: dict[str, Any] = msgspec.field(default_factory=dict)


class ProbeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that ended otherwise than in an earlier sweep."""

    backend: str
    device: str
    cell: ProbedCell
    before: VerdictName

    @property
    def excused(self) -> bool:
        """True if it is better now. Wrong instead of dead is not: no error shows it any more."""
        verdict = self.cell.verdict
        return verdict == "right" or (verdict == "refused" and self.before != "right")


def exit_code_of(sweeps: Sequence[Sweep], baseline: "Baseline | None" = None) -> ExitCode:
    """Return the exit code. A cell with the same verdict in the baseline, or a worse one, does not
    count.

    A wrong answer outweighs a rank that failed, as in `distcheck verify`.
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
    if any(sweep.missing and sweep.asked for sweep in sweeps):
        return ExitCode.CANNOT_RUN
    if baseline is not None and not baseline.overlap(sweeps)[0]:
        return ExitCode.UNKNOWN  # it was asked for a comparison, and none was made
    return ExitCode.PASS if compared else ExitCode.UNKNOWN


class Baseline:
    """The verdicts of an earlier sweep."""

    def __init__(self, sweeps: Sequence[Sweep]) -> None:
        self._verdicts = {
            (sweep.backend, sweep.device, sweep.world, cell.probe.key(cell.probe.form)): (
                cell.verdict
            )
            for sweep in sweeps
            for cell in sweep.cells
        }

    def verdict(self, sweep: Sweep, cell: ProbedCell) -> VerdictName | None:
        """What the cell was; None where it was not probed."""
        place = (sweep.backend, sweep.device, sweep.world, cell.probe.key(cell.probe.form))
        return self._verdicts.get(place)

    def overlap(self, sweeps: Sequence[Sweep]) -> tuple[int, int]:
        """How many of its cells were probed now, and how many it has."""
        probed = sum(
            self.verdict(sweep, cell) is not None for sweep in sweeps for cell in sweep.cells
        )
        return probed, len(self._verdicts)

    def changes(self, sweeps: Sequence[Sweep]) -> list[ProbeChange]:
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


class LookRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Whether `world` ranks could use a backend (a name, or where its `register` is) here."""

    backend: str
    device: str
    world: int


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: `missing` is empty where it can be used."""

    device: str
    missing: str
    environment: dict[str, Any]


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank probes.

    `first` is the number of `probes[0]` in the whole sweep. Every rank says a `RankResult` per
    probe. It returns early where a fresh world has to go on. `refused` are the keys of the probes
    that worlds before this one have found refused, each with the reason.
    """

    rendezvous: Rendezvous
    device: str
    first: int
    probes: tuple[Probe, ...]
    refused: dict[str, str]


LOOK = Job("distcheck.backend_probe.availability:look", LookRequest, Availability)
PROBE = Job("distcheck.backend_probe.rank:probe", ProbeRequest, type(None), (STORE,))
