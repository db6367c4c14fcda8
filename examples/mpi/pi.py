"""Lesson 1: every rank computes a part of pi, and a reduction adds up the parts.

pi is the area under 4 / (1 + x * x) between 0 and 1. The interval is cut into 100000 strips. Rank r
takes the strips r, r + size, r + 2 * size, ...; `reduce` sums what the ranks found on rank 0.

$ mpirun -n 4 python examples/mpi/pi.py
rank 0 summed 25000 strips
rank 1 summed 25000 strips
rank 2 summed 25000 strips
rank 3 summed 25000 strips
pi is about 3.1415926536

Try: `allreduce` in place of `reduce`, without `root`. Which ranks know pi then?
"""

from mpi4py import MPI

STRIPS = 100_000

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

mine = range(rank, STRIPS, size)
middles = ((strip + 0.5) / STRIPS for strip in mine)
part = sum(4 / (1 + x * x) for x in middles) / STRIPS
print(f"rank {rank} summed {len(mine)} strips")

total = comm.reduce(part, op=MPI.SUM, root=0)  # None on all other ranks
if rank == 0:
    print(f"pi is about {total:.10f}")
