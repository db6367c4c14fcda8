"""torch.multiprocessing.spawn for every test."""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def body(rank, size, port):
    """One test on one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    dist.destroy_process_group()


def free_port():
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    size, tests = int(sys.argv[1]), int(sys.argv[2])
    for _ in range(tests):
        mp.spawn(body, args=(size, free_port()), nprocs=size)  # type: ignore[attr-defined]
