"""The first job of a run: look at strategy, workload, data and machine before any rank starts."""

import os
import platform
import sys
from importlib.metadata import version
from typing import Any

import msgspec
import torch

from distcheck import __version__, seeds
from distcheck.contract import Contract
from distcheck.jobs import CaseFacts, Facts, InspectionJob
from distcheck.loading import load_strategy
from distcheck.ranks.training import Ingredients, describe_model, open_ingredients
from distcheck.worlds.child import Reporter


def inspect_cases(payload: bytes, fds: list[int], reporter: Reporter) -> bytes:
    """Loads everything once. Raises UsageError or CannotRunError with what is wrong."""
    job = msgspec.msgpack.decode(payload, type=InspectionJob)
    data_fd = fds[0] if job.has_data else None
    seeds.pin_determinism()
    _enter_world_of_one()
    known: dict[tuple[str, str], CaseFacts] = {}
    facts = []
    for case in job.cases:
        reporter.progress(0, f"inspect {case.id}")
        strategy = load_strategy(case.strategy)
        key = (case.workload, case.dtype)
        if key not in known:
            known[key] = _look_at(open_ingredients(case, job.description, data_fd))
        facts.append(
            msgspec.structs.replace(
                known[key], contract=strategy.contract, strategy_file=strategy.file
            )
        )
    return msgspec.msgpack.encode(Facts(environment=environment(), cases=tuple(facts)))


def _enter_world_of_one() -> None:
    """What code may ask for when it is loaded: a process group, and a launcher's variables."""
    import torch.distributed as dist

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def environment() -> dict[str, Any]:
    """Versions, machine and settings, as a report records them."""
    return {
        "distcheck": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "backend": "gloo",
        "device": "cpu",
        **seeds.describe_settings(),
        "libraries": {name: version(name) for name in ("msgspec", "safetensors", "xxhash")},
        "executable": sys.executable,
    }


def examine(payload: bytes, fds: list[int], reporter: Reporter) -> bytes:
    """What `distcheck doctor` asks of a process with torch in it; JSON."""
    import torch.distributed as dist

    seeds.pin_determinism()
    built = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    cuda = "cuda (built in)" if torch.backends.cuda.is_built() else "no cuda"
    try:
        import torchvision

        vision = f"loads, {torchvision.__version__}"
    except Exception as error:
        vision = f"does not load: {type(error).__name__}: {error}"
    found = {
        "environment": environment(),
        "backends": [name for name, there in built.items() if there],
        "devices": f"cpu, {cuda}; distcheck runs on cpu",
        "torchvision": vision,
    }
    return msgspec.json.encode(found)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _look_at(ingredients: Ingredients) -> CaseFacts:
    """What there is to know of a workload, from a forward pass over two samples."""
    saved_bytes = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved_bytes
        if not isinstance(tensor, torch.nn.Parameter):
            saved_bytes += tensor.numel() * tensor.element_size()
        return tensor

    model = ingredients.model()
    batch = ingredients.batch(torch.arange(2), 2)
    before = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        ingredients.loaded.workload.loss(model, batch)
    draws = not torch.equal(before, torch.get_rng_state())
    return CaseFacts(
        contract=Contract(),
        strategy_file="",
        model=describe_model(ingredients, model),
        train_size=ingredients.samples.size(train=True),
        saved_bytes_per_sample=saved_bytes // 2,
        own_sampler=ingredients.loaded.sampler is not None,
        draws_random_numbers=draws,
    )
