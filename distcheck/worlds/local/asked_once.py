"""What torch asks of the machine in every process anew, asked once by the one that forks them.

Measured (world 2, mlp, 3 steps, 91 packages installed; CPU time of a rank's 120 ms):

- 20 ms: torch 2.15 looks through all installed packages for backends when a process group is made,
  even for its own. The answer is kept, and given to torch alone.
- 6 ms: `torch.manual_seed` notes where it was called from for each kind of accelerator, and reads
  the files of the call stack for it. `linecache` does not read again what it holds, unless the file
  has changed.
"""

import contextlib
import functools
import linecache
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

_BACKENDS = "torch.distributed.backends"
_SEEDED = ("random", "cuda", "cuda.random", "mps", "mtia", "xpu", "xpu.random")


def ask() -> None:
    """Asks, in the process that forks; what has been asked before is not asked again."""
    _backends_of_packages()
    for name in (*(f"torch.{part}" for part in _SEEDED), *_own_modules()):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and file not in linecache.cache:
            linecache.getlines(file)


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """While a process group is made: torch gets the answer that is kept."""
    asked: Any = metadata.entry_points

    def answer(**wanted: Any) -> Any:
        return _backends_of_packages() if wanted == {"group": _BACKENDS} else asked(**wanted)

    setattr(metadata, "entry_points", answer)  # noqa: B010
    try:
        yield
    finally:
        setattr(metadata, "entry_points", asked)  # noqa: B010


@functools.cache
def _backends_of_packages() -> Any:
    return metadata.entry_points(group=_BACKENDS)


def _own_modules() -> list[str]:
    return [name for name in sys.modules if name.startswith("distcheck.")]
