"""What is dear and the same for many tests is made once, although several processes run tests."""

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest
from filelock import FileLock

T = TypeVar("T")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], T]) -> T:
    """What `make` returns, from the first process of this test run that asks for `name`; the others
    wait for it. It must be possible to pickle it. Where `make` raises, the next one tries again.
    """
    base = factory.getbasetemp()
    # Under xdist each process has its own folder within that of the run.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = shared / f"once-{name}.pickle"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            whole = pickle.dumps(make())
            kept.write_bytes(whole)
            return pickle.loads(whole)  # type: ignore[no-any-return]
        return pickle.loads(kept.read_bytes())  # type: ignore[no-any-return]
