"""A parameter server: rank 0 adds up what the others send, and answers with the average.

$ distcheck verify --strategy examples/forms/parameter_server.py:serve --world 4
PASS

Many servers have no data of their own. distcheck gives every rank a shard, so such a server is found
to leave its own out, and the report says how to say that this is meant:

$ distcheck verify --strategy examples/forms/parameter_server.py:serve_without_data --world 4
FAIL dropped-rank

$ distcheck verify --strategy examples/forms/parameter_server.py:serve_without_data --without-data 0 --batch 255 --world 4
PASS

More of that kind is in server_without_data.py.
"""

import torch
import torch.distributed as dist


def serve(model, rank, world_size):
    for p in model.parameters():
        if rank == 0:
            received = torch.empty_like(p.grad)
            for source in range(1, world_size):
                dist.recv(received, src=source)
                p.grad += received
            p.grad /= world_size
            for target in range(1, world_size):
                dist.send(p.grad, dst=target)
        else:
            dist.send(p.grad, dst=0)
            dist.recv(p.grad, src=0)


def serve_without_data(model, rank, world_size):
    for p in model.parameters():
        if rank == 0:
            p.grad.zero_()
            received = torch.empty_like(p.grad)
            for source in range(1, world_size):
                dist.recv(received, src=source)
                p.grad += received
            p.grad /= world_size - 1
            for target in range(1, world_size):
                dist.send(p.grad, dst=target)
        else:
            dist.send(p.grad, dst=0)
            dist.recv(p.grad, src=0)
