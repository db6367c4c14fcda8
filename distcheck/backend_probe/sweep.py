"""Worlds that probe one backend: one after another, each going on where the last one ended."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from distcheck.backend_probe.records import (
    LOOK,
    PROBE,
    Availability,
    LookRequest,
    Probe,
    ProbedCell,
    ProbeRequest,
    RankResult,
    VerdictName,
)
from distcheck.backends import backend_names
from distcheck.records import Outcome
from distcheck.records.ends import RankEnd
from distcheck.worlds import blame
from distcheck.worlds.launch import Ranks, internal_error, run_job, run_until_over, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.world import World

_MOST_ENDS = 3  # worlds that an operation may end; what is left of it is not tried

OnCell = Callable[[int], None]


def look_at(pool: Pool, *, backend: str, device: str, world: int) -> Availability:
    """Whether a backend can be probed here. Raises UsageError for one that is not known."""
    return run_job(pool, LOOK, LookRequest(backend=backend, device=device, world=world))


def sweep(
    pool: Pool,
    probes: Sequence[Probe],
    *,
    backend: str,
    device: str,
    world: int,
    deadline_s: float,
    on_cell: OnCell,
) -> tuple[list[ProbedCell], str]:
    """A cell per probe; and how the backend failed before any probe, empty if it did not.

    `on_cell` gets how many cells are finished.
    """
    cells: list[ProbedCell] = []
    ends: Counter[str] = Counter()
    while len(cells) < len(probes):
        following = probes[len(cells)]
        if ends[following.operation] >= _MOST_ENDS:
            reason = f"{following.operation} had already ended {_MOST_ENDS} worlds"
            cells.append(ProbedCell(probe=following, verdict="not tried", detail=reason))
            continue
        episode = _Episode(probes, len(cells), world, on_cell)
        refused = {c.probe.key(c.probe.form): c.detail for c in cells if c.verdict == "refused"}
        failure = episode.run(
            pool, backend=backend, device=device, refused=refused, deadline_s=deadline_s
        )
        if not episode.cells:
            return cells, failure or "the ranks exited before they probed anything"
        cells += episode.cells
        if cells[-1].verdict in ("crashes", "hangs"):
            ends[cells[-1].probe.operation] += 1
    return cells, ""


class _Episode:
    """One world: from a probe to the one that ends it, or to the last one."""

    def __init__(self, probes: Sequence[Probe], first: int, world: int, on_cell: OnCell) -> None:
        self._probes, self._first, self._size, self._on_cell = probes, first, world, on_cell
        self._results: dict[int, dict[int, RankResult]] = {}
        self.cells: list[ProbedCell] = []

    def run(
        self, pool: Pool, *, backend: str, device: str, refused: dict[str, str], deadline_s: float
    ) -> str:
        """Fills `cells`; returns what went wrong where nothing was probed."""
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
            child.on_said = partial(self._hear_in_time, ranks, rank)
        run_until_over(pool, ranks)
        begun = max(child.progress.step if child.progress else -1 for child in ranks.children)
        outcomes = blame.outcomes(ranks.children, hung=ranks.hung)
        finished, hung = ranks.succeeded, ranks.hung
        raised = None if finished else blame.own_defect(ranks.children, hung=hung)
        ranks.close()
        if raised is not None and backend in backend_names():
            raise internal_error(raised)
        if finished:
            return ""
        return self._end(begun, outcomes, hung=hung)

    def _hear_in_time(self, ranks: World, rank: int, said: bytes) -> None:
        """Reads reports until ranks are killed: after that, reports are about lost peers only."""
        if not ranks.hung:
            self._hear(rank, said)

    def _hear(self, rank: int, said: bytes) -> None:
        result = msgspec.msgpack.decode(said, type=RankResult)
        heard = self._results.setdefault(result.index, {})
        heard[rank] = result
        if len(heard) == self._size:
            self.cells.append(cell_of(self._probes[result.index], self._results.pop(result.index)))
            self._on_cell(self._first + len(self.cells))

    def _end(self, begun: int, outcomes: Sequence[Outcome], *, hung: bool) -> str:
        """The world ended in a probe (whatever was said of it), or before there was one."""
        verdict: VerdictName = "hangs" if hung else "crashes"
        if begun < 0:
            return f"{verdict} before any probe: {_short(outcomes[0])}"
        place = min(begun - self._first, len(self.cells))  # what not all ranks came back from
        if hung and place < len(self.cells):
            # All ranks had come back from it; it is the next group that does not come about.
            last = self.cells[place]
            after = "; afterwards the ranks could not form a new group"
            self.cells[place] = msgspec.structs.replace(last, detail=last.detail + after)
            return ""
        said = self._results.get(self._first + place, {})
        told = [f"rank {r}: {s.status}, {s.detail}" for r, s in said.items() if s.detail]
        detail = "; ".join([_how(outcomes, said, hung=hung), *told])
        elements = sum(result.elements for result in said.values())
        probe = self._probes[self._first + place]
        self.cells[place:] = [
            ProbedCell(probe=probe, verdict=verdict, detail=detail, elements=elements)
        ]
        return ""


def cell_of(probe: Probe, results: dict[int, RankResult]) -> ProbedCell:
    """The verdict on a probe from which every rank came back.

    Refused is only what every rank of the group refused: where some return as if all were well,
    the ranks go on with different ideas of what has happened.
    """
    present = {rank: r for rank, r in sorted(results.items()) if r.status != "absent"}
    elements = sum(result.elements for result in present.values())
    statuses = {result.status for result in present.values()}
    verdict: VerdictName = "wrong"
    if statuses == {"right"}:
        verdict = "right"
    elif statuses == {"refused"}:
        verdict = "refused"
    # A wrong answer says more than the refusal of another rank.
    told = sorted(
        (rank for rank, r in present.items() if r.detail),
        key=lambda rank: (present[rank].status != "wrong", rank),
    )
    detail = ""
    if told:
        first = present[told[0]]
        detail = first.detail if verdict == "refused" else f"rank {told[0]}, {first.detail}"
    if "refused" in statuses and verdict == "wrong":
        refusing = [str(rank) for rank, r in present.items() if r.status == "refused"]
        detail += f" (only rank {', '.join(refusing)} refused)"
    return ProbedCell(probe=probe, verdict=verdict, detail=detail, elements=elements)


def _how(outcomes: Sequence[Outcome], said: dict[int, RankResult], *, hung: bool) -> str:
    if hung:
        silent = sorted(
            o.rank for o in outcomes if o.outcome == RankEnd.HUNG and o.rank not in said
        )
        names = ", ".join(map(str, silent))
        return f"rank{'s' * (len(silent) > 1)} {names} did not come back" if silent else "hung"
    return _short(outcomes[0])


def _short(outcome: Outcome) -> str:
    """An outcome in a line: what a rank died of, or what it raised."""
    lines = [line.strip() for line in outcome.detail.splitlines() if line.strip()]
    if outcome.outcome == RankEnd.RAISED:
        lines = [line for line in lines if not line.startswith("last collective")]
        return f"rank {outcome.rank}, {lines[-1] if lines else 'raised'}"
    said = lines[1] if len(lines) > 1 else outcome.outcome
    return f"rank {outcome.rank}, {said}"
