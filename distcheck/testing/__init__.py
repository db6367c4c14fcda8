"""Distributed tests under pytest: a test marked `world(4)` runs its body on four fresh ranks.

The ranks are forked from the pytest process itself at the moment of the call, so that fixtures,
parameters and hypothesis' examples are simply there. With `backend="simulated"` one process is
forked, and the ranks are its threads. `plugin.py` is the door; beside it:

    marker      what `@pytest.mark.world(...)` may say
    fixtures    which fixtures belong to the ranks
    front       in the pytest process: starts a world, waits, decides; tries other schedules
    rank        in a rank: runs the body, tells what happened
    threads     ranks of a simulated world: what each has of its own
    session     in a rank: its copy of pytest's session, kept from the terminal
    examples    hypothesis' examples: rejected, held to a deadline, spoken of on ranks
    messages    what a rank tells
    waiting     until a world is over: what its ranks say meanwhile, or did when Ctrl-C came
    timeouts    pytest-timeout's, which a world keeps by itself
    failures    many ranks' failures as one report
    reused_worlds  worlds that are kept from test to test (`reuse=True`)
    blas        one thread for it in a rank
    leaks       what a test left behind in a rank
    view        the `world` that a test sees
    verifying   `distcheck.verify(...)`; conformance/ is a suite made of it

    pytest_compat, hypothesis_compat   names of theirs that have no public counterpart
"""

from typing import TYPE_CHECKING, Any

__all__ = ["LeakWarning", "WorldFailure", "WorldView"]

if TYPE_CHECKING:
    from distcheck.testing.failures import WorldFailure
    from distcheck.testing.leaks import LeakWarning
    from distcheck.testing.view import WorldView

_HOMES = {"LeakWarning": "leaks", "WorldFailure": "failures", "WorldView": "view"}


def __getattr__(name: str) -> Any:
    """Resolves the public names on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'distcheck.testing' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"distcheck.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, for Tab and `dir()`."""
    return sorted(__all__)
