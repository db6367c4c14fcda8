"""The default verification, world 4, over `python -c "import torch"`."""

import os
import sys
import sysconfig
import tempfile
from functools import partial
from pathlib import Path

from measure import compare, wall_s

SCRIPT = [sys.executable, str(Path(sysconfig.get_path("scripts"), "distcheck"))]

if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    verify = [*SCRIPT, "verify", "--strategy", "allreduce", "--world", "4"]
    peer = partial(wall_s, [sys.executable, "-c", "import torch"])
    name = "distcheck verify --strategy allreduce --world 4 / import torch"
    compare(name, partial(wall_s, verify), peer, rounds=9, aim=5)
