"""Compares the command line that a report records with the plan of the report.

Only what was typed is compared: what a matrix or a default said is not in the command line. What
follows from it is the least that a plan has; cells and searches come on top.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from distcheck.records import RunPlan

_SEVERAL = {"--strategy": "strategy", "--world": "world", "--workload": "workload"}
_LAST = {"--dtype": "dtype", "--backend": "backend", "--device": "device", "--seed": "seed"}
_MASKED = "<$"  # how a value that looks like a secret begins
_MAY_BE_LEFT_OUT = "lattice"  # by a dtype or an accepted deviation that it does not have


def not_in_plan(command: str, plan: RunPlan) -> Iterator[str]:
    """What `command` asks for and `plan` does not have."""
    typed = _typed(command)
    named = {name: typed[option] for option, name in _SEVERAL.items() if option in typed}
    named |= {name: typed[option][-1:] for option, name in _LAST.items() if option in typed}
    cells = [{name: str(getattr(cell, name)) for name in named} for cell in plan.cases]
    for values in product(*map(dict.fromkeys, named.values())):
        wanted = dict(zip(named, values, strict=True))
        if wanted not in cells and wanted.get("workload") != _MAY_BE_LEFT_OUT:
            words = ", ".join(f"{name} {value}" for name, value in wanted.items())
            yield f"its command line asks for {words}, but the plan has no such case"


def has_plan(command: str) -> bool:
    """Whether the report of `command` always has a plan."""
    return command.split()[:2] in (["distcheck", "verify"], ["distcheck", "record"])


def _typed(command: str) -> dict[str, list[str]]:
    """The values of the options above, as far as they can be read with certainty."""
    try:
        words = shlex.split(command)
    except ValueError:
        return {}
    if words[:2] != ["distcheck", "verify"]:
        return {}
    found: dict[str, list[str]] = defaultdict(list)
    for option, value in _pairs(words[2:]):
        found[option].append(value)
    return {
        option: values
        for option, values in found.items()
        if not any(_MASKED in value for value in values)
    }


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for at, word in enumerate(words):
        option, _, value = word.partition("=")
        if option not in _SEVERAL and option not in _LAST:
            continue
        if option != word:
            yield option, _spelled(value)
        elif at + 1 < len(words):
            yield option, _spelled(words[at + 1])


def _spelled(value: str) -> str:
    """A number as a plan has it: 4 for 04."""
    try:
        return str(int(value))
    except ValueError:
        return value
