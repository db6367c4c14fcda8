"""What it costs a right step that ranks note their calls, so that a hang can be proven at once.

    python bench/hangs.py [ROUNDS] [mpi]

Prints a step with the notes over a bare one, in a world of 4 over gloo, or over the backend mpi: of
a small MLP that reduces every parameter by itself (24 collectives a step and little else) and under
DDP, and of VGG11. Each rank makes bare and noting steps in turn, in one process, so that all meet
the same machine; the thread that looks at the rank ten times a second runs beside the noting steps
only.
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
    """Switches the notes of this process on and off. Over mpi, the recorder is one of them."""

    def __init__(self, backend: str) -> None:
        import torch.distributed as dist

        from distcheck.worlds import call_recorder

        kinds = [dist.ProcessGroup, dist.distributed_c10d.Work]
        if backend == "mpi":
            from distcheck.addons.mpi import calls
            from distcheck.addons.mpi.calls import MPIWork
            from distcheck.addons.mpi.group import MPIGroup

            kinds += [MPIGroup, MPIWork, calls]
        before = [dict(vars(kind)) for kind in kinds]
        call_recorder.log_to(os.memfd_create("calls"))
        call_recorder.install(usual_limit_s=1800.0)
        assert call_recorder.HERE.log is not None
        if backend == "mpi":
            from distcheck import backends

            call_recorder.HERE.usual_limit_s = 0.0
            backends.note_calls("mpi", backends.register("mpi"))
            one = calls.MPICall("all_reduce", "0", 1, 1, [], [], [], 0)
            before[-1]["record"] = lambda *_: one
        self._changes = [
            (kind, name, old[name], now)
            for kind, old in zip(kinds, before, strict=True)
            for name, now in dict(vars(kind)).items()
            if name in old and old[name] is not now
        ]
        assert len(self._changes) > 10, self._changes

    def switch(self, *, on: bool) -> None:
        for kind, name, old, new in self._changes:
            setattr(kind, name, new if on else old)


class Looking:
    """The thread beside the main one."""

    def __enter__(self):
        from distcheck.worlds.waiting import LOOK_EVERY_S, OWN_THREADS, RankInspector

        look, self._end = RankInspector(Nowhere()), threading.Event()

        def run() -> None:
            while not self._end.wait(LOOK_EVERY_S):
                look.again()

        self._thread = threading.Thread(target=run, name=f"{OWN_THREADS}look")
        self._thread.start()

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()


def join(backend: str) -> None:
    """Makes the default group."""
    import torch.distributed as dist

    if backend == "gloo":
        dist.init_process_group("gloo")
        return
    from distcheck.addons import mpi

    variables = {"rank": "OMPI_COMM_WORLD_RANK", "world_size": "OMPI_COMM_WORLD_SIZE"}
    places = {name: int(os.environ[variable]) for name, variable in variables.items()}
    meeting = f"file://{os.getcwd()}/meeting"
    dist.init_process_group(mpi.register(), init_method=meeting, **places)


def measure(rounds: int, backend: str) -> None:
    """What one rank does; the first prints the figures."""
    sys.path.insert(0, PEERS)
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from bare_training import BATCH, vgg11
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    notes = Notes(backend)

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
                  f"{statistics.median(bare) * 1e3:.1f} ms; aim: below 1.05",
                  flush=True)  # fmt: skip
    dist.barrier()
    if backend == "mpi":
        from distcheck.addons import mpi

        mpi.finalize()
    os._exit(0)


def launch(rounds: str, backend: str) -> int:
    """Runs this file on four ranks."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_FR_BUFFER_SIZE="64")
    scripts = Path(sysconfig.get_path("scripts"))
    if backend == "gloo":
        words = [str(scripts / "torchrun"), "--standalone", "--nproc-per-node", "4"]
    else:
        from distcheck.addons.mpi import library, started

        launcher = library.find_launcher()
        assert launcher is not None, "there is no MPI launcher here"
        os.environ.update(started._SETTINGS, MPI4PY_LIBMPI=launcher.library)
        words = [launcher.path, *started._options(launcher), "-n", "4", sys.executable]
    words += [str(Path(__file__).resolve()), rounds, backend, "rank"]
    return subprocess.run(words, cwd=tempfile.mkdtemp(), check=False).returncode


if __name__ == "__main__":
    given = sys.argv[1:]
    backend = "mpi" if "mpi" in given else "gloo"
    rounds = next((word for word in given if word.isdigit()), "40")
    if "rank" in given:
        measure(int(rounds), backend)
    else:
        sys.exit(launch(rounds, backend))
