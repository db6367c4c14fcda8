"""A GPU that is not there: the CPU's tensors, some of which say that they are on cuda:0.

Everything is computed by the CPU. A storage is either the host's or the GPU's, and what a program
would be refused on a machine with a GPU is refused here: an operation on tensors of both, a NumPy
array or an address of what is on the GPU, random numbers there from the host's generator, and
gloo's sending from there. So code for GPUs is run where there is none; how a GPU computes, streams,
NCCL, and whatever C++ decides by device (DDP's buckets, FSDP) are not shown by it.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CUDA = torch.device("cuda", 0)
_TENSOR: Any = torch.Tensor
_DEVICE, _IS_CUDA = _TENSOR.device.__get__, _TENSOR.is_cuda.__get__
# What takes tensors of both: copies, and indices that are moved by themselves.
_MOVES = {"aten::copy_", "aten::_to_copy", "aten::set_"}
_INDEXES = {
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_",
                                 "_unsafe_index")
}  # fmt: skip


class RefusedError(RuntimeError):
    """What a GPU would not do."""


class _Memory:
    """Which storages are the GPU's; they are kept, so that no address comes twice."""

    def __init__(self) -> None:
        self._own: dict[int, Any] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(parts := _dense(tensor)) and _key(parts[0]) in self._own

    def take(self, tensor: torch.Tensor) -> None:
        for part in _dense(tensor):
            self._own[_key(part)] = part.untyped_storage()

    def give_back(self, tensor: torch.Tensor) -> None:
        for part in _dense(tensor):
            self._own.pop(_key(part), None)


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.strided:
        return [tensor]
    with torch._C._DisableTorchDispatch():
        return [tensor._values(), tensor._indices()] if tensor.is_sparse else []


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


class _Operations(TorchDispatchMode):
    """Below autograd: every operation, with what it is given and what it makes."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [self._memory.holds(tensor) for tensor in given]
        if "c10d" in func.namespace:
            if any(there) and any(word in str(func) for word in ("send", "recv")):
                raise RefusedError(f"writev: Bad address ({func})")
            return func(*args, **kwargs)
        name = func._schema.name
        self._check(func, name, given, there)
        before = {_key(part) for tensor in given for part in _dense(tensor)}
        made = func(*args, **kwargs)
        # Single numbers go anywhere, and decide only where there is nothing else.
        deciding = [t for tensor, t in zip(given, there, strict=True) if tensor.dim() > 0] or there
        on_gpu = there[0] if there and name in _MOVES | _INDEXES else any(deciding)
        for tensor in tree_leaves(made):
            if on_gpu and isinstance(tensor, torch.Tensor):
                new = any(_key(part) not in before for part in _dense(tensor))
                if new:
                    self._memory.take(tensor)
        return made

    def _check(self, func: Any, name: str, given: list[torch.Tensor], there: list[bool]) -> None:
        if not any(there) or all(there) or name in _MOVES | _INDEXES:
            return
        shapes = [
            ("cuda" if t else "cpu", tuple(tensor.shape))
            for tensor, t in zip(given, there, strict=True)
        ]
        host = [tensor for tensor, t in zip(given, there, strict=True) if not t]
        if any(tensor.dim() > 0 for tensor in host) or (name.endswith("_") and not there[0]):
            raise RefusedError(f"Expected all tensors to be on the same device: {func} {shapes}")


class _Functions(TorchFunctionMode):
    """Above autograd: what a tensor says of itself, and what moves or makes one."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _DEVICE:
            return _CUDA if self._memory.holds(args[0]) else func(*args)
        if func == _IS_CUDA:
            return self._memory.holds(args[0])
        if func is _TENSOR.get_device:
            return 0 if self._memory.holds(args[0]) else -1
        if func in (_TENSOR.numpy, _TENSOR.__array__, _TENSOR.data_ptr):
            if self._memory.holds(args[0]):
                raise TypeError(f"can't convert a cuda:0 tensor: {func.__name__}")
        elif func is _TENSOR.cpu:
            return self._move(args[0], gpu=False)
        elif func is _TENSOR.cuda:
            return self._move(args[0], gpu=True)
        elif func is _TENSOR.to:
            return self._to(func, args, kwargs)
        elif func == _TENSOR.backward:
            return self._backward(*args, **kwargs)
        elif kwargs.get("device") is not None and _is_gpu(kwargs["device"]):
            return self._make(func, args, {**kwargs, "device": None})
        return func(*args, **kwargs)

    def _backward(
        self, tensor: torch.Tensor, gradient: Any = None, *more: Any, **kwargs: Any
    ) -> Any:
        with self:
            return torch.autograd.backward(tensor, gradient, *more, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.Generator or kwargs.get("generator") is not None:
            raise RefusedError("Expected a 'cuda' device type for generator but found 'cpu'")
        made = func(*args, **kwargs)
        if not self._memory.holds(made):
            made = made.clone() if made._is_view() else made
            self._memory.take(made)
        return made

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        tensor, gpu, rest = args[0], None, []
        for value in args[1:]:
            if isinstance(value, torch.device | str):
                gpu = _is_gpu(value)
            elif isinstance(value, torch.Tensor):
                gpu = self._memory.holds(value)
                rest.append(value.dtype)
            elif isinstance(value, torch.dtype):
                rest.append(value)
        device = kwargs.pop("device", None)
        gpu = gpu if device is None else _is_gpu(device)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        tensor = func(tensor, *rest, **kwargs) if rest or kwargs else tensor
        return tensor if gpu is None else self._move(tensor, gpu=gpu)

    def _move(self, tensor: torch.Tensor, *, gpu: bool) -> torch.Tensor:
        if self._memory.holds(tensor) == gpu:
            return tensor
        moved = tensor.clone()  # where the tensor was
        (self._memory.take if gpu else self._memory.give_back)(moved)
        return moved


class _Default(TorchFunctionMode):
    """What is made without a device, where the GPU is torch's default one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = _CUDA
        return func(*args, **kwargs)


_pretending: list[Any] = []


def pretend() -> None:
    """Begins, in this process and for good."""
    if _pretending:
        return
    memory = _Memory()
    _pretending.extend([memory, _Operations(memory), _Functions(memory)])
    _patch_modules(memory)
    _patch_cuda()
    for mode in _pretending[1:]:
        mode.__enter__()


def _patch_modules(memory: _Memory) -> None:
    """A module keeps its parameters when it moves: their storages become the GPU's."""
    really_to: Callable[..., nn.Module] = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device = kwargs.pop("device", None)
        rest = []
        for value in args:
            if isinstance(value, torch.device | str):
                device = value
            else:
                rest.append(value)
        if rest or kwargs:
            really_to(self, *rest, **kwargs)
        if device is not None and _is_gpu(device):
            for tensor in (*self.parameters(), *self.buffers()):
                memory.take(tensor)
        return self

    nn.Module.to = to  # type: ignore[method-assign, assignment]


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    state = [torch.zeros(16, dtype=torch.uint8)]

    def set_state(new: torch.Tensor, device: Any = "cuda") -> None:
        assert new.dtype == torch.uint8
        assert new.shape == state[0].shape
        state[0] = new.clone()

    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    # AdamW asks whether a graph is being captured.
    torch.accelerator.current_stream = lambda *_: SimpleNamespace(is_capturing=lambda: False)
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda._lazy_init = lambda: None
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.get_device_name = lambda device=None: "pretended"
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.mem_get_info = lambda device=None: (8 << 30, 8 << 30)
    cuda.max_memory_reserved = cuda.memory_reserved = lambda device=None: 1 << 30
    cuda.get_rng_state = lambda device="cuda": state[0].clone()
    cuda.set_rng_state = set_state
    really_set = torch.set_default_device

    def set_default(device: Any) -> None:
        if device is not None and _is_gpu(device):
            _pretending.append(_Default())
            _pretending[-1].__enter__()
        else:
            really_set(device)

    torch.set_default_device = set_default
    torch.get_default_device = lambda: (
        _CUDA if isinstance(_pretending[-1], _Default) else torch.device("cpu")
    )
