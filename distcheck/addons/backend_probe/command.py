"""Runs `distcheck backends`: probes communication backends and prints a table of verdicts. This
module does not import torch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import click
import msgspec
from rich.console import Console

from distcheck import backends
from distcheck.addons.backend_probe import patterns
from distcheck.addons.backend_probe.operations import OPERATIONS
from distcheck.addons.backend_probe.records import (
    LOOK,
    PROBE,
    Availability,
    AvailabilityRequest,
    BackendResults,
    Probe,
    ProbedCell,
    ProbeRequest,
    RankResult,
    VerdictName,
    exit_code_of,
)
from distcheck.addons.backend_probe.scene import FORMS
from distcheck.addons.backend_probe.table import read_baseline, render, render_changes, render_json
from distcheck.cli.group import OnceCommand
from distcheck.cli.options import SECONDS, json_option, setting_option
from distcheck.errors import ExitCode, UsageError, did_you_mean
from distcheck.records import MOST_DEADLINE_S, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.reports.files import check_writable, write_text
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for
from distcheck.training import loading
from distcheck.worlds import root_cause
from distcheck.worlds.launch import Ranks, internal_error, run_job, run_until_over, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.world import World

_MOST_ENDS = 3  # worlds that an operation may end; the rest of it is not tried

OnCell = Callable[[int], None]


def check_availability(pool: Pool, *, backend: str, device: str, world: int) -> Availability:
    """Return whether a backend is available on this machine. Raises UsageError for an unknown
    backend.
    """
    return run_job(pool, LOOK, AvailabilityRequest(backend=backend, device=device, world=world))


def run_probes(
    pool: Pool,
    probes: Sequence[Probe],
    *,
    backend: str,
    device: str,
    world: int,
    deadline_s: float,
    on_cell: OnCell,
) -> tuple[list[ProbedCell], str]:
    """Run probes and return one cell per probe. The second value is an error message if the backend
    failed before any probe, and empty otherwise. `on_cell` is called with the number of finished
    cells.
    """
    cells: list[ProbedCell] = []
    ends: Counter[str] = Counter()
    while len(cells) < len(probes):
        following = probes[len(cells)]
        if ends[following.operation] >= _MOST_ENDS:
            reason = f"{following.operation} had already crashed {_MOST_ENDS} worlds"
            cells.append(following.ended("not tried", reason))
            continue
        episode = _Episode(probes, len(cells), world, on_cell)
        refused = {cell.key: cell.detail for cell in cells if cell.verdict == "refused"}
        failure = episode.run(
            pool, backend=backend, device=device, refused=refused, deadline_s=deadline_s
        )
        if not episode.cells:
            return cells, failure or "the ranks exited before the first probe"
        cells += episode.cells
        if cells[-1].verdict in ("crashes", "hangs"):
            ends[cells[-1].operation] += 1
    return cells, ""


class _Episode:
    """One world of ranks. It runs probes in order until a probe makes the world unusable, or to the
    last probe.
    """

    def __init__(self, probes: Sequence[Probe], first: int, world: int, on_cell: OnCell) -> None:
        self._probes, self._first, self._size, self._on_cell = probes, first, world, on_cell
        self._results: dict[int, dict[int, RankResult]] = {}
        self.cells: list[ProbedCell] = []

    def run(
        self, pool: Pool, *, backend: str, device: str, refused: dict[str, str], deadline_s: float
    ) -> str:
        """Run the world and fill `cells`. Return an error message if no probe was run."""
        probes = tuple(self._probes[self._first :])

        def request(rendezvous: Rendezvous) -> ProbeRequest:
            return ProbeRequest(
                rendezvous=rendezvous,
                device=device,
                first=self._first,
                probes=probes,
                refused=refused,
            )

        wanted = Ranks(
            job=PROBE, backend=backend, size=self._size, request=request, deadline_s=deadline_s
        )
        ranks = start_world(pool, wanted)
        for rank, child in enumerate(ranks.children):
            child.on_said = partial(self._record_result, ranks, rank)
        run_until_over(pool, ranks)
        begun = max(child.progress.step if child.progress else -1 for child in ranks.children)
        outcomes = root_cause.rank_outcomes(ranks.children, hung=ranks.hung)
        finished, hung = ranks.succeeded, ranks.hung
        raised = None if finished else root_cause.own_defect(ranks.children, hung=hung)
        ranks.close()
        if raised is not None and backend in backends.backend_names():
            raise internal_error(raised)
        if finished:
            return ""
        return self._end(begun, outcomes, hung=hung)

    def _record_result(self, ranks: World, rank: int, said: bytes) -> None:
        if ranks.hung:  # reports of killed ranks only concern lost peers
            return
        result = msgspec.msgpack.decode(said, type=RankResult)
        heard = self._results.setdefault(result.index, {})
        heard[rank] = result
        if len(heard) == self._size:
            self.cells.append(cell_of(self._probes[result.index], self._results.pop(result.index)))
            self._on_cell(self._first + len(self.cells))

    def _end(self, begun: int, outcomes: Sequence[Outcome], *, hung: bool) -> str:
        """Record the probe during which the world ended. Return an error message if the world ended
        before any probe.
        """
        verdict: VerdictName = "hangs" if hung else "crashes"
        if begun < 0:
            return f"{verdict} before any probe: {_one_line(outcomes[0])}"
        place = min(begun - self._first, len(self.cells))  # the probe that not all ranks completed
        if hung and place < len(self.cells):
            # All ranks had completed it; creating the next group failed.
            last = self.cells[place]
            after = "; afterwards the ranks could not form a new group"
            self.cells[place] = msgspec.structs.replace(last, detail=last.detail + after)
            return ""
        said = self._results.get(self._first + place, {})
        details = [f"rank {r}: {s.status}, {s.detail}" for r, s in said.items() if s.detail]
        detail = "; ".join([_how_it_failed(outcomes, said, hung=hung), *details])
        elements = sum(result.elements for result in said.values())
        probe = self._probes[self._first + place]
        self.cells[place:] = [probe.ended(verdict, detail, elements)]
        return ""


def cell_of(probe: Probe, results: dict[int, RankResult]) -> ProbedCell:
    """Return the verdict on a probe that every rank completed.

    A probe counts as refused only if every rank of the group refused it. If some ranks return
    normally, the ranks continue with inconsistent states.
    """
    present = {rank: r for rank, r in sorted(results.items()) if r.status != "absent"}
    elements = sum(result.elements for result in present.values())
    statuses = {result.status for result in present.values()}
    verdict: VerdictName = "wrong"
    if statuses == {"right"}:
        verdict = "right"
    elif statuses == {"refused"}:
        verdict = "refused"
    # A wrong result is more informative than the refusal of another rank.
    details = sorted(
        (rank for rank, r in present.items() if r.detail),
        key=lambda rank: (present[rank].status != "wrong", rank),
    )
    detail = ""
    if details:
        first = present[details[0]]
        detail = first.detail if verdict == "refused" else f"rank {details[0]}, {first.detail}"
    if "refused" in statuses and verdict == "wrong":
        refusing = [str(rank) for rank, r in present.items() if r.status == "refused"]
        detail += f" (only rank {', '.join(refusing)} refused)"
    return probe.ended(verdict, detail, elements)


def _how_it_failed(outcomes: Sequence[Outcome], said: dict[int, RankResult], *, hung: bool) -> str:
    if hung:
        silent = sorted(
            o.rank for o in outcomes if o.outcome == RankEnd.HUNG and o.rank not in said
        )
        names = ", ".join(map(str, silent))
        return f"rank{'s' * (len(silent) > 1)} {names} did not return" if silent else "hung"
    return _one_line(outcomes[0])


def _one_line(outcome: Outcome) -> str:
    """Return in one line how a rank ended, or the exception that it raised."""
    lines = [line.strip() for line in outcome.detail.splitlines() if line.strip()]
    if outcome.outcome == RankEnd.RAISED:
        lines = [line for line in lines if not line.startswith("last collective")]
        return f"rank {outcome.rank}, {lines[-1] if lines else 'raised'}"
    said = lines[1] if len(lines) > 1 else outcome.outcome
    return f"rank {outcome.rank}, {said}"


_LARGE_DTYPES = (
    "float32",
    "bfloat16",
    "int64",
)  # 4, 2 and 8 bytes; other dtypes have one of these sizes
_LEAST_RANKS = 2
_SUB_GROUP_LEAST_RANKS = 3  # a group without the first rank needs at least two ranks


def plan_probes(
    *, world: int, operations: Sequence[str], dtypes: Sequence[str], forms: Sequence[str]
) -> list[Probe]:
    """Return the probes in table order; an empty selection means all. Raises UsageError.

    The salt of a probe does not depend on the selection. The form `transposed` is added to a
    selection with `mixed`, because the expected result of `mixed` depends on whether `transposed`
    is refused.
    """
    if not _LEAST_RANKS <= world <= patterns.MOST_RANKS:
        raise UsageError(
            f"--world {world} is out of range; backends are probed with {_LEAST_RANKS} to "
            f"{patterns.MOST_RANKS} ranks, because larger sums are not exact in uint8 and bfloat16"
        )
    _check("--op", operations, OPERATIONS)
    _check("--dtype", dtypes, patterns.DTYPES)
    _check("--form", forms, FORMS)
    if "mixed" in forms:
        forms = (*forms, "transposed")
    probes = [
        probe
        for probe in _all_probes()
        if (not operations or probe.operation in operations)
        and (not dtypes or probe.dtype in (*dtypes, ""))
        and (not forms or probe.form in forms)
        and (probe.form != "sub-group" or world >= _SUB_GROUP_LEAST_RANKS)
    ]
    if not probes:
        raise UsageError(
            "--op, --dtype, --form and --world together select nothing; sub-group needs --world "
            f"{_SUB_GROUP_LEAST_RANKS}, and point-to-point has no async form"
        )
    return probes


def _all_probes() -> Iterator[Probe]:
    salt = 0
    for operation in OPERATIONS.values():
        for reduction in patterns.REDUCTIONS if operation.reduces else ("",):
            for form in operation.forms:
                for dtype in operation.dtypes:
                    if reduction and not patterns.is_meaningful(reduction, dtype):
                        continue
                    if form == "large" and dtype not in _LARGE_DTYPES:
                        continue
                    salt += 1
                    yield Probe(
                        operation=operation.name,
                        reduction=reduction,
                        form=form,
                        dtype=dtype,
                        salt=salt,
                    )


def _check(option: str, given: Sequence[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(
                f"unknown {option} {name!r}{did_you_mean(name, known)}; known are "
                f"{', '.join(known)}"
            )


_DEVICES = ("", "cpu", "cuda")


@click.command("backends", cls=OnceCommand)
@setting_option(
    "backend",
    multiple=True,
    default=(),
    metavar="NAME|FILE.py:OBJ|MOD:OBJ",
    help="Backend to probe: its name, or a function that registers one. [default: all known "
    "backends]",
)
@setting_option(
    "device",
    default="",
    help="Device of the tensors: cpu or cuda. [default: the backend's own]",
    show_default=False,
)
@click.option("--world", default=3, show_default=True, metavar="N", help="Number of ranks.")
@click.option(
    "--op", "operations", multiple=True, metavar="NAME", help="Probe only these operations."
)
@click.option("--dtype", "dtypes", multiple=True, metavar="NAME", help="Probe only these dtypes.")
@click.option(
    "--form",
    "forms",
    multiple=True,
    metavar="NAME",
    help="Probe only these forms: plain, strided, ...",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=SECONDS,
    default=3.0,
    metavar="TIME",
    help="Time without progress after which a call counts as hung. [default: 3s]",
)
@click.option(
    "--baseline",
    "baseline_file",
    metavar="FILE",
    type=click.Path(),
    help="Report of an earlier --json: its findings do not fail this run.",
)
@json_option("cells")
@click.option("-v", "--verbose", is_flag=True, help="Print every form and every finding.")
def command(
    *,
    backend: tuple[str, ...],
    device: str,
    world: int,
    operations: tuple[str, ...],
    dtypes: tuple[str, ...],
    forms: tuple[str, ...],
    deadline_s: float,
    baseline_file: str | None,
    json_file: str | None,
    verbose: bool,
) -> int:
    """Probe communication backends: which operations are correct, wrong, refused, or hang.

    \b
    distcheck backends --backend gloo
    distcheck backends --backend my_pkg.my_backend:register --op all_reduce -v
    """  # fmt: skip
    probes = plan_probes(world=world, operations=operations, dtypes=dtypes, forms=forms)
    if device not in _DEVICES:
        raise UsageError(f"unknown --device {device!r}; known are cpu and cuda")
    if not 0 < deadline_s <= MOST_DEADLINE_S:
        raise UsageError(
            f"--deadline {deadline_s:g} is out of range; it takes a number of seconds above 0, "
            f"and at most {MOST_DEADLINE_S}"
        )
    known = backends.backend_names()
    for name in backend:
        loading.check_spelling("backend", name, known)
    baseline = read_baseline(baseline_file)
    check_writable(json_file)
    pool = Pool()
    try:
        sweeps = [
            _sweep(pool, name, probes, device=device, world=world, deadline_s=deadline_s)
            # The simulated backend sends no data between processes.
            for name in dict.fromkeys(backend or [name for name in known if name != "simulated"])
        ]
    finally:
        pool.close()
    code = exit_code_of(sweeps, baseline, asked=bool(backend))
    if json_file != "-":
        console = console_for()
        for number, one in enumerate(sweeps):
            if number:
                console.print()
            render(one, console, verbose=verbose)
        if baseline is not None:
            render_changes(sweeps, baseline, console)
        elif code == ExitCode.MISMATCH:
            console.print()
            console.print("to fail on changes alone: --json now.json, then --baseline now.json")
    if json_file is not None:
        changes = baseline.changes(sweeps) if baseline is not None else []
        write_text(json_file, render_json(sweeps, changes, code))
    return int(code)


def _sweep(
    pool: Pool, name: str, probes: list[Probe], *, device: str, world: int, deadline_s: float
) -> BackendResults:
    look = check_availability(pool, backend=name, device=device, world=world)
    found = BackendResults(
        backend=name,
        device=look.device,
        world=world,
        missing=look.missing,
        failure="",
        environment=look.environment,
        cells=(),
    )
    if look.missing:
        return found
    with LiveProgress(Console(stderr=True)) as live:
        what = f"{name} on {look.device}"
        live.counted(0, len(probes), what)
        cells, failure = run_probes(
            pool,
            probes,
            backend=name,
            device=look.device,
            world=world,
            deadline_s=deadline_s,
            on_cell=lambda done: live.counted(done, len(probes), what),
        )
    return msgspec.structs.replace(found, cells=tuple(cells), failure=failure)
