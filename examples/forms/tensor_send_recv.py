"""A collective written with sends and receives: f(send, recv) leaves the ranks' sum in recv.

$ distcheck verify --strategy examples/forms/tensor_send_recv.py:ring_all_reduce --as tensor-sum --world 4
PASS

Whole buffers travel once around, and each rank adds them up as they come. The sum is right, but
from three ranks on each adds in an order of its own, so replicas end with different bits:

$ distcheck verify --strategy examples/forms/tensor_send_recv.py:ring_of_whole_buffers --as tensor-sum --world 4
FAIL replicas-not-bit-identical

At two ranks that cannot be seen:

$ distcheck verify --strategy examples/forms/tensor_send_recv.py:ring_of_whole_buffers --as tensor-sum --world 2
PASS

Buffers are never handed on, so each rank counts its left neighbor three times. The evidence has the
weights (0.25 and 0.75 in the place of four times 0.25):

$ distcheck verify --strategy examples/forms/tensor_send_recv.py:ring_without_handing_on --as tensor-sum --world 4 --workload cnn
FAIL duplicated-rank

Every rank waits for its neighbor before it sends to the other one:

$ distcheck verify --strategy examples/forms/tensor_send_recv.py:all_wait_first --as tensor-sum --world 4 --deadline 3
FAIL hang
"""

import torch
import torch.distributed as dist


def ring_all_reduce(send, recv):
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    flat = send.flatten().clone()
    chunks = list(flat.tensor_split(size))
    for step in range(size - 1):
        out, into = (rank - step) % size, (rank - step - 1) % size
        incoming = torch.empty_like(chunks[into])
        request = dist.isend(chunks[out], right)
        dist.recv(incoming, left)
        request.wait()
        chunks[into] += incoming
    for step in range(size - 1):
        out, into = (rank - step + 1) % size, (rank - step) % size
        request = dist.isend(chunks[out], right)
        dist.recv(chunks[into], left)
        request.wait()
    recv.copy_(flat.view_as(recv))


def ring_of_whole_buffers(send, recv):
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1 + size) % size
    total, traveling, arriving = send.clone(), send.clone(), send.clone()
    for _ in range(size - 1):
        request = dist.isend(traveling, right)
        dist.recv(arriving, left)
        request.wait()
        total += arriving
        traveling, arriving = arriving, traveling
    recv[...] = total


def ring_without_handing_on(send, recv):
    rank, size = dist.get_rank(), dist.get_world_size()
    total, arriving = send.clone(), send.clone()
    for _ in range(size - 1):
        request = dist.isend(send, (rank + 1) % size)
        dist.recv(arriving, (rank - 1) % size)
        request.wait()
        total += arriving
    recv[...] = total


def all_wait_first(send, recv):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.recv(recv, (rank - 1) % size)
    dist.send(send, (rank + 1) % size)
    recv += send
