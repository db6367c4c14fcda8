"""Lesson 4: rank 0 scatters a vector in pieces, every rank works on its piece, rank 0 gathers them.

10 numbers do not divide evenly by 4 ranks. `Scatterv` and `Gatherv` take the length of every piece, so
that none is lost; `Scatter` and `Gather` are for equal pieces. Data-parallel training does the same
with a batch, and with one step more: the mean of the gradients goes back to every rank.

$ mpirun -n 4 python examples/mpi/gather_scatter.py
rank 0 has [0 1 2]
rank 1 has [3 4 5]
rank 2 has [6 7]
rank 3 has [8 9]
rank 0 gathered [ 0  1  4  9 16 25 36 49 64 81]
every rank knows the mean of the squares, 28.5

Try: the mean of the pieces' own means. Why is it not 28.5?
"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

vector = np.arange(10) if rank == 0 else None  # the other ranks have nothing to scatter
lengths = [len(piece) for piece in np.array_split(np.arange(10), size)]

mine = np.empty(lengths[rank], dtype=int)
comm.Scatterv([vector, lengths], mine, root=0)
print(f"rank {rank} has {mine}")

squares = mine * mine
gathered = np.empty(10, dtype=int) if rank == 0 else None
comm.Gatherv(squares, [gathered, lengths], root=0)
if rank == 0:
    print(f"rank 0 gathered {gathered}")

total = comm.allreduce(squares.sum(), op=MPI.SUM)  # weighted by length: a sum, divided once
mean = total / 10
if comm.allreduce(mean == 28.5, op=MPI.LAND) and rank == 0:
    print(f"every rank knows the mean of the squares, {mean}")
