"""Cases of `distcheck scale`: one workload in simulated worlds of several sizes and orders. No
torch.

Every world trains on the same total batch, as does the single-process reference, so that worlds
differ only in how a sum is divided and added.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from distcheck.addons.simulated import ORDERS
from distcheck.errors import UsageError
from distcheck.errors.spelling import did_you_mean
from distcheck.plan.cases import plan_cases
from distcheck.plan.request import Request, is_launched
from distcheck.records import Case
from distcheck.records.case import name_apart

WORKLOAD = "mlp:small"  # a trace contains every rank's gradients at every step
WORLDS = (2, 8, 64, 256)
STEPS = 2  # the second step starts from the first update
MOST_WORLD = 4096  # Heuristic: threads of one process
_BATCH = 256  # the default of `verify`


def plan_scale(asked: Mapping[str, Any], *, worlds: str | None, orders: str | None) -> list[Case]:
    """Return the cases, from the smallest world to the largest, every order at each; `asked` has
    the other fields of a request. Raises UsageError or CannotRunError.
    """
    if is_launched():
        raise UsageError("scale starts its own ranks; run it without a launcher")
    if not asked["strategies"]:
        raise UsageError("no strategy was given; pass --strategy NAME or --strategy FILE.py:OBJECT")
    sizes = WORLDS if worlds is None else _sizes(worlds)
    names = ORDERS if orders is None else _names(orders)
    batch = max(_BATCH, *sizes) if asked["batch"] is None else asked["batch"]
    workload = asked["workload"] or WORKLOAD
    rest = {name: value for name, value in asked.items() if name not in ("batch", "workload")}
    cases = [
        _alone(case, order)
        for world in sizes
        for order in names
        for case in plan_cases(
            Request(
                **{**rest, "steps": STEPS if rest["steps"] is None else rest["steps"]},
                worlds=(world,),
                workloads=(workload,),
                batch=batch,
                backend=f"simulated:{order}",
                separate=False,
            )
        )
    ]
    return name_apart(cases)


def _alone(case: Case, order: str) -> Case:
    """Return a case without its rerun, which would double the cost of a large world."""
    return msgspec.structs.replace(case, id=f"{case.id}-{order}", rerun=False)


def _sizes(words: str) -> Sequence[int]:
    found = []
    for word in words.split(","):
        if not (word.strip().isascii() and word.strip().isdecimal() and len(word) < 9):
            raise UsageError(
                f"--world {words!r} is not a list of world sizes; pass for example --world "
                f"{','.join(map(str, WORLDS))}"
            )
        found.append(int(word))
        if not 2 <= found[-1] <= MOST_WORLD:
            raise UsageError(
                f"--world: {found[-1]} is out of range; a world takes 2 to {MOST_WORLD} ranks here"
            )
    return sorted(set(found))


def _names(words: str) -> Sequence[str]:
    found = [word.strip() for word in words.split(",")]
    for word in found:
        if word not in ORDERS:
            raise UsageError(
                f"--orders: unknown order {word!r}{did_you_mean(word, ORDERS)}; known are "
                f"{', '.join(ORDERS)}"
            )
    return list(dict.fromkeys(found))
