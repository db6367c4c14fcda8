"""What is freed stays with the process, where that was asked for."""

import ctypes
import os
import subprocess
import sys

import pytest

from distcheck.machine.resources import KEEPS_FREED_MEMORY

BYTES = 64 << 20
PROGRAM = f"""
import sys, psutil
from distcheck.machine.resources import keep_freed_memory
if sys.argv[1:]:
    keep_freed_memory()
used = bytearray({BYTES})
for place in range(0, {BYTES}, 4096):
    used[place] = 1
del used
print(psutil.Process().memory_info().rss)
"""


def left(*words: str, **variables: str) -> int:
    command = [sys.executable, "-c", PROGRAM, *words]
    plain = {name: v for name, v in os.environ.items() if not name.startswith("MALLOC_")}
    return int(subprocess.run(
        command, env={**plain, **variables}, check=True, capture_output=True, timeout=120
    ).stdout)  # fmt: skip


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept_where_that_was_asked_for() -> None:
    usual = left()
    assert left("keep") > usual + BYTES // 2
    assert left(**KEEPS_FREED_MEMORY) > usual + BYTES // 2
