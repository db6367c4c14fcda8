"""Distributed tests under pytest: a test marked `world(4)` runs its body on four fresh ranks.

The ranks are forked from the pytest process when the test is called, so that they inherit fixtures,
parameters and Hypothesis examples. With `backend="simulated"` one process is forked, and the ranks
are its threads. `plugin.py` is the entry point; the other modules:

    marker      arguments of `@pytest.mark.world(...)`
    fixtures    the fixtures that each rank sets up
    front       in the pytest process: starts a world, waits, decides; tries other schedules
    rank        in a rank: runs the body, reports the result; the `world` fixture's value
    session     in a rank: its copy of pytest's session, detached from the terminal
    examples    Hypothesis examples: rejection, deadline, events and targets of ranks
    messages    reports of a rank
    waiting     waits for a world: its ranks' messages, and their stacks after Ctrl-C
    timeouts    limits of pytest-timeout, which a world enforces instead
    failures    merges failures of several ranks into one report
    reused_worlds  persistent worlds that run several tests (`reuse=True`)
    blas        limits BLAS to one thread in a rank
    leaks       resources that a test left open in a rank
    verifying   `distcheck.verify(...)`; conformance/ is a test suite that uses it

    pytest_compat, hypothesis_compat   private names without a public equivalent
"""

from typing import TYPE_CHECKING, Any

__all__ = ["LeakWarning", "WorldFailure", "WorldView"]

if TYPE_CHECKING:
    from distcheck.testing.failures import WorldFailure
    from distcheck.testing.leaks import LeakWarning
    from distcheck.testing.rank import WorldView

_HOMES = {"LeakWarning": "leaks", "WorldFailure": "failures", "WorldView": "rank"}


def __getattr__(name: str) -> Any:
    """Resolve the public names on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'distcheck.testing' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"distcheck.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, for completion and `dir()`."""
    return sorted(__all__)
