"""Compares the ranks' replica states. Pure functions, so all ranks reach the same conclusion."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from distcheck.job.guard.records import ReplicaFinding
from distcheck.records.odd_ranks import grouped

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
    """Return the kinds of state that differ across ranks but must not, or that are equal but must
    differ. With `first`, no check came before, so initial states are compared as well.
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
    if groups_with_equal_streams(rows):
        found.append(RANDOMNESS)
    return found


def divided_groups(rows: Sequence[Numbers]) -> list[tuple[int, ...]]:
    """Return groups of indices of ranks that hold the same shard with different contents."""
    holders = groups_of([row["part"] for row in rows])
    return [places for places in holders if len({rows[place]["divided"] for place in places}) > 1]


def groups_with_equal_streams(rows: Sequence[Numbers]) -> tuple[tuple[int, ...], ...]:
    """Return groups of indices of ranks that used the same RNG stream: on the CPU, or on their
    devices.
    """
    for numbers in ([row[field] for row in rows] for field in ("cpu_random", "device_random")):
        alike = [places for places in groups_of(numbers) if len(places) > 1 and numbers[places[0]]]
        if alike:
            return tuple(alike)
    return ()


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
    by_value = grouped(range(len(values)), values.__getitem__)
    return tuple(sorted(map(tuple, by_value.values()), key=lambda p: (-len(p), p)))


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
