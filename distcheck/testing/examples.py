"""Hypothesis examples in worlds: the pytest process generates and shrinks them, ranks run the body.
Ranks send events and targets back; a test that draws values in a rank is rejected.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import msgspec
import pytest

from distcheck.testing import hypothesis_compat

_DRAWS = (
    "draws while the test runs, so ranks would draw different values; draw all values with "
    "@given or st.composite, outside the world"
)
_TRUE = "st.randoms() without use_true_random=True"
# Arguments that no test in a world accepts, by Hypothesis' class name.
_REFUSED = {
    "DataObject": f"st.data() {_DRAWS}",
    "ArtificialRandom": f"{_TRUE} {_DRAWS}",
    "RandomSeeder": "st.random_module() seeds only the pytest process, but ranks start from the "
    "marker's seed; draw a seed with st.integers(), and set it in the test",
}

_NEVER = timedelta(days=1)


class PassedToHypothesis(msgspec.Struct, frozen=True):
    """Events and targets that a rank passed to Hypothesis, by event text or target label."""

    events: dict[str, str] = {}
    targets: dict[str, float] = {}


# -- in the pytest process


@contextmanager
def without_hypothesis_deadline(function: Callable[..., object]) -> Iterator[timedelta | None]:
    """Disable the deadline of Hypothesis for a test, because it would include the start of every
    world and imports of the first. Yield it for `enforce_deadline`; None: Hypothesis' default.
    """
    import hypothesis

    decorated = hypothesis_compat.given_function(function)
    given: hypothesis.settings = getattr(decorated, hypothesis_compat.SETTINGS)
    # If Hypothesis observes tests, it requires a deadline.
    none = _NEVER if hypothesis_compat.is_observed() else None
    setattr(decorated, hypothesis_compat.SETTINGS, hypothesis.settings(given, deadline=none))
    default = hypothesis.settings.get_profile("default").deadline
    try:
        yield given.deadline if given.deadline != default else None
    finally:
        setattr(decorated, hypothesis_compat.SETTINGS, given)


def enforce_deadline(deadline: timedelta | None, body_s: Iterable[float]) -> None:
    """Raise Hypothesis' DeadlineExceeded if the body of the slowest rank exceeded the deadline, or
    during a search 5/4 of it, as Hypothesis does.
    """
    __tracebackhide__ = True
    from hypothesis.control import current_build_context
    from hypothesis.errors import DeadlineExceeded

    slowest = timedelta(seconds=max(body_s, default=0.0))
    if deadline is not None:
        limit = deadline if current_build_context().is_final else deadline * 5 / 4
        if slowest >= limit:
            raise DeadlineExceeded(slowest, deadline)


def check_example_arguments(values: Iterable[object]) -> None:
    """Raise an error for arguments that do not work on ranks. If such an argument is nested in a
    value, only the rank that draws from it raises the error.
    """
    for value in values:
        kind = type(value)
        why = _REFUSED.get(kind.__name__)
        if why is not None and kind.__module__.startswith("hypothesis."):
            pytest.fail(why, pytrace=False)


def reject_example(reason: str) -> NoReturn:
    """Make Hypothesis try the next example, as after an `assume()` that failed on every rank."""
    from hypothesis.errors import UnsatisfiedAssumption

    raise UnsatisfiedAssumption(reason)


def example_arguments_text(arguments: Mapping[str, object]) -> str:
    """Return an example's arguments in Hypothesis' format."""
    from hypothesis.vendor.pretty import pretty

    return ", ".join(f"{name}={pretty(value)}" for name, value in arguments.items())


def is_final() -> bool:
    """Return True if Hypothesis is running the example that it will show."""
    context = hypothesis_compat.current_build_context()
    return context is not None and context.is_final


def pass_on_to_hypothesis(told: Iterable[PassedToHypothesis]) -> None:
    """Pass ranks' events and targets to Hypothesis: for `target()`, the maximum over all ranks."""
    events: dict[str, str] = {}
    targets: dict[str, float] = {}
    for said in told:
        events |= said.events
        for label, value in said.targets.items():
            targets[label] = max(value, targets.get(label, value))
    if events or targets:
        import hypothesis

        for text, payload in events.items():
            hypothesis.event(text, payload)
        for label, value in targets.items():
            hypothesis.target(value, label=label)


def leave_out_explanation(found: BaseException) -> None:
    """Remove Hypothesis' explanation from the notes of a failure or a group: it describes lines
    that ran in this process, and these are distcheck's.
    """
    notes: list[str] = getattr(found, "__notes__", [])
    kept: list[str] = []
    explains = False
    for note in notes:
        explains = note.startswith("Explanation") or (explains and note.startswith("    "))
        if not explains:
            kept.append(note)
    if kept != notes:
        found.__notes__ = kept
    if isinstance(found, BaseExceptionGroup):
        for failure in found.exceptions:
            leave_out_explanation(failure)


# -- in a rank


def is_rejection(error: BaseException | None) -> bool:
    """Return True if `assume()` or `reject()` ended a test within a Hypothesis example."""
    errors = sys.modules.get("hypothesis.errors")
    return (
        errors is not None
        and isinstance(error, errors.UnsatisfiedAssumption)
        and hypothesis_compat.current_build_context() is not None
    )


def values_to_pass_on() -> PassedToHypothesis:
    context = hypothesis_compat.current_build_context()
    if context is None:
        return PassedToHypothesis()
    return PassedToHypothesis(
        events={str(text): str(payload) for text, payload in context.data.events.items()},
        targets={k: float(value) for k, value in context.data.target_observations.items()},
    )


@contextmanager
def in_inherited_example() -> Iterator[None]:
    """Run a test in a fresh rank within the example, if any, in which it was forked."""
    context = hypothesis_compat.current_build_context()
    if context is not None:
        for name in dir(context.data):
            if name.startswith("draw") and callable(getattr(context.data, name)):
                setattr(context.data, name, _refuse_draw)
    with _within(context):
        yield


@contextmanager
def in_new_example(*, given: bool, final: bool) -> Iterator[None]:
    """Run a test in a persistent rank within a new example, if the test uses `@given`. The example
    in which the world was started must not be used again.
    """
    context = _make_example() if given else None
    if context is not None:
        context.is_final = final
    with _within(context):
        yield


@contextmanager
def _within(context: Any) -> Iterator[None]:
    if "hypothesis" not in sys.modules:
        yield
        return
    from hypothesis.reporting import default, with_reporter

    if context is not None:
        context.data.events, context.data.target_observations = {}, {}
    # The collector of note() texts is a copy here, so they are printed, as this rank's output.
    with hypothesis_compat.running_example(context), with_reporter(default):
        yield


@functools.cache
def _make_example() -> Any:
    """Return an example of no test, obtained from Hypothesis and not from its internals."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from hypothesis.control import current_build_context

    made = []

    def take(_: None) -> None:
        made.append(current_build_context())

    quick = settings(
        max_examples=1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with _within(None):  # Hypothesis refuses to nest examples
        quick(given(st.none())(take))()
    return made[0]


def _refuse_draw(*_: Any, **__: Any) -> NoReturn:
    __tracebackhide__ = True
    pytest.fail(f"a strategy of this test (st.data(), st.functions() or {_TRUE}) {_DRAWS}")
