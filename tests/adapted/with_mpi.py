"""mpi4py, as courses use it."""

import numpy as np
import torch
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
host = MPI.Get_processor_name()


def allreduce_model(comm, model):
    size = comm.Get_size()
    for p in model.parameters():
        total = np.empty_like(p.grad.numpy())
        comm.Allreduce(p.grad.numpy(), total, op=MPI.SUM)
        p.grad = torch.from_numpy(total / size)


def drops_the_result(comm, model):
    for p in model.parameters():
        comm.allreduce(p.grad.numpy(), op=MPI.SUM)


def my_allreduce(comm, src_array, dest_array, op=MPI.SUM):
    comm.Reduce(src_array, dest_array, op=op, root=0)
    comm.Bcast(dest_array, root=0)


class Communicator:
    def __init__(self, comm: MPI.Comm):
        self.comm = comm

    def my_allreduce(self, src_array, dest_array, op=MPI.SUM):
        self.comm.Allreduce(src_array, dest_array, op=op)


def by_the_rank_of_its_module(model):
    for p in model.parameters():
        total = np.empty_like(p.grad.numpy())
        comm.Allreduce(p.grad.numpy(), total, op=MPI.SUM)
        p.grad = torch.from_numpy(total / size)


def sums_for_its_module(model):
    for p in model.parameters():
        total = np.empty_like(p.grad.numpy())
        comm.Allreduce(p.grad.numpy(), total, op=MPI.SUM)
        p.grad = torch.from_numpy(total)
