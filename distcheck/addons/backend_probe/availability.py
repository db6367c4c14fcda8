"""Determines if a backend can be probed on this machine, and the reason if it cannot."""

import torch
import torch.distributed as dist

from distcheck import backends
from distcheck.addons.backend_probe.records import LOOK, Availability, LookRequest
from distcheck.training.loading import load_backend
from distcheck.verification import inspection
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.reporter import Reporter

_OF_DEVICES = {"nccl": "cuda"}  # torch's backends that support one device type only


@LOOK.does
def look(job: LookRequest, fds: Descriptors, reporter: Reporter) -> Availability:
    """Return the availability of a backend, in a separate process. Raises UsageError."""
    device = job.device or _OF_DEVICES.get(job.backend, "cpu")
    missing = _missing(job, device)
    seen = inspection.environment(job.backend, "cpu" if missing else device)
    environment = {**seen, "device": device}
    return Availability(device=device, missing=missing, environment=environment)


def _missing(job: LookRequest, device: str) -> str:
    name = job.backend
    if ":" in name:
        load_backend(name)
    elif name == "gloo" and not dist.is_gloo_available():
        return f"this build of torch ({torch.__version__}) has no gloo"
    elif name in _OF_DEVICES and not dist.is_nccl_available():
        return f"this build of torch ({torch.__version__}) has no {name}"
    elif name in _OF_DEVICES and device != _OF_DEVICES[name]:
        return f"{name} supports only {_OF_DEVICES[name]} tensors, not {device} tensors"
    elif reason := backends.missing(name) or backends.missing_for(name, job.world):
        return reason
    if device == "cuda" and not torch.cuda.is_available():
        return "torch detects no CUDA device"
    return ""
