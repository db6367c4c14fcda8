"""An MPI program for every test, as mpiexec starts it."""

import subprocess
import sys

PROGRAM = (
    "import torch; from mpi4py import MPI; import numpy as np; "
    "t = torch.ones(1); MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, t.numpy()); "
    "assert t.item() == MPI.COMM_WORLD.size"
)

if __name__ == "__main__":
    size, tests = int(sys.argv[1]), int(sys.argv[2])
    for _ in range(tests):
        subprocess.run(
            ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", str(size),
             sys.executable, "-c", PROGRAM],
            check=True,
        )  # fmt: skip
