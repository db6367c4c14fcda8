"""Traces in files: one safetensors file per slot.

    index.bin             headers and tables, as in memory
    slot-N.safetensors    gradients of step N and the state before it, as rank/kind/name

A trace without tensors has the index, but no slot files. A tensor that several ranks share is
stored once, under the rank that holds it. complex32 and complex128, which safetensors lacks, are
stored as pairs of real numbers.
"""

import errno
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import safetensors
import torch
import xxhash
from safetensors.torch import load_file, save_file

from distcheck import private
from distcheck.errors import CannotRunError, UsageError
from distcheck.machine.shared_tensors import raw_bytes, write_at
from distcheck.recordings.recording import EntrySource, EntryState, Kind
from distcheck.recordings.traces import seal
from distcheck.recordings.traces.layout import ENTRY, TraceLayout
from distcheck.recordings.traces.reader import TraceReader
from distcheck.recordings.traces.seal import LOAD, SAVE, TRACES, TraceFilesRequest
from distcheck.records import TensorSpec
from distcheck.records.decoding import read_bounded
from distcheck.worlds.jobs import Descriptors, Reporter

_IN_PAIRS = (torch.complex32, torch.complex128)
# Exceptions of damaged files, or of an edited about.json.
_DAMAGE = (
    OSError, safetensors.SafetensorError, LookupError, ValueError, RuntimeError, TypeError,
    ArithmeticError, AttributeError, struct.error, msgspec.MsgspecError,
)  # fmt: skip


@SAVE.does
def save_job(job: TraceFilesRequest, fds: Descriptors, reporter: Reporter) -> tuple[str, ...]:
    """Write the traces to run-1 and run-2; return the indexes' digests. Raises CannotRunError."""
    indexes = []
    try:
        for number, fd in _numbered_traces(fds):
            folder = Path(job.folder, f"run-{number}")
            private.folder(folder, is_new=True)
            reporter.progress(number, "save")
            indexes.append(_save(folder, job.layout, fd, tensors=job.tensors))
    except safetensors.SafetensorError as error:  # it wraps the system's error in a text
        full = os.strerror(errno.ENOSPC)
        raise CannotRunError(full if full in str(error) else str(error)) from error
    except OSError as error:
        raise CannotRunError(error.strerror or str(error)) from error
    return tuple(indexes)


@LOAD.does
def load_job(job: TraceFilesRequest, fds: Descriptors, reporter: Reporter) -> None:
    """Load the traces from folders run-1 and run-2. Raises UsageError."""
    for (number, fd), digest in zip(_numbered_traces(fds), job.indexes, strict=True):
        folder = Path(job.folder, f"run-{number}")
        reporter.progress(number, "load")
        try:
            _load(folder, job.layout, fd, digest, tensors=job.tensors)
        except _DAMAGE as error:
            raise UsageError(f"the trace in {folder} is damaged: {error}") from error


def _numbered_traces(fds: Descriptors) -> list[tuple[int, int]]:
    return [(number, fds[name]) for number, name in enumerate(TRACES, 1) if name in fds]


def _save(folder: Path, layout: TraceLayout, fd: int, *, tensors: bool = True) -> str:
    """Write one trace, and return the digest of its index."""
    index = os.pread(fd, layout.index_bytes, 0)
    private.write(folder / "index.bin", index)
    trace = TraceReader(fd, layout)
    for slot in range(layout.steps + 1 if tensors else 0):
        held: dict[str, torch.Tensor] = {}
        for rank, kind, number, spec in _stored_tensors(layout, index, slot):
            tensor = trace.own_tensor(rank, kind, slot, number)
            assert tensor is not None, "the table says that it is stored"
            in_pairs = tensor.dtype in _IN_PAIRS
            held[_key(rank, kind, spec)] = torch.view_as_real(tensor) if in_pairs else tensor
        with private.replaced_atomically(folder / f"slot-{slot:03}.safetensors") as draft:
            save_file(held, draft)
    return seal.digest(index)


def _load(folder: Path, layout: TraceLayout, fd: int, digest: str, *, tensors: bool = True) -> None:
    index = read_bounded(folder / "index.bin", layout.index_bytes)
    if seal.digest(index) != digest:
        raise ValueError("index.bin does not have the checksum in checksums.json")
    if len(index) != layout.index_bytes:
        raise ValueError(f"index.bin has {len(index)} bytes, not {layout.index_bytes}")
    os.ftruncate(fd, layout.total_bytes)
    write_at(fd, memoryview(index), 0)
    for slot in range(layout.steps + 1 if tensors else 0):
        file = folder / f"slot-{slot:03}.safetensors"
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe may never be written
            raise ValueError(f"{file.name} is not a regular file")
        held = load_file(file)
        for rank, kind, number, spec in _stored_tensors(layout, index, slot):
            tensor = held[_key(rank, kind, spec)].contiguous()
            if getattr(torch, spec.dtype) in _IN_PAIRS:
                tensor = torch.view_as_complex(tensor)
            found = (tuple(tensor.shape), str(tensor.dtype))
            if found != (spec.shape, f"torch.{spec.dtype}"):
                raise ValueError(f"{_key(rank, kind, spec)} is {found[1]} of shape {found[0]}")
            data = raw_bytes(tensor)
            at = layout.entry_offset(rank, kind, slot, number)
            if xxhash.xxh3_128_digest(data) != ENTRY.unpack_from(index, at)[0]:
                raise ValueError(f"{_key(rank, kind, spec)} differs from the recording of its rank")
            write_at(fd, data, layout.data_offset(rank, kind, slot, number))


def _stored_tensors(
    layout: TraceLayout, index: bytes, slot: int
) -> Iterator[tuple[int, Kind, int, TensorSpec]]:
    for rank in range(layout.world):
        for kind in Kind:
            if slot >= layout.slots(kind):
                continue
            for number, spec in enumerate(layout.specs(kind)):
                at = layout.entry_offset(rank, kind, slot, number)
                _, state, source, holder, _ = ENTRY.unpack_from(index, at)
                if (state, source, holder) == (EntryState.STORED, EntrySource.OWN, rank):
                    yield rank, kind, number, spec


def _key(rank: int, kind: Kind, spec: TensorSpec) -> str:
    return f"rank{rank}/{kind.name.lower()}/{spec.name}"
