"""What it costs a right step that ranks note their calls, so that a hang can be proven at once.

    python bench/hangs.py [ROUNDS]

Prints a step with the notes over a bare one, in a world of 4 over gloo: of a small MLP that reduces
every parameter by itself (24 collectives a step and little else) and under DDP, and of VGG11. Each
rank makes bare and noting steps in turn, in one process, so that all meet the same machine; the
thread that looks at the rank ten times a second runs beside the noting steps only.
"""

import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from pathlib import Path

PEERS = str(Path(__file__).parent.resolve() / "peers")
STEPS = 10  # of the small models, in one timing


class Nowhere:
    """A line to a front that is not there."""

    def send(self, event, **_) -> None:
        pass


class Notes:
    """Switches the notes of this process on and off."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from distcheck.worlds import postings

        kinds = (dist.ProcessGroup, dist.distributed_c10d.Work)
        before = [dict(vars(kind)) for kind in kinds]
        postings.install()
        self._changes = [
            (kind, name, old[name], now)
            for kind, old in zip(kinds, before, strict=True)
            for name, now in dict(vars(kind)).items()
            if old.get(name) is not now
        ]
        assert len(self._changes) > 10, self._changes

    def switch(self, *, on: bool) -> None:
        for kind, name, old, new in self._changes:
            setattr(kind, name, new if on else old)


class Looking:
    """The thread beside the main one."""

    def __enter__(self):
        from distcheck.worlds.waiting import LOOK_EVERY_S, OWN_THREADS, Look

        look, self._end = Look(Nowhere()), threading.Event()

        def run() -> None:
            while not self._end.wait(LOOK_EVERY_S):
                look.again()

        self._thread = threading.Thread(target=run, name=f"{OWN_THREADS}look")
        self._thread.start()

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()


def measure(rounds: int) -> None:
    """What one rank does; the first prints the figures."""
    sys.path.insert(0, PEERS)
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from bare_training import BATCH, vgg11
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    notes = Notes()

    def small():
        torch.manual_seed(0)
        layers = [layer for _ in range(12) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers)

    def step(model, images, labels) -> None:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if not isinstance(model, DistributedDataParallel):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world

    few = torch.randn(32, 64), torch.randint(0, 10, (32,))
    many = torch.randn(BATCH // world, 3, 32, 32), torch.randint(0, 10, (BATCH // world,))
    for name, model, data, steps in (
        ("MLP, a collective for each parameter", small(), few, STEPS),
        ("MLP under DDP", DistributedDataParallel(small()), few, STEPS),
        ("VGG11, a collective for each parameter", vgg11(), many, 1),
    ):

        def timed(model=model, data=data, steps=steps) -> float:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                step(model, *data)
            dist.barrier()
            return (time.perf_counter() - begun) / steps

        timed()
        bare, noting = [], []
        for _ in range(rounds if steps > 1 else max(3, rounds // 4)):
            notes.switch(on=False)
            bare.append(timed())
            notes.switch(on=True)
            with Looking():
                noting.append(timed())
        if rank == 0:
            ratios = sorted(n / b for n, b in zip(noting, bare, strict=True))
            print(f"{name}: {statistics.median(noting) / statistics.median(bare):.3f} of the "
                  f"medians, {statistics.median(ratios):.3f} in the median pair "
                  f"({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs); a bare step "
                  f"{statistics.median(bare) * 1e3:.1f} ms; aim: below 1.05")  # fmt: skip
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(int(sys.argv[1]))
    else:
        os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_FR_BUFFER_SIZE="64")
        rounds = sys.argv[1] if len(sys.argv) > 1 else "40"
        torchrun = str(Path(sysconfig.get_path("scripts")) / "torchrun")
        words = [torchrun, "--standalone", "--nproc-per-node", "4", str(Path(__file__).resolve())]
        sys.exit(subprocess.run([*words, rounds], cwd=tempfile.mkdtemp(), check=False).returncode)
