"""Tensors of a training script: leaves of batches, names of parameters, digests, random streams."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from distcheck import private
from distcheck.machine import compat
from distcheck.machine.compat import WRAPPERS
from distcheck.machine.seeds import LIBRARY_STATES_BYTES, library_states, set_library_states
from distcheck.machine.shared_tensors import raw_bytes
from distcheck.recordings.jobs.records import MOST_ROWS, Shard, digest

_PLAIN = (str, bytes, int, float, complex, type(None))
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEEPEST = 8  # containers within containers


def plain_name(name: str) -> str:
    """A parameter's name without those of wrappers around its module."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; one that is divided among the ranks is put together, which is a
    collective of all of them.
    """
    tensor = tensor.detach()
    if is_in_parts(tensor):
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return tensor.cpu().contiguous()


def held(tensor: torch.Tensor) -> torch.Tensor:
    """The same, of a tensor that is divided among the ranks what this one has."""
    tensor = tensor.detach()
    if is_in_parts(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    return tensor.cpu().contiguous()


def part_of(tensor: torch.Tensor) -> Shard | None:
    """What this rank has of a tensor that is divided among ranks. Raises ValueError where that is
    another thing than a box of it, or a term of a sum.
    """
    if not is_in_parts(tensor):
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
        raise ValueError(f"parts that are put together by {', '.join(sorted(kinds))}")
    return Shard(
        shape=tuple(tensor.shape),
        at=compat.part_in(tensor),
        of=tuple(mesh.mesh[whole].flatten().tolist()),
        adds=tuple(mesh.mesh[terms].flatten().tolist()) if kinds else (),
        mean=kinds == {"avg"},
    )


def write(found: Mapping[str, torch.Tensor], file: Path) -> None:
    """Writes a new file of tensors, which is there when it is whole."""
    with private.drafted(file) as draft:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, draft)


def taken_from(file: Path) -> dict[str, torch.Tensor] | None:
    """The tensors of a file, which is removed; None where there is none."""
    if not file.exists():
        return None
    found = load_file(file)
    file.unlink()
    return found


def is_in_parts(tensor: torch.Tensor) -> bool:
    """Whether this rank may hold a part of it (a DTensor)."""
    return hasattr(tensor, "full_tensor")


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
            gradient = gradient.coalesce().values()
        plain = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if bool(plain.any()):
            return True
    return False


def not_finite(found: Mapping[str, torch.Tensor]) -> list[str]:
    numbers = {n: t for n, t in found.items() if t.is_floating_point() or t.is_complex()}
    return [name for name, one in numbers.items() if not _is_finite(one.detach())]


def _is_finite(tensor: torch.Tensor) -> bool:
    """By the least and the largest element, one of which is NaN where any is: isfinite() makes a
    tensor of answers, and takes 20 times as long.
    """
    if type(tensor) is not torch.Tensor or tensor.dtype not in _FLOATS or not tensor.numel():
        return bool(tensor.isfinite().all())
    return all(math.isfinite(one) for one in torch.aminmax(tensor))


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """The absolute values of the elements, of complex ones those of both parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).abs()


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of a batch, or of arguments, in a fixed order: in containers, and in objects that
    are made of them (data classes, batches of libraries).
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
    """The tensors among a model's arguments that are data, and not computed by a graph."""
    return [t for t in leaves(value) if t.grad_fn is None and not is_parameter(t)]


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def put(tensor: torch.Tensor, given: torch.Tensor) -> None:
    """Makes a tensor hold other data, of any shape, for all code that has the tensor. What it was a
    view of stays as it is.
    """
    with torch.no_grad():
        tensor.data = given.to(device=tensor.device, dtype=tensor.dtype).clone()


def rows_of(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    """A digest of each sample: the rows of all tensors that have as many as the first one."""
    batched = [t for t in tensors if t.dim() > 0 and t.shape[0] == tensors[0].shape[0]]
    if not batched or tensors[0].dim() == 0:
        return ()
    plain = [t.detach().cpu().contiguous() for t in batched]
    count = min(len(plain[0]), MOST_ROWS)
    return tuple(digest("".join(digest_of(t[i]) for t in plain).encode()) for i in range(count))


def has_drawn(before: torch.Tensor | None, now: torch.Tensor) -> bool:
    """Whether random numbers were drawn between two states of torch's stream."""
    return before is not None and not torch.equal(before, now)


def random_state() -> torch.Tensor:
    """The random streams of this process: torch's, Python's, NumPy's where it is loaded, and the
    GPU's where one is used.
    """
    libraries = library_states().ljust(LIBRARY_STATES_BYTES, b"\0")
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
    states, half = library_states(), LIBRARY_STATES_BYTES // 2
    for name, state in (("python", states[:half]), ("numpy", states[half:])):
        if state:
            found[name] = digest(state)
    if _uses_gpu():
        found["cuda"] = digest_of(torch.cuda.get_rng_state())
    return found


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
