"""A rank's latest calls, in memory that it shares with the front: they can be read after a library
has aborted the process, as gloo does where a message is of another size than a call expects.

Calls of C++ code (DDP's over gloo) are not in it.
"""

import contextlib
import functools
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

_SLOTS = 32
_SLOT_BYTES = 2048  # a call that does not fit, as of hundreds of tensors, is left out
_HEADER = struct.Struct("<IQ")  # the length, and the how many-th call it is
_OFFSET = 1 << 20  # whole pages, in the file that faulthandler writes stacks to, from its beginning
_WITHIN = _SLOTS * _SLOT_BYTES  # where it says whether the main thread is within a call
_BYTES = _WITHIN + _SLOT_BYTES
Sizes = Sequence[tuple[int, ...]]
Tensors = Sequence[Any]
# The tensors of each operation among its arguments: what the rank gives, and what it gets where
# that must be known as well.
TENSORS: dict[str, Callable[[Any], tuple[Tensors, Tensors]]] = {
    "allreduce": lambda given: (given[0], ()),
    "allreduce_coalesced": lambda given: (given[0], ()),
    "broadcast": lambda given: (given[0], ()),
    "reduce": lambda given: (given[0], ()),
    "allgather": lambda given: (given[1], ()),
    "_allgather_base": lambda given: (given[1:2], ()),
    "all_gather_single": lambda given: (given[1:2], ()),
    "gather": lambda given: (given[1], ()),
    "gather_single": lambda given: (given[1:2], ()),
    "scatter": lambda given: (given[1][0] if given[1] else (), given[0]),
    "reduce_scatter": lambda given: (given[1][0], ()),
    "_reduce_scatter_base": lambda given: (given[1:2], ()),
    "reduce_scatter_single": lambda given: (given[1:2], ()),
    "alltoall": lambda given: (given[1], given[0]),
    "alltoall_base": lambda given: (given[1:2], given[0:1]),
    "all_to_all_single": lambda given: (given[1:2], given[0:1]),
    "barrier": lambda given: ((), ()),
}


class LoggedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that a rank was about to make. `number` is that among the collectives, or among the
    messages of its kind with one peer and tag; `root` and `peer` are places among the `ranks` of
    the group, `splits` rows that are sent and received.
    """

    kind: str
    name: str
    group: str
    ranks: tuple[int, ...]
    number: int
    place: str
    dtype: str
    input_sizes: Sizes
    output_sizes: Sizes = ()
    op: str = ""
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    splits: tuple[tuple[int, ...], ...] = ()


class CallLog:
    """The rank's end."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _OFFSET + _BYTES)
        self._memory = mmap.mmap(fd, _BYTES, offset=_OFFSET)
        self._encoder = msgspec.msgpack.Encoder()
        self._count = 0

    def collective(self, given: Tensors, got: Tensors, **about: Any) -> None:
        """Logs a collective of tensors that the rank gives and gets; `about` are the other fields
        of a LoggedCall.
        """
        named = [*given, *got][:1]
        self.write(
            LoggedCall(
                dtype=dtype_name(named[0].dtype) if named else "",
                input_sizes=[tuple(tensor.shape) for tensor in given],
                output_sizes=[tuple(tensor.shape) for tensor in got] if got else (),
                **about,
            )
        )

    def message(self, *, kind: str, shape: tuple[int, ...], **about: Any) -> None:
        """Logs a send or a receive."""
        self.write(LoggedCall(kind=kind, name=kind, input_sizes=[shape], **about))

    def within_call(self, yes: bool) -> None:
        """Logs whether the rank is within a call: a library may end the process there, or raise and
        leave memory behind that a later line ends in.
        """
        self._memory[_WITHIN] = yes

    def write(self, call: LoggedCall) -> None:
        """Notes a call in place of the oldest one."""
        data = self._encoder.encode(call)
        if len(data) <= _SLOT_BYTES - _HEADER.size:
            start = self._count % _SLOTS * _SLOT_BYTES
            self._count += 1
            whole = _HEADER.pack(len(data), self._count) + data
            self._memory[start : start + len(whole)] = whole


@functools.cache
def dtype_name(given: Any) -> str:
    """The name of a dtype of torch's: "float32"."""
    return str(given).removeprefix("torch.")


def is_within_call(fd: int) -> bool:
    """Whether a rank was within a call when it last logged that."""
    with contextlib.suppress(OSError):
        return os.pread(fd, 1, _OFFSET + _WITHIN) == b"\1"
    return False


def logged(fd: int) -> list[LoggedCall]:
    """The calls in a file that a rank logs to, oldest first. What is not one is left out: any code
    may run in the rank, and it may have ended while it wrote.
    """
    found = []
    with contextlib.suppress(OSError):
        for slot in range(_SLOTS):
            data = os.pread(fd, _SLOT_BYTES, _OFFSET + slot * _SLOT_BYTES)
            with contextlib.suppress(struct.error, msgspec.MsgspecError, UnicodeDecodeError):
                length, count = _HEADER.unpack_from(data)
                if length:
                    whole = data[_HEADER.size : _HEADER.size + length]
                    found.append((count, msgspec.msgpack.decode(whole, type=LoggedCall)))
    return [call for _, call in sorted(found, key=lambda one: one[0])]
