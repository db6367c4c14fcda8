"""What is searched where a matrix is configured: its strategies, called as it says."""

from typing import Any

from distcheck.errors import UsageError
from distcheck.plan.configuration import BY_KEY, read_configuration
from distcheck.plan.settings import CALLS

# What a search takes over from a matrix; it draws worlds, workloads and the rest itself.
_TAKEN = (*CALLS, "loss", "accept")


def explorations(asked: dict[str, Any], given: frozenset[str]) -> list[dict[str, Any]]:
    """The options of each search: one for `--strategy`, else one for each strategy of the matrix.
    An option that was typed is used in place of the matrix's key. Raises UsageError.
    """
    matrix = read_configuration(asked.pop("config"))
    strategies = (asked["strategy"],) if asked["strategy"] else matrix.strategies
    if not strategies and matrix.file:
        raise UsageError(
            f"{matrix.file}: {matrix.key('strategies')} is missing, and no --strategy is given; "
            "give one of the two"
        )
    if len(strategies) > 1 and asked["json_file"] is not None:
        raise UsageError(
            f"--json takes the findings of one strategy; {matrix.file} has {len(strategies)}: "
            f"{', '.join(strategies)}; choose one with --strategy"
        )
    searches = []
    for strategy in strategies or (None,):
        said = {**matrix.keys, **(matrix.of(strategy) if strategy else {})}
        keys = {BY_KEY[key]: value for key, value in said.items() if BY_KEY[key] in _TAKEN}
        keys = {name: value for name, value in keys.items() if name not in given}
        searches.append({**asked, **keys, "strategy": strategy})
    return searches
