"""all_reduce on backend mpi over mpi4py's own Allreduce, and over gloo's, in one world of four.

All in turns, in the same ranks, on the same memory; a round's figure is the slowest rank's. "fake"
is torch's own backend that exchanges nothing: what a call through torch.distributed costs whatever
is behind it, which no backend can go below.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from distcheck.worlds.jobs import STORE, Descriptors, Job, Reporter
from distcheck.worlds.launch import Ranks, run_until_over, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous, join

WORLD = 4
ROUNDS = 15
SIZES = {"4 KiB": (4 << 10, 200), "1 MiB": (1 << 20, 20), "37 MiB": (37 << 20, 2)}  # bytes, calls
AIM = 1.15


def rank(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """Seconds per call: by size, by way, one for each round."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg

    from distcheck.addons.mpi.runtime import mpi

    torch.set_num_threads(1)
    join(msgspec.msgpack.decode(payload, type=Rendezvous), fds[STORE])
    gloo, fake = dist.new_group(backend="gloo"), dist.new_group(backend="fake")
    module: Any = mpi()
    raw = module.COMM_WORLD.Dup()
    found = {}
    for size, (count, calls) in SIZES.items():
        reporter.progress(0, size)
        data = torch.zeros(count // 4)
        ways: dict[str, Callable[[], Any]] = {
            "backend mpi": partial(dist.all_reduce, data),
            "mpi4py": partial(raw.Allreduce, module.IN_PLACE, data.numpy()),
            "gloo": partial(dist.all_reduce, data, group=gloo),
            "fake": partial(dist.all_reduce, data, group=fake),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(ROUNDS + 1):
            for way, call in ways.items():
                raw.Barrier()
                begun = time.perf_counter()
                for _ in range(calls):
                    call()
                spent = raw.allreduce(time.perf_counter() - begun, module.MAX)
                if number:  # the first one warms up
                    taken[way].append(spent / calls)
        found[size] = taken
    return msgspec.msgpack.encode(found)


def main() -> None:
    """Prints a ratio with its spread for each size and peer."""
    pool = Pool()
    try:
        ranks = Ranks(
            job=Job("mpi_allreduce:rank", Rendezvous, bytes, (STORE,)),
            backend="mpi",
            size=WORLD,
            request=lambda rendezvous: rendezvous,
            deadline_s=60,
        )
        world = start_world(pool, ranks)
        run_until_over(pool, world)
        if not world.succeeded:
            raise SystemExit(f"the world failed: {[c.raised for c in world.children]}")
        found = msgspec.msgpack.decode(world.results[0])
        world.close()
    finally:
        pool.close()
    for size, taken in found.items():
        pairs = zip(taken["mpi4py"], taken["fake"], strict=True)
        taken["mpi4py and fake together"] = [bare + call for bare, call in pairs]
        for peer in ("mpi4py", "mpi4py and fake together", "gloo"):
            pairs = list(zip(taken["backend mpi"], taken[peer], strict=True))
            ratios = sorted(a / b for a, b in pairs)
            ours, theirs = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
            aim = f"; aim: at most {AIM}" if peer == "mpi4py" else ""
            print(
                f"all_reduce of {size}, backend mpi / {peer}: {statistics.median(ratios):.2f} "
                f"(from {ratios[0]:.2f} to {ratios[-1]:.2f} over {ROUNDS} rounds{aim}); medians "
                f"{ours:.3f} ms over {theirs:.3f} ms"
            )


if __name__ == "__main__":
    main()
