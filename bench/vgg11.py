"""The whole of `verify --workload vgg11` over the bare training steps that it must run.

Those are two worlds of 4 ranks and one reference, 3 steps each. Their seconds are the steps'
alone, without imports, start-up or data; ours are the wall time of the whole command. The second
line gives the peers their imports, too.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

from measure import compare_with_bare, wall_s

STEPS, ROUNDS = 3, 3
SCRIPTS = Path(sysconfig.get_path("scripts"))
PEER = str(Path(__file__).parent.resolve() / "peers" / "bare_training.py")
WORLD = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node", "4", PEER, str(STEPS)]
ALONE = [sys.executable, PEER, str(STEPS)]


def verify_s() -> float:
    """Our whole command."""
    return wall_s(
        [sys.executable, str(SCRIPTS / "distcheck"), "verify", "--strategy", "allreduce",
         "--world", "4", "--workload", "vgg11"]
    )  # fmt: skip


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    os.chdir(tempfile.mkdtemp())
    peers = (WORLD, WORLD, ALONE)
    compare_with_bare("distcheck verify --workload vgg11", verify_s, peers, rounds=ROUNDS, aim=1.3)
