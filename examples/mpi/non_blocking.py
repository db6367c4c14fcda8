"""Lesson 3: all ranks exchange with both neighbors at once, and compute while messages travel.

`Isend` and `Irecv` begin an exchange and return a request at once. Until `Waitall` has returned, no
rank may change what it sends or read what it receives. All ranks do the same here, and none waits
for another to begin: no deadlock is possible.

$ mpirun -n 4 python examples/mpi/non_blocking.py
rank 0 has 0, its neighbors 3 and 1: the sum is 4
rank 1 has 10, its neighbors 0 and 2: the sum is 12
rank 2 has 20, its neighbors 1 and 3: the sum is 24
rank 3 has 30, its neighbors 2 and 0: the sum is 32

Try: read `left` before `Waitall`. It is not always wrong, and that makes such a bug hard to find.
"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
before, after = (rank - 1) % size, (rank + 1) % size

mine = np.full(1, rank)
left, right = np.empty_like(mine), np.empty_like(mine)
requests = [
    comm.Irecv(left, source=before, tag=1),  # a tag tells two messages apart, where both
    comm.Irecv(right, source=after, tag=2),  # neighbors are the same rank (2 ranks)
    comm.Isend(mine, dest=after, tag=1),
    comm.Isend(mine, dest=before, tag=2),
]
own = 10 * rank  # work that needs no message
MPI.Request.Waitall(requests)
total = own + left[0] + right[0]
print(f"rank {rank} has {own}, its neighbors {left[0]} and {right[0]}: the sum is {total}")
