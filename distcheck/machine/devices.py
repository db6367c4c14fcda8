"""The devices of this machine, and the device of a rank.

The front end calls `gpu_count` and `why_device_unavailable`, which use neither torch nor CUDA: a
process that has initialized CUDA cannot fork ranks that use CUDA. Functions that take a
`torch.device` run in ranks and judges, which are forked from a helper that has not initialized
CUDA.
"""

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcheck.machine.resources import cores

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda")
_MOST_BESIDE = 8  # Heuristic: each is a Python process with its script's workers
# Heuristic: GPU memory that CUDA and its libraries take per process. Measured: 0.5 GiB on an H100.
_CONTEXT_BYTES = 1 << 30


def gpu_count(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of GPUs that CUDA will find, according to device files and environment
    variables.
    """
    environ = os.environ if environ is None else environ
    files = [f for f in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", f.name)]
    if not files and Path("/dev/dxg").exists():  # WSL: one device file for all GPUs
        return 1
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(files)
    # CUDA stops at the first entry that names no device, by convention -1.
    named = []
    for entry in filter(None, (entry.strip() for entry in visible.split(","))):
        if entry.startswith("-"):
            break
        named.append(entry)
    return min(len(named), len(files))


def why_device_unavailable(device: str, backend: str) -> str:
    """Return the reason why ranks cannot run on a device of this machine; empty if they can."""
    if device == "cpu":
        if backend == "nccl":
            return "backend nccl moves tensors between GPUs only; pass --device cuda as well"
        return ""
    count = gpu_count()
    if count == 0:
        return "device 'cuda' is not available: this machine has no NVIDIA GPU; pass --device cpu"
    if backend.partition(":")[0] == "simulated":
        return f"backend {backend} takes CPU tensors only; pass --device cpu"
    if backend == "mpi":
        return "backend mpi takes CPU tensors only; pass --device cpu, or --backend gloo or nccl"
    return ""


def enter(device: str, local_rank: int) -> "torch.device":
    """Make a device the current device of this process, and return it. If there are fewer GPUs than
    ranks, ranks share GPUs in turn. Raises CannotRunError if torch finds no GPU.
    """
    import torch

    from distcheck.errors import CannotRunError

    if device != "cuda":
        return torch.device(device)
    if not torch.cuda.is_available():
        raise CannotRunError(
            f"torch {torch.__version__} cannot use this machine's GPU: it is a build without CUDA, "
            "or the driver is older than it needs; pass --device cpu"
        )
    own = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def rng_state(device: "torch.device") -> bytes:
    """Return the RNG states that a device uses: the CPU's, followed by the GPU's."""
    import torch

    from distcheck.machine.shared_tensors import raw_bytes

    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    return bytes(raw_bytes(state))


def set_rng_state(state: bytes, device: "torch.device", cpu_bytes: int) -> None:
    """Restore the RNG states. The first `cpu_bytes` bytes are the CPU's state."""
    import torch

    whole = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    torch.set_rng_state(whole[:cpu_bytes])
    if device.type == "cuda":
        torch.cuda.set_rng_state(whole[cpu_bytes:], device)


def gpu_bytes_taken() -> int:
    """Return the peak memory in bytes that torch has reserved on this process's GPU; 0 without a
    GPU.
    """
    import torch

    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_initialized() else 0


def count_of_further_processes(taken: int) -> int:
    """Return how many further processes may run concurrently if each holds `taken` bytes of
    tensors: as many as fit on this process's GPU in addition to its own needs, up to a fixed limit.
    """
    import torch

    if not torch.cuda.is_initialized():
        return min(cores(), _MOST_BESIDE)
    free, _ = torch.cuda.mem_get_info()
    free -= max(0, taken - int(torch.cuda.memory_reserved()))
    return max(1, min(cores(), _MOST_BESIDE, free // (taken + _CONTEXT_BYTES)))


def describe(device: str) -> dict[str, object]:
    """Describe the GPU and its libraries, on which results depend bitwise in addition to the CPU.
    Empty for the CPU.
    """
    if device != "cuda":
        return {}
    import torch

    backends: Any = torch.backends
    float32 = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
        "nccl": ".".join(map(str, nccl_version())),
        "driver": _driver_version(),
        "tf32": "tf32" in float32,
        "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL library that this process has loaded; empty if torch has none.

    The library itself is asked. `torch.cuda.nccl.version()` is a constant of torch's build, so it
    does not change if LD_PRELOAD loads another library.
    """
    import torch

    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)  # torch's, if loaded
        if library.ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10_000, number.value // 100 % 100, number.value % 100
    except (OSError, AttributeError):  # linked into torch
        pass
    try:
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except AttributeError:
        return ()


def _cudnn_version() -> int | None:
    """Return the version of cuDNN; None if it differs from that of torch's build, or is too new for
    this GPU.
    """
    import torch

    try:
        found: int | None = torch.backends.cudnn.version()
        return found
    except RuntimeError:
        return None


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)*\b", text)
    return found[0] if found else ""
