"""Helpers for a script's tensors: leaves of batches, parameter names, digests, RNG states."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from distcheck import private
from distcheck.machine import compat
from distcheck.machine.compat import WRAPPERS
from distcheck.machine.seeds import LIBRARY_STATES_BYTES, library_rng_states, set_library_states
from distcheck.machine.shared_tensors import raw_bytes
from distcheck.recordings.jobs.records import MOST_ROWS, Shard, digest

_PLAIN = (str, bytes, int, float, complex, type(None))
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEEPEST = 8  # nesting depth of containers


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unsharded_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU; unshard a DTensor, which is a collective call."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return tensor.cpu().contiguous()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's shard of a tensor, or the whole tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_shard_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU; for a DTensor, this rank's shard."""
    return local(tensor.detach()).cpu().contiguous()


def plain_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return `local_shard_on_cpu` in strided layout; None if the tensor has no memory, such as a
    tensor under torch.func.
    """
    try:
        own = local(tensor.detach())
        own.data_ptr()
        return own.to_dense().cpu().contiguous() if own.layout != torch.strided else own.cpu()
    except RuntimeError:
        return None


def describe_shard(tensor: torch.Tensor) -> Shard | None:
    """Describe this rank's shard of a DTensor; None for others. Raises ValueError for a shard that
    is neither a box of the tensor nor a term of a sum.
    """
    if not is_dtensor(tensor):
        return None
    given: Any = tensor
    mesh, places = given.device_mesh, given.placements
    own = mesh.get_coordinate()
    pairs = [*zip(places, own, strict=True)]
    terms = tuple(slice(None) if one.is_partial() else here for one, here in pairs)
    fixed = [one.is_partial() or one.is_replicate() for one in places]
    whole = tuple(here if f else slice(None) for f, (_, here) in zip(fixed, pairs, strict=True))
    kinds = {one.reduce_op for one in places if one.is_partial()}
    if kinds - {"sum", "avg"} or len(kinds) > 1:
        raise ValueError(f"shards that are combined by {', '.join(sorted(kinds))}")
    return Shard(
        shape=tuple(tensor.shape),
        at=compat.shard_offset(tensor),
        of=tuple(mesh.mesh[whole].flatten().tolist()),
        adds=tuple(mesh.mesh[terms].flatten().tolist()) if kinds else (),
        mean=kinds == {"avg"},
    )


def write(found: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write tensors to a new file that appears atomically."""
    with private.replaced_atomically(file) as draft:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, draft)


def pop_tensors(file: Path) -> dict[str, torch.Tensor] | None:
    """Read and remove a file of tensors; None if it does not exist."""
    if not file.exists():
        return None
    found = load_file(file)
    file.unlink()
    return found


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor, of which this rank may hold a shard."""
    return hasattr(tensor, "full_tensor")


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of the bits of a contiguous CPU tensor. numpy() is not used, because the
    script could not resize the storage afterwards.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    return digest(raw_bytes(plain))


def has_nonzero_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if a parameter has a nonzero gradient. For a sharded parameter, only the local
    shard is examined.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        plain = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if bool(plain.any()):
            return True
    return False


def not_finite(found: Mapping[str, torch.Tensor]) -> list[str]:
    numbers = {n: t for n, t in found.items() if t.is_floating_point() or t.is_complex()}
    return [name for name, one in numbers.items() if not _is_finite(one.detach())]


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all elements are finite. Computed from the minimum and maximum, which
    propagate NaN, because isfinite() allocates a mask and takes 20 times as long.
    """
    if type(tensor) is not torch.Tensor or tensor.dtype not in _FLOATS or not tensor.numel():
        return bool(tensor.isfinite().all())
    return all(math.isfinite(one) for one in torch.aminmax(tensor))


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Return absolute values; for complex tensors, of real and imaginary parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).abs()


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch or of arguments, in a fixed order, from containers, data
    classes and batch objects of libraries.
    """
    return list(_leaves(value, set()))


def _leaves(value: Any, above: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, _PLAIN) or id(value) in above or len(above) > _DEEPEST:
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type | Callable):  # type: ignore[arg-type]
        items = vars(value).values()
    for item in list(items):
        yield from _leaves(item, above | {id(value)})


def inputs_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors among a model's arguments that are data, and not results of an autograd
    graph.
    """
    return [t for t in leaves(value) if t.grad_fn is None and not is_parameter(t)]


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def replace_data(tensor: torch.Tensor, given: torch.Tensor) -> None:
    """Replace the data of a tensor, also by data of another shape, for all code that holds the
    tensor. The tensor of which it is a view does not change.
    """
    with torch.no_grad():
        tensor.data = given.to(device=tensor.device, dtype=tensor.dtype).clone()


def digests_of_samples(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    """Return a digest of each sample: the digest of its rows in all tensors whose batch size is
    that of the first.
    """
    batched = [t for t in tensors if t.dim() > 0 and t.shape[0] == tensors[0].shape[0]]
    if not batched or tensors[0].dim() == 0:
        return ()
    plain = [t.detach().cpu().contiguous() for t in batched]
    count = min(len(plain[0]), MOST_ROWS)
    return tuple(digest("".join(digest_of(t[i]) for t in plain).encode()) for i in range(count))


def has_drawn(before: torch.Tensor | None, now: torch.Tensor) -> bool:
    """Return True if torch's RNG was used between two states."""
    return before is not None and not torch.equal(before, now)


def random_state() -> torch.Tensor:
    """Return the RNG states of this process: torch, Python, NumPy if loaded, and CUDA if used."""
    libraries = library_rng_states().ljust(LIBRARY_STATES_BYTES, b"\0")
    states = [torch.get_rng_state(), torch.frombuffer(bytearray(libraries), dtype=torch.uint8)]
    if _uses_gpu():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def set_random_state(state: torch.Tensor) -> None:
    end = len(torch.get_rng_state())
    torch.set_rng_state(state[:end].clone())
    libraries = bytes(state[end : end + LIBRARY_STATES_BYTES].tolist())
    half = LIBRARY_STATES_BYTES // 2
    set_library_states(libraries if any(libraries[half:]) else libraries[:half])
    if len(state) > end + LIBRARY_STATES_BYTES and _uses_gpu():
        torch.cuda.set_rng_state(state[end + LIBRARY_STATES_BYTES :].clone())


def random_digests() -> dict[str, str]:
    found = {"torch": digest_of(torch.get_rng_state())}
    states, half = library_rng_states(), LIBRARY_STATES_BYTES // 2
    for name, state in (("python", states[:half]), ("numpy", states[half:])):
        if state:
            found[name] = digest(state)
    if _uses_gpu():
        found["cuda"] = digest_of(torch.cuda.get_rng_state())
    return found


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
