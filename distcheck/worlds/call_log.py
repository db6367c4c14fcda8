"""A rank's latest calls, in memory that it shares with the front: they can be read after a library
has aborted the process, as gloo does where a message is of another size than a call expects.

Calls of C++ code (DDP's over gloo) are not in it.
"""

import contextlib
import mmap
import os
import struct

import msgspec

from distcheck.records.posted_calls import Posted

_SLOTS = 32
_SLOT_BYTES = 2048  # a call that does not fit, as of hundreds of tensors, is left out
_HEADER = struct.Struct("<IQ")  # the length, and the how many-th call it is
_OFFSET = 1 << 20  # whole pages, in the file that faulthandler writes stacks to, from its beginning
_WITHIN = _SLOTS * _SLOT_BYTES  # where it says whether the main thread is within a call
_BYTES = _WITHIN + _SLOT_BYTES


class Logged(msgspec.Struct, frozen=True, array_like=True):
    """A call that a rank was about to make, and the ranks of its group by their places. Its number
    is that among the collectives, or among the messages of its kind with one peer and tag.
    """

    ranks: tuple[int, ...]
    call: Posted


class CallLog:
    """The rank's end."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _OFFSET + _BYTES)
        self._memory = mmap.mmap(fd, _BYTES, offset=_OFFSET)
        self._encoder = msgspec.msgpack.Encoder()
        self._count = 0

    def write(self, ranks: tuple[int, ...], call: Posted) -> None:
        data = self._encoder.encode(Logged(ranks, call))
        if len(data) <= _SLOT_BYTES - _HEADER.size:
            start = self._count % _SLOTS * _SLOT_BYTES
            self._count += 1
            whole = _HEADER.pack(len(data), self._count) + data
            self._memory[start : start + len(whole)] = whole

    def within_call(self, yes: bool) -> None:
        """Logs whether the rank is within a call: a library may end the process there, or raise and
        leave memory behind that a later line ends in.
        """
        self._memory[_WITHIN] = yes


def is_within_call(fd: int) -> bool:
    """Whether a rank was within a call when it last logged that."""
    with contextlib.suppress(OSError):
        return os.pread(fd, 1, _OFFSET + _WITHIN) == b"\1"
    return False


def logged(fd: int) -> list[Logged]:
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
                    found.append((count, msgspec.msgpack.decode(whole, type=Logged)))
    return [one for _, one in sorted(found, key=lambda one: one[0])]
