"""`distcheck --help` over `python -c pass`."""

import sys
import sysconfig
from functools import partial
from pathlib import Path

from measure import compare, wall_s

SCRIPT = [sys.executable, str(Path(sysconfig.get_path("scripts"), "distcheck"))]

if __name__ == "__main__":
    peer = partial(wall_s, [sys.executable, "-c", "pass"])
    for words in (["--help"], ["list"]):
        name = f"distcheck {' '.join(words)} / python -c pass"
        compare(name, partial(wall_s, [*SCRIPT, *words]), peer, rounds=25, aim=10)
