"""Compares the ranks' replica states. Pure functions, so all ranks reach the same conclusion."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from distcheck.job.guard.records import ReplicaFinding

PARAMETERS, BUFFERS, STATE, SETTINGS = "parameters", "buffers", "optimizer state", "settings"
SAMPLES, RANDOMNESS, INITIAL, STEPS = "samples", "random streams", "initial state", "steps"
NAMES, EXCHANGE = "names of parameters", "exchange"
# By kind: the compared number, and the dictionary of names behind it, if there is one.
ALIKE = {
    INITIAL: ("initial", ""),
    NAMES: ("names", ""),
    PARAMETERS: ("parameters", "parameters"),
    BUFFERS: ("buffers", "buffers"),
    STATE: ("state", "state"),
    SETTINGS: ("settings", "settings"),
}
NAMED = ("divided", *(names for _, names in ALIKE.values() if names))  # fields of `ReplicaState`
Numbers = Mapping[str, Any]


def differing_kinds(rows: Sequence[Numbers], *, first: bool) -> list[str]:
    """Return the kinds of state that differ across ranks but must not, or are equal but must
    differ. `first`: no check came before, so initial states are compared.
    """
    if len({row["step"] for row in rows}) > 1:
        return [STEPS]
    found = []
    for kind, (field, _) in ALIKE.items():
        if kind == INITIAL and not first:
            continue
        if kind == STATE and len({row["state_names"] for row in rows}) > 1:
            found.append(STATE)
        elif len({row[field] for row in rows}) > 1:
            found.append(kind)
    if divided_groups(rows) and PARAMETERS not in found:
        found.append(PARAMETERS)
    if pairs_sharing_samples(rows):
        found.append(SAMPLES)
    if groups_with_equal_number(rows, "cpu_random") or groups_with_equal_number(
        rows, "device_random"
    ):
        found.append(RANDOMNESS)
    return found


def divided_groups(rows: Sequence[Numbers]) -> list[list[int]]:
    """Return groups of indices of ranks that hold the same shard with different contents."""
    by_part: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        by_part.setdefault(row["part"], []).append(place)
    return [
        places
        for places in by_part.values()
        if len({rows[place]["divided"] for place in places}) > 1
    ]


def groups_with_equal_number(rows: Sequence[Numbers], field: str) -> list[tuple[int, ...]]:
    """Return groups of indices of ranks with the same nonzero number."""
    by_value: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        if row[field]:
            by_value.setdefault(row[field], []).append(place)
    return [tuple(places) for places in by_value.values() if len(places) > 1]


def pairs_sharing_samples(
    rows: Sequence[Mapping[str, Any]],
) -> list[tuple[tuple[int, int], int, int]]:
    """Return pairs of ranks that share most samples, with the shared and total numbers."""
    found = []
    for one, two in combinations(range(len(rows)), 2):
        own, other = rows[one]["rows"], rows[two]["rows"]
        shared, least = len(own & other), min(len(own), len(other))
        if own and (own == other or (shared > 1 and 2 * shared > least)):
            found.append(((one, two), shared, least))
    return found


def is_optimizer_state_sharded(states: Sequence[Mapping[str, object]]) -> bool:
    """Return True if every tensor of the optimizer state is on one rank only, as in ZeRO."""
    owners = [name for state in states for name in state]
    return bool(owners) and len(owners) == len(set(owners))


def groups_of(values: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Group indices by equal value; the largest group first, ties by lowest index."""
    by_value: dict[object, list[int]] = {}
    for place, value in enumerate(values):
        by_value.setdefault(value, []).append(place)
    return tuple(tuple(p) for p in sorted(by_value.values(), key=lambda p: (-len(p), p)))


def first_differing_name(
    kind: str, by_rank: Sequence[Mapping[str, object]], ranks: Sequence[int]
) -> ReplicaFinding | None:
    """Return the first name whose values differ across ranks, with the number of such names."""
    names = list(dict.fromkeys(name for one in by_rank for name in one))
    wrong = [name for name in names if len({one.get(name) for one in by_rank}) > 1]
    if not wrong:
        return None
    places = groups_of([one.get(wrong[0]) for one in by_rank])
    values = tuple(str(one.get(wrong[0], "absent")) for one in by_rank)
    return ReplicaFinding(
        kind=kind,
        first=wrong[0],
        groups=tuple(tuple(ranks[place] for place in group) for group in places),
        differing=len(wrong),
        compared=len(names),
        names=tuple(wrong[:64]),
        values=values if kind == SETTINGS else (),
    )


def first_differing_shard(
    documents: Sequence[Mapping[str, Mapping[str, object]]],
    rows: Sequence[Numbers],
    ranks: Sequence[int],
) -> ReplicaFinding | None:
    for places in divided_groups(rows):
        own = [documents[place]["divided"] for place in places]
        found = first_differing_name(PARAMETERS, own, [ranks[place] for place in places])
        if found is not None:
            return found
    return None
