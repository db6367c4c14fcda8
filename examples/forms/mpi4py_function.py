"""Functions that speak MPI themselves, through mpi4py.

$ distcheck verify --strategy examples/forms/mpi4py_function.py:allreduce_model --backend mpi --world 4
PASS

A function of two arrays, as courses have it:

$ distcheck verify --strategy examples/forms/mpi4py_function.py:my_allreduce --as tensor-sum --backend mpi --world 4
PASS

mpi4py's lower-case calls return what they found, and here it is thrown away:

$ distcheck verify --strategy examples/forms/mpi4py_function.py:drops_the_result --backend mpi --world 4
FAIL missing-sync
"""

import numpy as np
import torch
from mpi4py import MPI


def allreduce_model(comm, model):
    size = comm.Get_size()
    for p in model.parameters():
        total = np.empty_like(p.grad.numpy())
        comm.Allreduce(p.grad.numpy(), total, op=MPI.SUM)
        p.grad = torch.from_numpy(np.asarray(total / size))


def my_allreduce(comm, src_array, dest_array, op=MPI.SUM):
    comm.Reduce(src_array, dest_array, op=op, root=0)
    comm.Bcast(dest_array, root=0)


def drops_the_result(comm, model):
    for p in model.parameters():
        comm.allreduce(p.grad.numpy(), op=MPI.SUM)
