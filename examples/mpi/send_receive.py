"""Lesson 2: a vector travels round the ring of ranks, and every rank adds something to it.

A send names the rank that gets the message, a receive the rank that it comes from. `Recv` waits until
the message is there. So rank 0 sends first and all others receive first: if every rank began
with `Recv`, each would wait for the next one, for ever.

$ mpirun -n 4 python examples/mpi/send_receive.py
rank 0 sent [1. 0.]
rank 1 received [1. 0.] and sent [1. 1.]
rank 2 received [1. 1.] and sent [1. 3.]
rank 3 received [1. 3.] and sent [1. 6.]
rank 0 got it back as [1. 6.]

Try: `send` and `recv`, in lower case, which take any Python object and return it.
"""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
if size < 2:
    sys.exit("a ring has at least 2 ranks: mpirun -n 4 python examples/mpi/send_receive.py")
before, after = (rank - 1) % size, (rank + 1) % size

vector = np.empty(2)  # Recv fills it: dtype and size must be those of the message
if rank == 0:
    vector[:] = [1, 0]
    comm.Send(vector, dest=after)
    print(f"rank 0 sent {vector}")
    comm.Recv(vector, source=before)
    print(f"rank 0 got it back as {vector}")
else:
    comm.Recv(vector, source=before)
    received = vector.copy()
    vector[1] += rank
    comm.Send(vector, dest=after)
    print(f"rank {rank} received {received} and sent {vector}")
