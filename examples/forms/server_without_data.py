"""A parameter server on a rank of its own, which has no data: rank 0 gathers, the others compute.

Say which rank has no shard of the batch; it is then dealt out to the others, and what they must hold
is the mean over those. Such code hardly ever weights ranks, so give a batch that the others divide.

$ distcheck verify --strategy examples/forms/server_without_data.py:averaged_by_server --without-data 0 --batch 255 --world 4
PASS

It divides by all ranks, and the server counts among them:

$ distcheck verify --strategy examples/forms/server_without_data.py:divided_by_all --without-data 0 --batch 255 --world 4
FAIL wrong-divisor

A range that ends a rank too early:

$ distcheck verify --strategy examples/forms/server_without_data.py:last_rank_forgotten --without-data 0 --batch 255 --world 4
FAIL dropped-rank

The server takes the optimizer's step, and sends parameters in place of gradients:

$ distcheck verify --strategy examples/forms/server_without_data.py:stepped_by_server --as steps-inside --without-data 0 --batch 255 --world 4
PASS

$ distcheck verify --strategy examples/forms/server_without_data.py:stepped_by_server --without-data 0 --batch 255 --world 4
refused: pass --as steps-inside

The last rank may be the server as well; this one keeps nothing of what it hands on:

$ distcheck verify --strategy examples/forms/server_without_data.py:handed_on --without-data 2 --world 3
PASS

DDP has every rank run backward, and has no place for one that does not:

$ distcheck verify --strategy torch.nn.parallel:DistributedDataParallel --without-data 0 --world 3
refused: --without-data is for code that is called after backward
"""

import torch
import torch.distributed as dist


def averaged_by_server(model, rank, world_size):
    serve_gradients(model, rank, range(1, world_size), world_size - 1)


def divided_by_all(model, rank, world_size):
    serve_gradients(model, rank, range(1, world_size), world_size)


def last_rank_forgotten(model, rank, world_size):
    serve_gradients(model, rank, range(1, world_size - 1), world_size - 2)


def serve_gradients(model, rank, counted, divisor):
    for p in model.parameters():
        if rank == 0:
            p.grad = torch.zeros_like(p)
            received = torch.empty_like(p)
            for source in range(1, dist.get_world_size()):
                dist.recv(received, src=source)
                if source in counted:
                    p.grad += received
            p.grad /= divisor
            for target in range(1, dist.get_world_size()):
                dist.send(p.grad, dst=target)
        else:
            dist.send(p.grad, dst=0)
            dist.recv(p.grad, src=0)


def stepped_by_server(model, optimizer, rank, world_size):
    if rank == 0:
        for p in model.parameters():
            gathered = [torch.empty_like(p) for _ in range(1, world_size)]
            for i, received in enumerate(gathered):
                dist.recv(received, src=i + 1)
            p.grad = torch.stack(gathered).mean(dim=0)
        optimizer.step()
    else:
        for p in model.parameters():
            dist.send(p.grad, dst=0)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def handed_on(model, rank, world_size):
    server = world_size - 1
    for p in model.parameters():
        if rank == server:
            total = torch.zeros_like(p)
            received = torch.empty_like(p)
            for source in range(server):
                dist.recv(received, src=source)
                total += received
            for target in range(server):
                dist.send(total / server, dst=target)
        else:
            dist.send(p.grad, dst=server)
            dist.recv(p.grad, src=server)
