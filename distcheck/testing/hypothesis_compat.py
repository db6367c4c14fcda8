"""Names of Hypothesis that have no public counterpart: one place to mend when a release moves one.

Hypothesis is imported where a test uses it, and not before: it need not be installed.
`tests/plugin/test_hypothesis_compat.py` uses every name in the Hypothesis that is installed.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SETTINGS = "_hypothesis_internal_use_settings"  # of a test, on the function that @given has made


def given_function(function: Callable[..., object]) -> Any:
    """Of a test, the function that holds its settings."""
    decorated: Any = inspect.unwrap(function)
    return getattr(decorated, "__func__", decorated)


def is_observed() -> bool:
    """Whether Hypothesis reports what each example did."""
    from hypothesis.internal import observability

    if hasattr(observability, "observability_enabled"):
        return observability.observability_enabled()
    return bool(observability.TESTCASE_CALLBACKS)  # of older releases


def context() -> Any:
    """The example that runs now; None where none does."""
    control = sys.modules.get("hypothesis.control")
    if control is None or not control.currently_in_test_context():
        return None
    return control.current_build_context()


@contextmanager
def within(example: Any) -> Iterator[None]:
    """Makes an example the one that runs now, or none the one."""
    from hypothesis.control import _current_build_context

    with _current_build_context.with_value(example):
        yield
