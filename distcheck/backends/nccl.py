"""NCCL, between GPUs: which algorithm adds in which order is its own affair, and changes with
sizes, topology and release. So no order is claimed, and what it leaves is judged by bounds.
"""

from distcheck.machine import devices


def missing() -> str:
    """Why it cannot run here; empty where a GPU is there."""
    if devices.gpu_count() == 0:
        return "backend nccl needs an NVIDIA GPU for each rank; this machine has none"
    return ""
