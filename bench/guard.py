"""The overhead of `distcheck.guard` on VGG11 in a world of 4, and of a SHA-1 of the same tensors.

    python bench/guard.py [STEPS [DEVICE]]

Prints, each over a bare training step: a check of the guard and a SHA-1 on the CPU of parameters,
buffers and optimizer state (as Megatron compares replicas), both divided by `every`=100, and the
steps between checks with the guard's hooks in place; and what an audited step takes more. Each
rank makes all of these in turn, in one process, so that all meet the same machine.
"""

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

EVERY = 100
PEERS = str(Path(__file__).parent.resolve() / "peers")


def sha1(model, optimizer) -> str:
    """A digest of all that a rank holds, and whether all ranks have the same."""
    import torch.distributed as dist

    found = hashlib.sha1(usedforsecurity=False)
    for tensor in [*model.parameters(), *model.buffers()]:
        found.update(tensor.detach().cpu().numpy().tobytes())
    for of_one in optimizer.state.values():
        for tensor in of_one.values():
            found.update(tensor.detach().cpu().numpy().tobytes())
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found.hexdigest())
    return str(everywhere)


def measure(rounds: int, device: str) -> None:
    """What one rank does; the first prints the figures."""
    sys.path.insert(0, PEERS)
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from bare_training import BATCH, vgg11

    import distcheck

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = vgg11().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(rank)
    images = torch.randn(BATCH // world, 3, 32, 32).to(device)
    labels = torch.randint(0, 10, (BATCH // world,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()

    def timed(do) -> float:
        dist.barrier()
        begun = time.perf_counter()
        do()
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - begun

    step()
    bare, guarded, checks, sums, audits = [], [], [], [], []
    for _ in range(rounds):
        bare.append(timed(step))
        with distcheck.guard(optimizer, model=model, every=10**9, save=None) as made:
            made.steps = 10  # far from the first check
            made._watched.armed = False
            guarded.append(timed(step))
            checks.append(timed(made.check))
        sums.append(timed(lambda: sha1(model, optimizer)))
        with distcheck.guard(optimizer, model=model, every=10**9, save=None, audit=True) as other:
            other.steps = 10
            other._watched.armed = False
            other._audit.arm(11)
            audits.append(timed(step) + timed(other._act_on_audit) - bare[-1])
    if rank == 0:
        each = statistics.median(bare)
        print(f"a bare step {each * 1e3:.0f} ms ({min(bare) * 1e3:.0f} to {max(bare) * 1e3:.0f}); "
              f"{made.compared} tensors compared")  # fmt: skip
        hooks = statistics.median(g / b for g, b in zip(guarded, bare, strict=True))
        print(f"a step with hooks over a bare one: {hooks:.3f}")
        timings = {"guard": checks, "SHA-1 on the CPU": sums, "an audit, beside its step": audits}
        for name, spent in timings.items():
            one = statistics.median(spent)
            print(f"{name}: a check {one * 1e3:.1f} ms ({min(spent) * 1e3:.1f} to "
                  f"{max(spent) * 1e3:.1f}), at every={EVERY} {one / EVERY / each:.3%} of the bare "
                  "steps")  # fmt: skip
        print("aim: at most 1 %")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(int(sys.argv[1]), sys.argv[2])
    else:
        os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        rounds, device = [*sys.argv[1:], *("9", "cpu")[len(sys.argv) - 1 :]]
        words = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"]
        words += ["--nproc-per-node", "4", str(Path(__file__).resolve()), rounds, device]
        sys.exit(subprocess.run(words, cwd=tempfile.mkdtemp(), check=False).returncode)
