"""A pool of spawned processes that is kept, with a process group for every test."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from spawn_per_test import free_port


def body(rank, size, port):
    """One test on one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    dist.barrier()
    dist.destroy_process_group()


def run_tests(size, tests):
    """So many tests in one pool."""
    with mp.get_context("spawn").Pool(size) as pool:
        for _ in range(tests):
            port = free_port()
            pool.starmap(body, [(rank, size, port) for rank in range(size)], chunksize=1)


if __name__ == "__main__":
    run_tests(int(sys.argv[1]), int(sys.argv[2]))
