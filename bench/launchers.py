"""Verification under torchrun over bare torchrun of the training that it must run: whole programs.

VGG11, 3 steps, world 4: a verification trains twice (the second world is the rerun) and computes
one reference, so its peer is two bare runs under torchrun and one in a single process. The second
line is the same against `distcheck verify` that starts its ranks by itself.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

from measure import compare, wall_s

STEPS, ROUNDS = 3, 3
SCRIPTS = Path(sysconfig.get_path("scripts"))
PEER = str(Path(__file__).parent.resolve() / "peers" / "bare_training.py")
TORCHRUN = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node", "4"]
VERIFY = ["verify", "--strategy", "allreduce", "--workload", "vgg11", "--steps", str(STEPS)]


def under_torchrun_s() -> float:
    """Our command, started by torchrun."""
    return wall_s([*TORCHRUN, "-m", "distcheck", *VERIFY])


def alone_s() -> float:
    """Our command, which starts its own ranks."""
    return wall_s([str(SCRIPTS / "distcheck"), *VERIFY, "--world", "4"])


def bare_s() -> float:
    """Two bare worlds and one process."""
    world = [*TORCHRUN, PEER, str(STEPS)]
    return wall_s(world) + wall_s(world) + wall_s([sys.executable, PEER, str(STEPS)])


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    os.chdir(tempfile.mkdtemp())
    name = "torchrun -m distcheck verify / the same training, bare (torchrun, torchrun, python)"
    compare(name, under_torchrun_s, bare_s, rounds=ROUNDS, aim=1.3)
    name = "torchrun -m distcheck verify / distcheck verify"
    compare(name, under_torchrun_s, alone_s, rounds=ROUNDS, aim=1.3)
