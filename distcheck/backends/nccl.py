"""NCCL, between GPUs: which algorithm adds in which order is its own affair, and changes with
sizes, topology and release. So no order is claimed, and what it leaves is judged by bounds.

NCCL refuses ranks that share a GPU, unless it is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE is 1.
A collective then waits for a kernel of every rank, so all of them must fit on the GPU: each rank
gets few thread blocks. Where they do not fit, the world hangs, and its deadline ends it.
"""

import os

from distcheck.machine import devices

SHARED_SINCE = (2, 30)
# Chosen: 2 blocks a rank are 16 for 8 ranks; a GPU has tens of multiprocessors.
_TO_SHARE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}


def missing() -> str:
    """Why it cannot run here; empty where a GPU is there."""
    if devices.gpu_count() == 0:
        return "backend nccl needs an NVIDIA GPU; this machine has none"
    return ""


def are_shared(ranks: int) -> bool:
    """Whether so many ranks on this machine are more than its GPUs."""
    return 0 < devices.gpu_count() < ranks


def variables(ranks: int) -> dict[str, str]:
    """The variables with which NCCL lets so many ranks share GPUs, but for those that are set."""
    if not are_shared(ranks):
        return {}
    return {name: value for name, value in _TO_SHARE.items() if name not in os.environ}


def missing_for(ranks: int) -> str:
    """Why so many ranks cannot run on this machine with the NCCL that torch uses. Imports torch."""
    if not are_shared(ranks) or can_share():
        return ""
    gpus = devices.gpu_count()
    return (
        f"backend nccl: {ranks} ranks are more than the {gpus} GPU{'s' * (gpus > 1)} here, and "
        f"NCCL {_loaded()} requires a separate GPU for each rank; NCCL {_since()} or newer is "
        "needed to "
        "share one. Use a torch that has it, put a newer libnccl.so.2 first with LD_PRELOAD, or "
        "pass --backend gloo or fewer ranks"
    )


def can_share() -> bool:
    """Whether the NCCL that torch uses lets ranks share a GPU. Imports torch."""
    return devices.nccl_version()[:2] >= SHARED_SINCE


def describe() -> str:
    """What `distcheck doctor` says of it. Imports torch."""
    if not devices.nccl_version():
        return "torch has none"
    if can_share():
        return f"{_loaded()}; ranks can share a GPU"
    return f"{_loaded()}; each rank needs a GPU ({_since()} or newer lets ranks share one)"


def _loaded() -> str:
    return ".".join(map(str, devices.nccl_version())) or "of unknown version"


def _since() -> str:
    return ".".join(map(str, SHARED_SINCE))
