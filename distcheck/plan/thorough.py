"""Plans `--thorough`: cells, more worlds, and a search. Does not import torch.

worlds   without --world, the default workloads run in worlds of 2 to 6 ranks and the cells in a
         world of 4. A given world is used for both. The report lists worlds that were not
         requested and are left out because they do not fit on this machine
search   for each strategy, `distcheck explore` for `explore_s` seconds, after its cases
"""

import importlib.util
from collections.abc import Iterable, Sequence

import msgspec

from distcheck import registry
from distcheck.backends import nccl
from distcheck.errors import CannotRunError, UsageError
from distcheck.plan.settings import Request, is_launched
from distcheck.records import Adaptation, LossName
from distcheck.records.run_facts import PlannedSearch

WORLDS = (2, 3, 4, 5, 6)
CELL_WORLDS = (4,)
MOST_EXPLORE_S = 24 * 3600.0


class ThoroughSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search that a run includes; `why_not` is the reason for leaving it out, or empty."""

    strategy: str
    budget_s: float
    adaptation: Adaptation = Adaptation()
    loss: LossName = "mean"
    seed: int = 0
    deadline_s: float = 30.0
    dtypes: tuple[str, ...] = ()  # requested ones; empty: all
    without: tuple[str, ...] = ()  # cells
    why_not: str = ""


class ThoroughExtras(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a run in addition to its cases, and rules for cases that do not run.

    `spare` world sizes may be skipped, because they were not requested. `after_hang`: run a
    strategy's remaining cases after a hang. `fail_fast`: judge no case after the first failure.
    `required`: a case that is left out makes the run unknown.
    """

    searches: tuple[ThoroughSearch, ...] = ()
    spare: tuple[int, ...] = ()
    after_hang: bool = False
    fail_fast: bool = False
    required: bool = False


NO_EXTRAS = ThoroughExtras()


def with_thorough_worlds(request: Request, *, world_given: bool) -> Request:
    if not request.thorough or world_given:
        return request
    fits = [
        world
        for world in WORLDS
        if world <= request.batch
        and not (request.backend == "nccl" and nccl.has_more_ranks_than_gpus(world))
    ]
    worlds = tuple(fits) or CELL_WORLDS
    cells = tuple(world for world in CELL_WORLDS if world in worlds) or worlds[-1:]
    return msgspec.structs.replace(request, worlds=worlds, cell_worlds=cells)


def thorough_extras(requests: Sequence[Request], *, launched: bool = False) -> ThoroughExtras:
    """Return a run's extras, with a search per strategy and form. Raises DistcheckError."""
    found: dict[tuple[str, Adaptation], ThoroughSearch] = {}
    for request in requests:
        _check_budget(request.explore_s)
        if not request.thorough or not request.explore_s:
            continue
        for strategy in request.strategies:
            search = _search(request, strategy, launched=launched)
            key = (strategy, request.adaptation)
            if (before := found.get(key)) is not None:
                dtypes = (*before.dtypes, *search.dtypes) if before.dtypes and search.dtypes else ()
                search = msgspec.structs.replace(
                    before, dtypes=dtypes, why_not=before.why_not and search.why_not
                )
            found[key] = search
    if any(not search.why_not for search in found.values()):
        _check_hypothesis()
    spare = {world for r in requests if r.cell_worlds for world in r.worlds} - {*CELL_WORLDS}
    return ThoroughExtras(
        searches=tuple(found.values()),
        spare=tuple(sorted(spare)),
        after_hang=any(request.after_hang for request in requests),
        fail_fast=any(request.fail_fast for request in requests),
    )


def planned_searches(
    searches: Iterable[ThoroughSearch], shard_of: dict[str, int]
) -> tuple[PlannedSearch, ...]:
    """Return the searches of a plan; `shard_of` maps each strategy to its shard."""
    return tuple(
        PlannedSearch(
            strategy=search.strategy, budget_s=search.budget_s, shard=shard_of[search.strategy]
        )
        for search in searches
    )


def _search(request: Request, strategy: str, *, launched: bool) -> ThoroughSearch:
    return ThoroughSearch(
        strategy=strategy,
        budget_s=request.explore_s,
        adaptation=request.adaptation,
        loss=request.loss,  # type: ignore[arg-type]
        seed=request.seed,
        deadline_s=request.deadline_s,
        dtypes=() if request.dtype is None else (request.dtype,),
        without=request.without,
        why_not=_why_not(request, launched=launched),
    )


def _why_not(request: Request, *, launched: bool) -> str:
    if not registry.is_installed("explore"):
        return "not searched: the add-on explore is not installed"
    if launched or is_launched():
        return "not searched: explore starts its own ranks, but a launcher started these"
    if request.backend != "gloo" or request.device != "cpu":
        what = request.backend if request.backend != "gloo" else request.device
        return f"not searched: explore runs only with gloo on the CPU, not with {what}"
    if request.accept is not None:
        return f"not searched: explored cases have no bounds for --accept {request.accept}"
    if request.dtype == "float16":
        return "not searched: explore draws no case in float16"
    return ""


def _check_budget(explore_s: float) -> None:
    if not 0 <= explore_s <= MOST_EXPLORE_S:
        raise UsageError(
            f"--explore-s {explore_s:g} is out of range; it takes a number of seconds from 0 (no "
            f"search) to {MOST_EXPLORE_S:g}"
        )


def _check_hypothesis() -> None:
    if importlib.util.find_spec("hypothesis") is None:
        raise CannotRunError(
            "--thorough searches with hypothesis, which is not installed; run pip install "
            "'distcheck[explore]', or pass --explore-s 0"
        )
