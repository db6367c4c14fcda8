"""Searches for the smallest case in which a strategy fails.

    space             the space of cases, as Hypothesis strategies
    search            draws cases, runs them, and shrinks those that fail
    running           runs cases in processes that serve many cases
    worker            the jobs of these processes: ranks, and a judge
    messages          the requests that they receive
    failure_database  stores failing cases, and prints them as Python code
    thorough_search   the search of `--thorough`

For users' own property tests, `cases`, `models`, `layers` and `delays` are Hypothesis strategies,
and `verify_case` runs one case. They are imported on first use.
"""

import sys
from typing import TYPE_CHECKING, Any

from distcheck.records import Case, Report

if TYPE_CHECKING:
    from distcheck.addons.explore.space import cases, delays, layers, models

__all__ = ["cases", "delays", "layers", "models", "verify_case"]


def verify_case(case: Case) -> Report:
    """Run one case in new ranks, as `distcheck replay` does, and return its report.

    Some strategies do not support every case: for example several backward passes per step, if the
    strategy runs backward itself. Within a Hypothesis test, this function rejects a case that is
    not supported, like `hypothesis.assume`. Elsewhere it raises LeftOutError.
    """
    from distcheck.errors import LeftOutError
    from distcheck.verification.run import verify_cases

    try:
        return verify_cases([case])
    except LeftOutError:
        if "hypothesis" in sys.modules:
            from hypothesis import currently_in_test_context, reject

            if currently_in_test_context():
                reject()
        raise


def search_thoroughly(*positional: Any, **named: Any) -> None:
    """Run the searches of `--thorough`; see `thorough_search.search_thoroughly`."""
    from distcheck.addons.explore import thorough_search

    thorough_search.search_thoroughly(*positional, **named)


def __getattr__(name: str) -> Any:
    """Resolve names that require Hypothesis on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'distcheck.addons.explore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("distcheck.addons.explore.space"), name)
