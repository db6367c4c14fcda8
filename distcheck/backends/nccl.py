"""NCCL between GPUs. Its algorithms and summation orders are unspecified, and change with message
size, topology and release. No order is claimed, and results are judged by error bounds.

NCCL refuses ranks that share a GPU, unless its version is 2.30 or newer and
NCCL_MULTI_RANK_GPU_ENABLE is 1. A collective then waits for a kernel of every rank, so all these
kernels must fit on the GPU at once: each rank therefore gets few thread blocks. If they do not fit,
the world hangs until its deadline.
"""

import os

from distcheck.machine import devices

SHARED_SINCE = (2, 30)
# Heuristic: 2 blocks per rank are 16 for 8 ranks; a GPU has tens of multiprocessors.
_TO_SHARE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}


def missing() -> str:
    """Return the reason why NCCL cannot run here; empty if there is a GPU."""
    if devices.gpu_count() == 0:
        return "backend nccl needs an NVIDIA GPU; this machine has none"
    return ""


def has_more_ranks_than_gpus(ranks: int) -> bool:
    return 0 < devices.gpu_count() < ranks


def variables(ranks: int) -> dict[str, str]:
    """Return the environment variables with which ranks can share GPUs, except those that are set
    already.
    """
    if not has_more_ranks_than_gpus(ranks):
        return {}
    return {name: value for name, value in _TO_SHARE.items() if name not in os.environ}


def missing_for(ranks: int) -> str:
    """Return the reason why this many ranks cannot use torch's NCCL here; empty if they can.
    Imports torch.
    """
    if not has_more_ranks_than_gpus(ranks) or can_share_gpu():
        return ""
    gpus = devices.gpu_count()
    return (
        f"backend nccl: {ranks} ranks are more than the {gpus} GPU{'s' * (gpus > 1)} here, and "
        f"NCCL {_loaded_version()} requires a separate GPU for each rank; NCCL {_since()} or newer "
        "is needed to "
        "share one. Use a torch that has it, put a newer libnccl.so.2 first with LD_PRELOAD, or "
        "pass --backend gloo or fewer ranks"
    )


def can_share_gpu() -> bool:
    """Return True if ranks can share a GPU with torch's NCCL. Imports torch."""
    return devices.nccl_version()[:2] >= SHARED_SINCE


def describe() -> str:
    """Describe NCCL for `distcheck doctor`. Imports torch."""
    if not devices.nccl_version():
        return "torch has none"
    if can_share_gpu():
        return f"{_loaded_version()}; ranks can share a GPU"
    return f"{_loaded_version()}; each rank needs a GPU ({_since()} or newer lets ranks share one)"


def _loaded_version() -> str:
    return ".".join(map(str, devices.nccl_version())) or "of unknown version"


def _since() -> str:
    return ".".join(map(str, SHARED_SINCE))
