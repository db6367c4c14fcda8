"""Correctness and determinism tests for gradient synchronization in PyTorch.

    import distcheck

    def test_my_sync():
        distcheck.verify("my_pkg.sync:allreduce", world=4).raise_for_verdict()

Importing this package imports no torch; the work is done in separate processes.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Report", "Step", "VerdictError", "__version__", "guard", "scores", "strategy", "verify"]

if TYPE_CHECKING:
    from distcheck.compare.scoring import scores
    from distcheck.contract import Step, strategy
    from distcheck.errors import VerdictError
    from distcheck.job.guard import guard
    from distcheck.records import Report
    from distcheck.testing.verifying import verify

_HOMES = {
    "Report": "distcheck.records",
    "Step": "distcheck.contract",
    "VerdictError": "distcheck.errors",
    "guard": "distcheck.job.guard",
    "scores": "distcheck.compare.scoring",
    "strategy": "distcheck.contract",
    "verify": "distcheck.testing.verifying",
}


def __getattr__(name: str) -> Any:
    """Resolve the public names on first use (PEP 562), so that importing stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'distcheck' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for tab completion and `dir()`."""
    return sorted(__all__)
