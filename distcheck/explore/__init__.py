"""Searching for the smallest case in which a strategy fails.

    space             the space of cases, as hypothesis strategies
    search            draws cases, runs them, shrinks failing ones
    running           runs cases on ranks and a judge that are reused across cases
    worker            the side of these ranks and of the judge
    messages          the requests that they receive
    failure_database  saved failing cases, and how they are shown
    thorough_search   the search of `--thorough`

For property tests of one's own: `cases`, `models`, `layers` and `delays` are hypothesis strategies,
and `verify_case` runs one case. They are imported when they are asked for.
"""

import sys
from typing import TYPE_CHECKING, Any

from distcheck.records import Case, Report

if TYPE_CHECKING:
    from distcheck.explore.space import cases, delays, layers, models

__all__ = ["cases", "delays", "layers", "models", "verify_case"]


def verify_case(case: Case) -> Report:
    """Runs and judges one case in fresh ranks, as `distcheck replay` does.

    Within a test of hypothesis's, a case that the strategy cannot do (several backward passes in a
    step, where it runs backward itself or declines them) is rejected, as by `hypothesis.assume`;
    elsewhere LeftOutError is raised.
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


def __getattr__(name: str) -> Any:
    """Resolves what needs hypothesis on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'distcheck.explore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("distcheck.explore.space"), name)
