"""Digests of tensors, each computed on the tensor's device.

On the CPU this is xxh3. Elsewhere it is a tree of sums: the tensor is read as words of at most 32
bits, each block of 65,536 words is multiplied by random odd 64-bit numbers and added modulo 2^64,
and the sums are digested in the same way. Two different tensors have equal sums with probability at
most 2^-31 at each level (Dietzfelbinger et al., "A Reliable Randomized Algorithm for the
Closest-Pair Problem", section 2: multiplication modulo 2^64 is universal in its upper 32 bits).
"""

import functools
from collections.abc import Sequence

import torch
import xxhash

from distcheck.machine.shared_tensors import raw_bytes

_BLOCK = 1 << 16  # words per sum
_ROWS = 64  # sums at once: 32 MiB of products
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a signed 64-bit digest of each tensor; synchronizes with the device once."""
    found: list[int | torch.Tensor] = [_digest(tensor) for tensor in tensors]
    apart = [one for one in found if isinstance(one, torch.Tensor)]
    known = iter(torch.stack(apart).cpu().tolist() if apart else ())
    return [next(known) if isinstance(one, torch.Tensor) else one for one in found]


def combined(parts: Sequence[int | str]) -> int:
    """Return one signed 64-bit digest of several numbers and names; 0 for none."""
    return as_signed_int64(xxhash.xxh3_64_intdigest(repr(tuple(parts)).encode())) if parts else 0


def as_signed_int64(number: int) -> int:
    """Convert an unsigned 64-bit number to the range of int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _digest(tensor: torch.Tensor) -> int | torch.Tensor:
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    plain = plain.contiguous().reshape(-1)
    if plain.device.type == "cpu":
        # Not by numpy(): afterwards a storage cannot be resized, as FSDP2 does.
        return as_signed_int64(xxhash.xxh3_64_intdigest(raw_bytes(plain))) if plain.numel() else 0
    return sum_tree_on_device(plain)


def sum_tree_on_device(plain: torch.Tensor) -> torch.Tensor:
    """Return the tree of sums of a contiguous tensor, as an int64 tensor on its device."""
    if plain.dtype == torch.bool:
        plain = plain.view(torch.uint8)
    words, level = plain.view(_WORDS[plain.element_size()]), 0
    while words.numel() > _BLOCK:
        words, level = _sums(words, level).view(torch.int32), level + 1
    return _sum_rows(words.reshape(1, -1), level)[0]


def _sums(words: torch.Tensor, level: int) -> torch.Tensor:
    whole = words.numel() // _BLOCK
    rows = words[: whole * _BLOCK].reshape(whole, _BLOCK)
    parts = [_sum_rows(rows[at : at + _ROWS], level) for at in range(0, whole, _ROWS)]
    if words.numel() % _BLOCK:
        parts.append(_sum_rows(words[whole * _BLOCK :].reshape(1, -1), level))
    return torch.cat(parts)


def _sum_rows(rows: torch.Tensor, level: int) -> torch.Tensor:
    odd = _multipliers(level, str(rows.device))[: rows.shape[1]]
    return (rows.to(torch.int64) * odd).sum(1)


@functools.lru_cache(maxsize=32)
def _multipliers(level: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(level)
    low, high = -(2**63), 2**63 - 1
    drawn = torch.randint(low, high, (_BLOCK,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)
