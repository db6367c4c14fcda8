"""Tensors of a training script: leaves of batches, names of parameters, digests, random streams."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from distcheck.job.recording import MOST_ROWS, digest
from distcheck.machine.shared_tensors import raw_bytes

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """A parameter's name without those of wrappers around its module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; one that is divided among the ranks is put together, which is a
    collective of all of them.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.cpu().contiguous()


def digest_of(tensor: torch.Tensor) -> str:
    """A digest of the bits; `tensor` is on the CPU and contiguous. Not by numpy(): a storage that
    it has seen cannot be resized any more, as the script may want to.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    return digest(raw_bytes(plain))


def any_held(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some parameter has a gradient that is not zero; of one that is divided among ranks,
    this rank's part.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient._values()  # type: ignore[no-untyped-call]
        plain = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if bool(plain.any()):
            return True
    return False


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """The absolute values of the elements, of complex ones those of both parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).abs()


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of a batch, or of arguments, in a fixed order."""
    return list(_leaves(value))


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def replace_leaves(value: Any, take: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with other tensors; `take` is asked in the order of `leaves`."""
    if isinstance(value, torch.Tensor):
        return take(value)
    if isinstance(value, Mapping):
        replaced = {key: replace_leaves(item, take) for key, item in value.items()}
        return replaced if type(value) is dict else type(value)(replaced)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replace_leaves(item, take) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(replace_leaves(item, take) for item in value)
    return value


def rows_of(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    """A digest of each sample: the rows of all tensors that have as many as the first one."""
    batched = [t for t in tensors if t.dim() > 0 and t.shape[0] == tensors[0].shape[0]]
    if not batched or tensors[0].dim() == 0:
        return ()
    plain = [t.detach().cpu().contiguous() for t in batched]
    count = min(len(plain[0]), MOST_ROWS)
    return tuple(digest("".join(digest_of(t[i]) for t in plain).encode()) for i in range(count))


def random_digests() -> dict[str, str]:
    """The random streams of this process: torch's, Python's, and NumPy's where it is loaded."""
    found = {
        "torch": digest_of(torch.get_rng_state()),
        "python": digest(repr(random.getstate()).encode()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        found["numpy"] = digest(repr(numpy.random.get_state(legacy=False)).encode())
    if _uses_gpu():
        found["cuda"] = digest_of(torch.cuda.get_rng_state())
    return found


def random_state() -> torch.Tensor:
    """The states of torch's generators: the CPU's, and behind it the GPU's where one is used."""
    states = [torch.get_rng_state()]
    if _uses_gpu():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def set_random_state(state: torch.Tensor) -> None:
    """Puts such states back."""
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())
    if len(state) > size:
        torch.cuda.set_rng_state(state[size:].clone())


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
