"""Private names of Hypothesis without a public equivalent. Update this file when a release renames
one.

This module imports Hypothesis only if a test uses it, because it need not be installed.
`tests/plugin/test_hypothesis_compat.py` uses every name in the installed Hypothesis.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SETTINGS = "_hypothesis_internal_use_settings"  # of a test, on the function created by @given


def given_function(function: Callable[..., object]) -> Any:
    """Return the function that holds the Hypothesis settings of a test."""
    decorated: Any = inspect.unwrap(function)
    return getattr(decorated, "__func__", decorated)


def is_observed() -> bool:
    """Return True if Hypothesis reports the results of each example."""
    from hypothesis.internal import observability

    if hasattr(observability, "observability_enabled"):
        return observability.observability_enabled()
    return bool(observability.TESTCASE_CALLBACKS)  # older releases


def current_build_context() -> Any:
    control = sys.modules.get("hypothesis.control")
    if control is None or not control.currently_in_test_context():
        return None
    return control.current_build_context()


@contextmanager
def running_example(example: Any) -> Iterator[None]:
    """Set the current example, or none, for the duration of the block."""
    from hypothesis.control import _current_build_context

    with _current_build_context.with_value(example):
        yield
