"""Describes this rank: its position in the world, its environment, and properties of
its modules.
"""

import atexit
import gc
import os
import platform
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distcheck import private
from distcheck.errors.masking import masked_words
from distcheck.job.inside import ending, tensors
from distcheck.job.inside.contents import read_with_equal_rng
from distcheck.job.inside.ending import RankStatuses
from distcheck.job.inside.marking import mark_rank
from distcheck.job.inside.parameters import Parameters
from distcheck.machine import compat
from distcheck.machine.compat import BatchNorm, ddp_hooks, ddp_times
from distcheck.machine.seeds import describe_settings
from distcheck.recordings.jobs import records

_EXCHANGED, _APART = "exchanged", "apart-{:06d}"  # notes of a rank for the other ranks
_RUN = "distcheck/run"  # key in the store of the default group
_MOST_SETTING = 1 << 1023  # of a param group; a float holds it
_WAIT_S = 30.0  # Heuristic: for other ranks' last step, which may save state
# Variables of launchers that a script may read, and variables that change results; a prefix would
# match user variables as well.
_VARIABLES = {
    *["PYTHONHASHSEED", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG"],
    *["NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_PROTO"],
    *["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "ROLE_NAME"],
    *(f"{of}_{what}" for of in ("LOCAL", "GROUP", "ROLE") for what in ("RANK", "WORLD_SIZE")),
    *(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    *(f"TORCHELASTIC_{what}" for what in ("RESTART_COUNT", "RUN_ID", "ERROR_FILE")),
    *(f"ACCELERATE_{what}" for what in (
        "MIXED_PRECISION", "USE_CPU", "USE_FSDP", "USE_DEEPSPEED", "GRADIENT_ACCUMULATION_STEPS",
        "TORCH_DEVICE", "ALLOW_TF32", "DYNAMO_BACKEND", "DYNAMO_MODE", "DYNAMO_USE_FULLGRAPH",
        "DYNAMO_USE_DYNAMIC",
    )),
}  # fmt: skip


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the world size, from the process group or the launcher."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, world in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if os.environ.get(rank, "").isdecimal() and os.environ.get(world, "").isdecimal():
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


class SharedRankError(Exception):
    """Raised in a process if another process has already recorded the same rank."""


def write_rank_record(
    folder: Path,
    rank: int,
    world: int,
    parameters: Parameters,
    axes: Sequence[records.MeshAxis] = (),
) -> None:
    mine = records.rank_folder(folder, rank)
    if mine.exists():
        raise SharedRankError(f"rank {rank} of {world}")
    private.folder(mine, is_new=True)
    mark_rank()
    atexit.register(private.write, mine / "ended", b"")
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    first = next(iter(parameters.by_name.values()), torch.empty(0))
    records.write_json(
        mine / "rank.json",
        records.RankRecord(
            rank=rank,
            world=world,
            # The reference is started like rank 0; other command lines are only displayed.
            arguments=tuple(masked_words(sys.orig_argv) if rank else sys.orig_argv),
            process=os.getpid(),
            parent=os.getppid(),
            folder=os.getcwd(),
            backend=_backend_for(first.device.type) if grouped else "",
            device=first.device.type,
            torch=str(torch.__version__),
            settings=_settings(),
            variables={name: v for name, v in os.environ.items() if name in _VARIABLES},
            wrapper=type(parameters.roots[0]).__name__ if parameters.roots else "",
            divided_by=sharding_library(parameters),
            axes=tuple(axes),
            bypassed=_bypassed_wrapper(parameters),
            schedules_by="accelerate" if _steps_per_rank() else "",
            run=_name_of_run() if grouped else "",
        ),
    )


def _name_of_run() -> str:
    """Return a random name that the first rank here has stored for all ranks of the group, or "" if
    the backend has no store.
    """
    try:
        name = compat.default_store().compare_set(_RUN, "", secrets.token_hex(16))
    except (AttributeError, RuntimeError):
        return ""
    return str(name.decode(errors="replace"))


_LIBRARIES = (
    "numpy", "torchvision", "transformers", "accelerate", "lightning", "pytorch_lightning", "peft",
    "datasets", "deepspeed",
)  # fmt: skip


def _settings() -> dict[str, str]:
    """Return the versions, settings and seeds of this process that may change results."""
    cudnn, main = torch.backends.cudnn, getattr(sys.modules["__main__"], "__file__", None)
    found = {
        "python": platform.python_version(),
        **{n: getattr(sys.modules[n], "__version__", "") for n in _LIBRARIES if n in sys.modules},
        **describe_settings(),
        "default dtype": torch.get_default_dtype(),
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "seed of torch": torch.initial_seed(),
    }
    if main and Path(main).is_file():
        found["script"] = records.digest(Path(main).read_bytes())
    return {name: str(value) for name, value in found.items()}


def _backend_for(device: str) -> str:
    """Return the backend of a device. (get_backend() has none for a group that was created without
    a name.)
    """
    several = str(torch.distributed.get_backend_config()).split(",")
    return dict(one.split(":", 1) for one in several).get(device, torch.distributed.get_backend())


def all_independent(folder: Path, rank: int, world: int, step: int, *, apart: bool) -> bool:
    """Return True if no rank here has communicated up to a step.

    A rank that sees only its own gradients cannot decide this alone: a broadcast leaves the
    gradients of the root unchanged. If ranks decided differently, they would wait for each other in
    the next step. Ranks that do not reach this step are ignored.
    """
    mine = records.rank_folder(folder, rank)
    if not apart:
        private.write(mine / _EXCHANGED, b"")
        return False
    private.write(mine / _APART.format(step), b"")
    until = time.monotonic() + _WAIT_S
    others = [one for r in range(world) if (one := records.rank_folder(folder, r)).exists()]
    while time.monotonic() < until:
        if any((one / _EXCHANGED).exists() for one in others):
            return False
        if all((one / _APART.format(step)).exists() for one in others):
            return True
        time.sleep(0.01)
    return True


def finish_rank(folder: Path, rank: int, world: int, loaders: Mapping[int, Any]) -> None:
    """Exit successfully once every rank has written its last step and this rank has reread some
    samples. If other ranks do not finish, because they may wait for this rank, continue and ask
    again after the next step.
    """
    mine = records.rank_folder(folder, rank) / "ended"
    if not (read := mine.with_name("read.json")).exists():
        records.write_json(read, records.RereadSamples(tuple(read_with_equal_rng(loaders))))
    private.write(mine, b"")
    until = time.monotonic() + _WAIT_S
    others = [records.rank_folder(folder, other) for other in range(world)]
    here = [one for one in others if one.exists()]
    elsewhere = RankStatuses(rank, world) if len(here) < world else None
    while time.monotonic() < until:
        if all((one / "ended").exists() for one in here) and (
            elsewhere is None or elsewhere.have_ended()
        ):
            ending.exit_process()
        time.sleep(0.01)
    mine.unlink()
    if elsewhere is not None:
        elsewhere.goes_on()


def sharding_library(parameters: Parameters) -> str:
    """Return the name of the library that sharded the model in a format that only the library can
    unshard, or "".
    """
    for root in parameters.roots:
        for part in root.modules():
            name = type(part).__name__
            if name in ("FullyShardedDataParallel", "DeepSpeedEngine", "PipelineEngine"):
                return name
    return ""


def _bypassed_wrapper(parameters: Parameters) -> str:
    """Return the class of a DistributedDataParallel that wraps or contains a called model but is
    not called itself.
    """
    own = {id(one) for root in parameters.roots for one in root.parameters()}
    if any(ddp_in(root) is not None for root in parameters.roots):
        return ""
    kind = torch.nn.parallel.DistributedDataParallel
    for one in gc.get_objects():
        if issubclass(type(one), kind) and any(id(p) in own for p in one.parameters()):
            return type(one).__name__
    return ""


def _steps_per_rank() -> bool:
    """Return True if a schedule follows accelerate's default: it steps once per rank, on the
    assumption that the user has counted the batches of a single process.
    """
    module: Any = sys.modules.get("accelerate.scheduler")
    kind = getattr(module, "AcceleratedScheduler", None)
    if kind is None:
        return False
    # Not isinstance, as below.
    schedules = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    return any(
        getattr(one, "step_with_optimizer", False) and not getattr(one, "split_batches", True)
        for one in schedules
    )


def digests_of_averages(parameters: Parameters) -> dict[str, str]:
    """Return digests of models that look like averages of a trained one, in order of creation."""
    found = (
        [] if parameters.has_parts else models_like_averages(parameters)
    )  # averages would be sharded, too
    return {f"{type(one).__name__} {place}": state_digest(one) for place, one in enumerate(found)}


def state_digest(module: torch.nn.Module) -> str:
    held = [tensors.digest_of(tensors.unsharded_on_cpu(p)) for p in module.parameters()]
    return records.digest("".join(held).encode())


def models_like_averages(parameters: Parameters) -> list[torch.nn.Module]:
    """Return models with the structure of a trained one that do not train, such as averages."""
    trained = {id(one) for root in parameters.roots for one in root.parameters()}
    shapes = {_shapes(root) for root in parameters.roots}
    found = []
    for one in gc.get_objects():
        # Not isinstance: a proxy object may have side effects.
        if issubclass(type(one), torch.nn.Module) and _shapes(one) in shapes:
            if any(id(parameter) in trained for parameter in one.parameters()):
                continue  # it trains, or wraps a module that does
            found.append(one)
    return found


def _shapes(module: torch.nn.Module) -> tuple[torch.Size, ...]:
    try:
        return tuple(one.shape for one in module.parameters())
    except (AttributeError, RuntimeError, ValueError):  # not initialized yet, or remote
        return ()


def normalizes_by_local_batch(parameters: Parameters) -> bool:
    """Return True if a training module is a BatchNorm that normalizes by the local batch."""
    return any(
        isinstance(part, BatchNorm)
        and part.training
        and not isinstance(part, torch.nn.SyncBatchNorm)
        for root in parameters.roots
        for part in root.modules()
    )


def ddp_synchronizes(model: torch.nn.Module) -> bool | None:
    """Return True if DistributedDataParallel, possibly inside a wrapper (Fabric), synchronizes in
    this pass; None if there is no DistributedDataParallel.
    """
    found = ddp_in(model)
    return None if found is None else bool(found.require_backward_grad_sync)


def ranks_that_ddp_averages(wrapped: Any) -> str:
    """Return the ranks over which DistributedDataParallel averages every gradient; "" if a hook of
    the script may do something else, or it ignores parameters.
    """
    given = wrapped.parameters_to_ignore or ddp_hooks(wrapped)
    return "" if given else ranks_that_add((), {"group": wrapped.process_group})


def ranks_that_add(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the ranks whose tensors an all-reduce with these arguments adds or averages; "" for
    another operation or one rank.
    """
    op = kwargs.get("op", args[1] if len(args) > 1 else torch.distributed.ReduceOp.SUM)
    group = kwargs.get("group", args[2] if len(args) > 2 else None)
    if op not in (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG):
        return ""
    ranks = torch.distributed.get_process_group_ranks(group)
    return str(ranks) if len(ranks) > 1 else ""


def exchange_seconds(model: torch.nn.Module) -> float | None:
    """Return the mean seconds by which synchronization delayed backward (communication minus
    overlapped computation), as torch samples it.
    """
    measured = ddp_times(ddp_in(model))
    took = measured.get("avg_backward_comm_time", 0)
    hidden = measured.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0, took - hidden) / 1e9 if took else None


def ddp_in(model: torch.nn.Module) -> Any:
    kind = torch.nn.parallel.DistributedDataParallel
    return next((part for part in model.modules() if isinstance(part, kind)), None)


def number_of_targets(name: str, target: Any, ignored: int) -> int:
    if not isinstance(target, torch.Tensor):
        return 0
    if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
        return int((target != ignored).sum())
    return target.numel()


def clip_of(
    kind: str, most: float, norm: Any, *, passes: int, scaled: bool, names: Sequence[str]
) -> records.ClipCall:
    """Return the record of a clipping call."""
    return records.ClipCall(
        kind=kind,
        most=float(most) if float(most) < float("inf") else None,
        norm=float(norm) if isinstance(norm, torch.Tensor | float) else None,
        passes=passes,
        scaled=scaled,
        names=tuple(names),
    )


def numeric_settings(group: dict[str, Any]) -> dict[str, float]:
    """Return the numeric settings of a param group; one entry per element for tuples such as betas.
    Values are finite and never NaN, because JSON has no others.
    """
    found: dict[str, float] = {}
    for key, value in group.items():
        several = value if isinstance(value, tuple) else (value,)
        for place, one in enumerate(several):
            if isinstance(one, torch.Tensor) and one.numel() == 1:
                one = one.item()
            if isinstance(one, int | float) and key != "params" and one == one:
                number = float(min(max(one, -_MOST_SETTING), _MOST_SETTING))
                found[f"{key}[{place}]" if isinstance(value, tuple) else key] = number
    return found
