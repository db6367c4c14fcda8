"""Combines the matrix and the command line into cases, and selects the shard that runs here.

Command-line values override a strategy's own table in the file, which overrides the common table.
"""

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from distcheck import __version__
from distcheck.errors import DistcheckError, UsageError
from distcheck.plan import thorough
from distcheck.plan.cases import plan_cases
from distcheck.plan.configuration import BY_KEY, Configuration, read_configuration
from distcheck.plan.costs import estimated_s
from distcheck.plan.provenance import code_digest, named_code
from distcheck.plan.settings import SETTINGS, Request, with_adaptation
from distcheck.plan.thorough import NO_EXTRAS, ThoroughExtras
from distcheck.records import EXACT_DTYPES, Case, RunPlan
from distcheck.records.case import cases_digest, with_unique_ids
from distcheck.records.run_facts import PlannedSearch
from distcheck.workloads.datasets import FILE_DATASETS
from distcheck.worlds.launchers import Launch


def run_identity(cases: Sequence[Case]) -> dict[str, str]:
    """Return the values that must be equal in every process. Keys are their names in messages."""
    found = {
        "the version of distcheck": __version__,
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    for what, spec in dict.fromkeys(code for case in cases for code in named_code(case)):
        found[f"the code of {what} {spec}"] = code_digest(what, spec)
    return {**found, "the request": cases_digest(cases)}


# Settings of which a request has one value and a matrix may have several.
_SEVERAL = tuple(name for name, one in SETTINGS.items() if one.key == f"{name}s")


@dataclass(frozen=True)
class Planned:
    """A planned run: `cases` run here, in addition to the searches in `extras`. `every` has all
    cases of `whole`, the complete plan, of which this shard may be a part. `file` is the matrix;
    `from_file` describes the values that it adds to strategies named on the command line.
    """

    cases: list[Case]
    every: list[Case]
    whole: RunPlan
    file: str
    extras: ThoroughExtras = NO_EXTRAS
    from_file: str = ""


def plan_run(
    asked: Mapping[str, Any],
    *,
    given: frozenset[str],
    launch: Launch | None,
    config: str | None,
    shard: str | None,
) -> Planned:
    """Return the cases of a run.

    `asked` maps the parameter name of every option to its value. `given` has the names of options
    on the command line. Raises UsageError or CannotRunError.
    """
    part, parts = parse_shard(shard)
    matrix = read_configuration(config)
    requests = list(_requests(dict(asked), given, matrix, launch))
    if "explore_s" in given and not any(request.thorough for request in requests):
        raise UsageError("--explore-s requires --thorough; pass --thorough as well")
    check_data_dir(given, {request.data for request in requests})
    extras = thorough.thorough_extras(requests, launched=launch is not None)
    cases = [case for request in requests for case in _cases(request, matrix)]
    # Siblings are shown together, so they are made adjacent.
    first = {case.sibling_key: n for n, case in reversed(list(enumerate(cases)))}
    every = with_unique_ids(sorted(cases, key=lambda case: first[case.sibling_key]))
    assigned = assign_shards(every, parts)
    if part > len(set(assigned.values())):
        most = len(set(assigned.values()))
        raise UsageError(
            f"--shard {shard} has nothing to run; the {len(every)} cases make {most} "
            f"part{'s' * (most > 1)}, because cases of one strategy and world stay together; pass "
            f"--shard I/{most}"
        )
    part_of_strategy = {case.strategy: assigned[case.id] for case in reversed(every)}
    searches = thorough.planned_searches(extras.searches, part_of_strategy)
    whole = RunPlan(
        digest=digest_of_run(every, searches),
        shard=part if parts > 1 else 0,
        shards=parts,
        cases=tuple(every),
        assigned=assigned,
        searches=searches,
    )
    here = tuple(s for s in extras.searches if part_of_strategy[s.strategy] == part)
    return Planned(
        cases=[case for case in every if assigned[case.id] == part],
        every=every,
        whole=whole,
        file=matrix.file,
        extras=msgspec.structs.replace(extras, searches=here),
        from_file=_values_from_file(asked, given, matrix),
    )


def _values_from_file(
    asked: Mapping[str, Any], given: frozenset[str], matrix: Configuration
) -> str:
    """Return the file's values for strategies on the command line: "workloads mlp, batch 255"."""
    typed = asked["strategies"] if "strategies" in given else ()
    said = {
        key: value
        for strategy in typed
        for key, value in {**matrix.keys, **matrix.of(strategy)}.items()
        if BY_KEY[key] not in given
    }
    return ", ".join(
        f"{key} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in said.items()
    )


def check_data_dir(given: frozenset[str], data: Set[str]) -> None:
    if "data_dir" in given and not data & {*FILE_DATASETS}:
        known = " or ".join(f"--data {name}" for name in FILE_DATASETS)
        raise UsageError(f"--data-dir is for a data set in files; pass {known} as well")


def parse_shard(shard: str | None) -> tuple[int, int]:
    """Return (2, 4) for the text "2/4". Raises UsageError."""
    if shard is None:
        return 1, 1
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", shard.strip(), re.ASCII)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise UsageError(
            f"--shard {shard!r} is not a part; expected I/N with I from 1 to N, for example 2/4"
        )
    return part, parts


def assign_shards(cases: list[Case], parts: int) -> dict[str, int]:
    """Return the number of the shard, from 1, of each case by ID.

    Siblings stay together. The costliest group is assigned first, always to the shard with the
    smallest total. The result is independent of the order of `cases` and of measured durations,
    because every shard must compute the same split.
    """
    groups: dict[tuple[str, int, str, int], list[Case]] = {}
    for case in cases:
        groups.setdefault(case.sibling_key, []).append(case)
    costs = {key: sum(sorted(map(estimated_s, group))) for key, group in groups.items()}
    loads = [0.0] * parts
    assigned: dict[str, int] = {}
    for key in sorted(groups, key=lambda key: (-costs[key], key)):
        least = min(range(parts), key=lambda n: (loads[n], n))
        loads[least] += costs[key]
        assigned |= {case.id: least + 1 for case in groups[key]}
    return assigned


def digest_of_run(cases: list[Case], searches: Sequence[PlannedSearch] = ()) -> str:
    """Return a digest of cases in any order, of their files, the versions, and the searches."""
    found = [*sorted(run_identity(cases).items()), *([searches] if searches else [])]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(found))


def _cases(request: Request, matrix: Configuration) -> list[Case]:
    """Return the cases of a request. Its errors name options; the table is added here."""
    try:
        return plan_cases(request)
    except DistcheckError as error:
        if not matrix.file:
            raise
        own = [f'strategy."{name}"' for name in request.strategies if name in matrix.own]
        place = matrix.key(own[0] if own else "")
        raise type(error)(f"{error} (with {matrix.file}{place and f', [{place}]'})") from None


def _requests(
    asked: dict[str, Any], given: frozenset[str], matrix: Configuration, launch: Launch | None
) -> Iterator[Request]:
    strategies = asked["strategies"] if "strategies" in given else matrix.strategies
    if not strategies and matrix.file:
        raise UsageError(
            f"{matrix.file}: {matrix.key('strategies')} is missing, and no --strategy was given; "
            "pass one of the two"
        )
    if not strategies:
        yield Request(strategies=())  # refused, with the known names
    left_out = []
    for strategy in strategies:
        own = matrix.of(strategy)
        worlds = own.get("worlds")
        if launch is not None and worlds is not None and launch.world not in worlds:
            left_out.append(strategy)  # the launcher's world size is not in this strategy's list
            continue
        for fields in _request_fields(asked, given, {**matrix.keys, **own}):
            request = msgspec.convert({**fields, "strategies": (strategy,)}, Request)
            world_given = "worlds" in given or worlds is not None or "worlds" in matrix.keys
            yield thorough.with_thorough_worlds(request, world_given=world_given)
    if left_out and len(left_out) == len(strategies) and launch is not None:
        raise UsageError(
            f"{launch.launcher} started {launch.world} ranks; {matrix.file} has no strategy for "
            f"that world size ({', '.join(left_out)}); start a different number of ranks"
        )


def _request_fields(
    asked: dict[str, Any], given: frozenset[str], keys: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    fields = {name: value for name, value in asked.items() if name != "strategies"}
    said = {BY_KEY[key]: value for key, value in keys.items()}
    fields |= {name: value for name, value in said.items() if name not in given}
    fields = with_adaptation(fields)
    several = {
        name: list(dict.fromkeys(fields.pop(name)))
        if isinstance(fields[name], list)
        else [fields.pop(name)]
        for name in _SEVERAL
    }
    exact = [dtype for dtype in several["dtype"] if dtype in (None, *EXACT_DTYPES)]
    for values in itertools.product(*several.values()):
        request = {**fields, **dict(zip(several, values, strict=True))}
        workloads = request["workloads"]
        if request["dtype"] not in exact and exact and "exact" in workloads:
            # Judged in its own dtypes; alone it is refused, with the reason.
            request["workloads"] = [name for name in workloads if name != "exact"]
            if not request["workloads"]:
                continue
        yield request
