"""RNG streams, and the settings that affect results bitwise.

Every RNG stream of a run is seeded by `derive(root seed, purpose, numbers...)`. Streams therefore
never coincide by accident, and each can be reproduced without running what precedes it.
"""

import contextlib
import hashlib
import os
import random
import struct
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from distcheck.machine.numerics import smallest

# Settings to pin before torch is imported. More than one intra-op thread changes bits (matrix
# kernels split their sums by thread) and is slow with many ranks on few cores; a parallel OpenMP
# region in a process that forks later makes its children hang.
PINNED_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    # cuBLAS has a fixed order of summation only with a fixed workspace, which determines its
    # algorithm.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def derive(root: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed that depends on the root seed of a case, a purpose, and numbers such as
    rank and step.
    """
    text = ":".join([str(root), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch, `random` and, if it is imported, NumPy.

    A forked rank inherits the generators of its parent, so every rank must seed all three.
    """
    import torch

    if _may_have_accelerator():
        torch.manual_seed(seed)
    else:  # manual_seed would record the stack per device kind, slower than a layer
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@cache
def _may_have_accelerator() -> bool:
    """Return True if torch could find a device other than the CPU: with CUDA, ROCm, the Direct
    Rendering Manager or WSL, or one that a library has registered.
    """
    from distcheck.machine import compat  # imports torch, which the front end must not

    files = [f for pattern in ("nvidia*", "kfd", "dri", "dxg") for f in Path("/dev").glob(pattern)]
    return bool(files) or compat.has_registered_device()


# State of a Mersenne twister: 624 words and a position; then whether the second of a pair of normal
# numbers is stored for the next draw, and that number.
_TWISTER = struct.Struct("<625I?d")
LIBRARY_STATES_BYTES = 2 * _TWISTER.size


def library_rng_states() -> bytes:
    """Return the states of the global generators of `random` and, if it is imported, of NumPy. The
    result has at most LIBRARY_STATES_BYTES bytes. The state of `random` comes first and is always
    present.
    """
    _, words, kept = random.getstate()
    packed = _TWISTER.pack(*words, kept is not None, kept or 0.0)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return packed
    state = numpy_random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # user code has replaced it
        return packed
    key, position = state["state"]["key"], state["state"]["pos"]
    normal = bool(state["has_gauss"]), state["gauss"]
    return packed + _TWISTER.pack(*key.tolist(), position, *normal)


def set_library_states(states: bytes) -> None:
    """Restore the generators. NumPy's is restored only if NumPy is imported. Raises ValueError if
    the states are damaged.
    """
    *words, is_kept, kept = _TWISTER.unpack_from(states)
    random.setstate((3, tuple(words), kept if is_kept else None))
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None or len(states) < LIBRARY_STATES_BYTES:
        return
    *key, position, is_kept, kept = _TWISTER.unpack_from(states, _TWISTER.size)
    if position > len(key):  # NumPy would read there
        raise ValueError(f"a generator has {len(key)} words, and is not at {position}")
    twister = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
    numpy_random.set_state({**twister, "has_gauss": int(is_kept), "gauss": kept})


def pin_determinism() -> None:
    """Pin the settings that affect results bitwise. Called in every rank and reference, and again
    after a user's file was loaded, because training scripts change these settings.

    Deterministic algorithms are requested with `warn_only`, because code under test may use an
    operation that has none. The rerun check shows if this matters.
    """
    import torch

    from distcheck.machine import compat  # imports torch, which the front end must not

    torch.set_num_threads(1)
    # use_deterministic_algorithms does the same, but also imports torch's compiler. Measured: 1 s.
    torch.set_deterministic_debug_mode("warn")
    if (compiler := sys.modules.get("torch._inductor.config")) is not None:
        setattr(compiler, "deterministic", True)  # noqa: B010
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read when the compiler is imported
    # Works even if a user's file has called disable_global_flags(), as torch's test utilities do
    # when they are imported.
    with compat.flags_may_change():
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        _compute_float32_in_float32()


_DEFAULT_DTYPES = ("float32", "float64", "bfloat16", "float16")
_MKLDNN_OFF, _DENORMALS_FLUSHED = 1 << 4, 1 << 5
_THREADS_AT, _MOST_THREADS = 8, 1 << 8  # extra threads, in as many bits
_SMALLEST = smallest("float32")  # a denormal number


def result_settings() -> int:
    """Return, encoded in an integer, the settings that user code controls and that change the
    results of a process: the default dtype (four bits), mkldnn disabled, denormal numbers flushed
    to zero, and the number of threads (at most 256). 0 stands for torch's defaults with one thread.
    """
    import torch

    name = str(torch.get_default_dtype()).removeprefix("torch.")
    found = _DEFAULT_DTYPES.index(name) if name in _DEFAULT_DTYPES else 0
    found |= 0 if torch.backends.mkldnn.enabled else _MKLDNN_OFF
    found |= min(torch.get_num_threads() - 1, _MOST_THREADS - 1) << _THREADS_AT
    denormal = torch.tensor(_SMALLEST, dtype=torch.float32)
    return found | (0 if bool((denormal * 1).any()) else _DENORMALS_FLUSHED)


@contextlib.contextmanager
def under(wanted: int) -> Iterator[None]:
    """Apply the settings of another process (see `result_settings`) within the block."""
    before = result_settings()
    _set(wanted, before)
    try:
        yield
    finally:
        _set(before, wanted)


def _set(wanted: int, before: int) -> None:
    import torch

    from distcheck.machine import compat  # imports torch, which the front end must not

    if wanted == before:
        return
    torch.set_default_dtype(getattr(torch, _DEFAULT_DTYPES[wanted % len(_DEFAULT_DTYPES)]))
    mkldnn: Any = torch.backends.mkldnn
    with compat.flags_may_change():
        mkldnn.enabled = not wanted & _MKLDNN_OFF
    if wanted >> _THREADS_AT != before >> _THREADS_AT:
        torch.set_num_threads((wanted >> _THREADS_AT) % _MOST_THREADS + 1)
    if (wanted ^ before) & _DENORMALS_FLUSHED:
        torch.set_flush_denormal(bool(wanted & _DENORMALS_FLUSHED))


def _compute_float32_in_float32() -> None:
    """Disable reduced precision in float32 operations. TensorFloat-32 keeps 10 bits of each factor
    and bfloat16 keeps 7, so no bound for float32 would hold.

    torch has two interfaces for this setting, and reading the older one raises if they disagree.
    Set in this order, they agree whatever was set before.
    """
    import torch

    backends: Any = torch.backends
    libraries = (backends.cudnn, backends.mkldnn)
    kinds = [getattr(x, name, None) for x in libraries for name in ("matmul", "conv", "rnn")]
    for kind in (backends, backends.cuda.matmul, *libraries, *filter(None, kinds)):
        kind.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    backends.cuda.matmul.allow_tf32 = False


def pin_default_dtype(dtype: str) -> None:
    """Make code that names no dtype (`torch.empty(p.grad.size())`) use float64 in a float64 case,
    as in a script that sets torch's default dtype. Called before code under test is loaded, and in
    every reference.

    Models are always built in float32 (`Ingredients.model`). For lower-precision dtypes, scripts
    cast the model and do not change the default.
    """
    import torch

    torch.set_default_dtype(torch.float64 if dtype == "float64" else torch.float32)


def describe_settings() -> dict[str, Any]:
    """Return, for the report, the current settings that affect results bitwise."""
    import torch

    return {
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
