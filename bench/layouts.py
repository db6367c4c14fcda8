"""The whole of `verify` for a 2 x 2 mesh over the bare training steps that it must run.

VGG11 in two pipelines of two stages. The bare steps are those of two worlds of 4 ranks and of one
reference, 3 steps each, without imports, start-up or data; ours are the wall time of the whole
command. The second line gives the peers their imports, too.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

from measure import compare_with_bare, wall_s

STEPS, ROUNDS = 3, 3
SCRIPTS = Path(sysconfig.get_path("scripts"))
PEERS = Path(__file__).parent.resolve() / "peers"
MESH = str(PEERS / "bare_mesh.py")
WORLD = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node", "4", MESH, str(STEPS)]
ALONE = [sys.executable, str(PEERS / "bare_training.py"), str(STEPS)]


def verify_s() -> float:
    """Our whole command."""
    return wall_s(
        [sys.executable, str(SCRIPTS / "distcheck"), "verify", "--strategy", "data_pipeline",
         "--world", "4", "--workload", f"{MESH}:workload", "--dtype", "float32",
         "--steps", str(STEPS)]
    )  # fmt: skip


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    os.chdir(tempfile.mkdtemp())
    peers = (WORLD, WORLD, ALONE)
    compare_with_bare("distcheck verify of a 2 x 2 mesh", verify_s, peers, rounds=ROUNDS, aim=2.0)
