"""Where tensors live: what there is on this machine, and a rank's own device.

`gpu_count` and `missing` are asked by the front and touch neither torch nor CUDA: a process that
has touched CUDA cannot fork ranks that use it. What takes a `torch.device` runs in ranks and
judges, which are forked from a helper that has not.
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
_MOST_BESIDE = 8  # chosen: each is a Python of its own, with its script's workers
_CONTEXT_BYTES = 1 << 30  # chosen: what CUDA and its libraries take of a GPU for a process; 0.5 GiB
# was seen on an H100


def gpu_count(environ: Mapping[str, str] | None = None) -> int:
    """The NVIDIA GPUs that CUDA will show here, as far as device files and the environment tell."""
    environ = os.environ if environ is None else environ
    files = [f for f in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", f.name)]
    if not files and Path("/dev/dxg").exists():  # WSL: one device stands for all of them
        return 1
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(files)
    # CUDA stops at the first entry that names no device; -1 is the customary one.
    named = []
    for entry in filter(None, (entry.strip() for entry in visible.split(","))):
        if entry.startswith("-"):
            break
        named.append(entry)
    return min(len(named), len(files))


def missing(device: str, backend: str) -> str:
    """Why ranks cannot run on a device of this machine, in a sentence; empty where they can."""
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
    """This process's device, made its current one. Ranks share GPUs in turn where there are fewer.

    Raises CannotRunError where torch sees none.
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
    """The generators that a forward pass on a device draws from: the CPU's, then the GPU's."""
    import torch

    from distcheck.machine.shared_tensors import raw_bytes

    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    return bytes(raw_bytes(state))


def set_rng_state(state: bytes, device: "torch.device", cpu_bytes: int) -> None:
    """Puts the generators back; the CPU's state takes up the first `cpu_bytes`."""
    import torch

    whole = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    torch.set_rng_state(whole[:cpu_bytes])
    if device.type == "cuda":
        torch.cuda.set_rng_state(whole[cpu_bytes:], device)


def gpu_bytes_taken() -> int:
    """The most memory that torch has taken on this process's GPU for tensors; 0 without one."""
    import torch

    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_initialized() else 0


def copies_beside(taken: int) -> int:
    """How many further processes that need as much as `taken` bytes for tensors may run: as many as
    this process's GPU has room for beside what it will need itself, and at most some.
    """
    import torch

    if not torch.cuda.is_initialized():
        return min(cores(), _MOST_BESIDE)
    free, _ = torch.cuda.mem_get_info()
    free -= max(0, taken - int(torch.cuda.memory_reserved()))
    return max(1, min(cores(), _MOST_BESIDE, free // (taken + _CONTEXT_BYTES)))


def describe(device: str) -> dict[str, object]:
    """What bits depend on beyond the CPU: the GPU, its libraries. Empty on the CPU."""
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
    """The version of the NCCL that this process has loaded; empty where torch has none.

    The library itself is asked: `torch.cuda.nccl.version()` is a constant of torch's build, which
    another library that was put first with LD_PRELOAD does not change.
    """
    import torch

    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)  # after torch: what it uses
        if library.ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10_000, number.value // 100 % 100, number.value % 100
    except (OSError, AttributeError):  # linked into torch
        pass
    try:
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except AttributeError:
        return ()


def _cudnn_version() -> int | None:
    """None where the library that is found is not of torch's build, or too new for this GPU."""
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
