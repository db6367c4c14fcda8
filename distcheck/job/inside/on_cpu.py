"""Stand-in for GPUs: a script that requests CUDA trains on the CPU, over gloo.

Devices are replaced in torch calls (a `TorchFunctionMode`), and in the few functions of
`torch.cuda` and `torch.distributed` that scripts call. Behavior specific to GPUs (kernels, TF32,
NCCL's summation order) is not covered.
"""

import contextlib
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from distcheck.machine import compat

_NOTHING = (
    "set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "manual_seed", "manual_seed_all", "seed", "seed_all", "init",
    "set_rng_state", "set_rng_state_all", "set_per_process_memory_fraction",
)  # fmt: skip
_ZERO = (
    "current_device", "memory_allocated", "max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "memory_cached", "max_memory_cached", "utilization", "memory_usage",
)  # fmt: skip
_TYPES = (
    "Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool",
)  # fmt: skip
_NO_GRAPHS = (
    "--on-cpu: CUDA graphs that the script captures cannot run on a CPU; disable them for this run"
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CPU = torch.device("cpu")
_MEMORY = 16 << 30  # of a GPU, for scripts that size batches by it


class _Devices(TorchFunctionMode):
    """Replaces a GPU by the CPU in every torch call that names one."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *(_cpu_for_gpu(one) for one in args[1:]))
        elif func is torch.Tensor.type:
            args = tuple(_cpu_type_name(one) for one in args)
        else:
            args = tuple(_CPU if _is_gpu(one) else one for one in args)
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_gpu(kwargs["device"])
        kwargs.pop("pin_memory", None) if kwargs.get("pin_memory") else None
        return func(*args, **kwargs)


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _cpu_for_gpu(value: Any) -> Any:
    """Return the CPU for any designation of a GPU; other values unchanged."""
    is_named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return _CPU if is_named or is_number or _is_gpu(value) else value


def _cpu_type_name(value: Any) -> Any:
    return value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value


class _Stream:
    """A stream or event whose work is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: 0.0 if name == "elapsed_time" else None

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True


def install(gpus: int) -> None:
    """Install the stand-in before the script's code runs; once per process. It reports `gpus` GPUs
    or, if that is 0, as many as there are local ranks or visible devices.
    """
    seen = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    _replace_cuda(gpus or int(os.environ.get("LOCAL_WORLD_SIZE") or max(2, seen)))
    _replace_accelerator()
    _replace_autocast()
    _replace_wrappers()
    _replace_loaders()
    for name in ("set_default_device", "set_default_tensor_type"):
        setattr(torch, name, _with_cpu_device(getattr(torch, name)))
    load = torch.load

    @functools.wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        if "map_location" in kwargs or len(args) < 2:
            kwargs["map_location"] = "cpu"
        else:
            args = (args[0], "cpu", *args[2:])
        return load(*args, **kwargs)

    torch.load = loading
    if dist.is_available():
        _replace_groups()
    devices: Any = _Devices()
    devices.__enter__()


def _replace_cuda(gpus: int) -> None:
    cuda: Any = torch.cuda
    before = dict(vars(cuda))
    for name in _NOTHING:
        setattr(cuda, name, lambda *_, **__: None)
    for name in _ZERO:
        setattr(cuda, name, lambda *_, **__: 0)
    about = SimpleNamespace(
        name="CPU", total_memory=_MEMORY, major=8, minor=0, multi_processor_count=1
    )
    cuda.is_available = lambda: True
    cuda.device_count = lambda: gpus
    cuda.get_device_name = lambda *_, **__: "CPU"
    cuda.get_device_capability = lambda *_, **__: (8, 0)
    cuda.get_device_properties = lambda *_, **__: about
    cuda.mem_get_info = lambda *_, **__: (_MEMORY, _MEMORY)
    cuda.is_current_stream_capturing = lambda: False
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    cuda.get_rng_state_all = list
    cuda.Stream = cuda.Event = cuda.ExternalStream = _Stream
    for name in ("current_stream", "default_stream", "stream"):  # torch.compile keys by function
        setattr(cuda, name, lambda *_, **__: _Stream())
    cuda.device = cuda.device_of = lambda *_, **__: contextlib.nullcontext()
    for name in _TYPES:
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    cuda.memory_stats = lambda *_, **__: defaultdict(int)
    cuda.memory_summary = lambda *_, **__: ""
    cuda.memory_snapshot = lambda *_, **__: []
    cuda.make_graphed_callables = lambda callables, *_, **__: callables
    cuda.CUDAGraph = cuda.graph = _refuse_graphs
    for name in ("range_push", "range_pop", "mark", "range"):
        setattr(cuda.nvtx, name, lambda *_, **__: contextlib.nullcontext())
    # Also where they are defined, since libraries call torch.cuda.random.get_rng_state.
    modules = [one for one in before.values() if isinstance(one, ModuleType)]
    for module in [one for one in modules if one.__name__.startswith("torch.cuda.")]:
        for name, defined in list(vars(module).items()):
            if name in before and before[name] is defined is not getattr(cuda, name):
                setattr(module, name, getattr(cuda, name))


def _refuse_graphs(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(_NO_GRAPHS)


def _replace_accelerator() -> None:
    """Make torch.accelerator report the same devices to the script as torch.cuda. torch itself sees
    none.
    """
    accelerator: Any = torch.accelerator
    answers: dict[str, tuple[Any, Any]] = {
        "current_accelerator": (None, torch.device("cuda")),
        "is_available": (False, True),
        "device_count": (0, torch.cuda.device_count()),
        "current_device_index": (0, 0),
        "current_stream": (None, _Stream()),
    }
    for name, (own, theirs) in answers.items():

        def answer(*_: Any, own: Any = own, theirs: Any = theirs, **__: Any) -> Any:
            file = sys._getframe(1).f_code.co_filename
            return own if file.startswith(_TORCH) else theirs

        setattr(accelerator, name, answer)
    for name in ("synchronize", "set_device_index", "set_device_idx", "set_stream", "empty_cache"):
        setattr(accelerator, name, lambda *_, **__: None)


def _with_cpu_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes a device or type, so that it receives the CPU's."""

    @functools.wraps(original)
    def call(given: Any = None) -> Any:
        return original(_cpu_type_name(_cpu_for_gpu(given)))

    return call


def _replace_loaders() -> None:
    """Disable pinned memory. Loaders pin memory in a thread, which the replacement of devices does
    not cover.
    """
    loader = torch.utils.data.DataLoader
    begin = loader.__init__

    @functools.wraps(begin)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.pin_memory = False

    loader.__init__ = init  # type: ignore[method-assign]


def _replace_autocast() -> None:
    begin = torch.autocast.__init__

    @functools.wraps(begin)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        begin(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    own: Any = torch.cuda.amp.autocast

    @functools.wraps(own.__init__)
    def of_cuda(
        self: Any, enabled: bool = True, dtype: Any = torch.float16, cache_enabled: bool = True
    ) -> None:
        begin(self, "cpu", dtype, enabled, cache_enabled)

    own.__init__ = of_cuda


def _replace_wrappers() -> None:
    several = torch.nn.DataParallel

    def of_one(self: Any, module: Any, *_: Any, **__: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.device_ids = module, []

    several.__init__ = of_one  # type: ignore[method-assign]
    setattr(torch.nn.SyncBatchNorm, "forward", _normalize)  # noqa: B010
    wrapper = torch.nn.parallel.DistributedDataParallel
    begin = wrapper.__init__

    @functools.wraps(begin)
    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None,
             *args: Any, **kwargs: Any) -> None:  # fmt: skip
        begin(self, module, None, None, *args, **kwargs)

    wrapper.__init__ = init  # type: ignore[method-assign]
    # It rejects a SyncBatchNorm on a CPU.
    compat.CHECK_SYNC_BATCHNORM.replace(lambda _: lambda *_: None)


class _Summed(torch.autograd.Function):
    """The sum over ranks. Its backward computes the sum of the ranks' gradients."""

    @staticmethod
    def forward(context: Any, given: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        total = given.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=context.group)
        return total, None


def _normalize(self: Any, given: torch.Tensor) -> torch.Tensor:
    """Compute SyncBatchNorm with statistics over the batches of all ranks. (torch has it only for
    GPUs.)
    """
    group = self.process_group or dist.group.WORLD
    if not self.training or dist.get_world_size(group) == 1:
        return compat.BatchNorm.forward(self, given)
    dtype, given = given.dtype, given.float() if given.itemsize < 4 else given  # as on a GPU
    axes = [axis for axis in range(given.dim()) if axis != 1]
    count = given.new_full((1,), given.numel() / given.shape[1])
    sums = torch.cat([given.sum(axes), given.square().sum(axes), count])
    total, squares, number = _Summed.apply(sums, group).split([*[given.shape[1]] * 2, 1])
    mean, shape = total / number, [1, -1, *[1] * (given.dim() - 2)]
    variance = squares / number - mean.square()
    if self.track_running_stats and self.running_mean is not None:
        self.num_batches_tracked += 1
        by = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance.detach() * number / (number - 1)
        self.running_mean.lerp_(mean.detach(), by)
        self.running_var.lerp_(unbiased, by)
    out: torch.Tensor = (given - mean.view(shape)) * (variance.view(shape) + self.eps).rsqrt()
    out = out * self.weight.view(shape) + self.bias.view(shape) if self.affine else out
    return out.to(dtype)


def _replace_groups() -> None:
    begin, subgroup = dist.init_process_group, dist.new_group
    from torch.distributed import device_mesh

    mesh = device_mesh.init_device_mesh

    @functools.wraps(begin)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        begin("gloo" if _is_nccl(backend) else backend, *args, **kwargs)

    @functools.wraps(subgroup)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if _is_nccl(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        return subgroup(*args, **kwargs)

    wait = dist.barrier

    @functools.wraps(wait)
    def barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return wait(*args, **kwargs)

    @functools.wraps(mesh)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        setattr(module, "init_process_group", init_process_group)  # noqa: B010
        setattr(module, "new_group", new_group)  # noqa: B010
        setattr(module, "barrier", barrier)  # noqa: B010
    for module in (dist, device_mesh):
        setattr(module, "init_device_mesh", init_device_mesh)  # noqa: B010


def _is_nccl(backend: Any) -> bool:
    return backend is None or "nccl" in str(backend).lower()
