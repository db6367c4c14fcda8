"""Log of a rank's latest calls in memory that it shares with the front end. The log remains
readable after a library has aborted the process: gloo aborts if a message differs in size from the
tensor that receives it. Calls made by C++ code (DDP over gloo) are not recorded.
"""

import contextlib
import mmap
import os
import struct

import msgspec

from distcheck.records.posted_calls import PostedCall

_SLOTS = 32
_SLOT_BYTES = 2048  # longer calls, such as those with hundreds of tensors, are left out
_HEADER = struct.Struct("<IQ")  # the length, and the sequence number of the call
_OFFSET = 1 << 20  # whole pages after the start of the file, to which faulthandler writes stacks
_WITHIN = _SLOTS * _SLOT_BYTES  # flag: the main thread is within a call
_BYTES = _WITHIN + _SLOT_BYTES


class LoggedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that a rank was about to make, and the ranks of its group in group order. `number` is
    the position of the call among the group's collectives, or among the messages of the same kind,
    peer and tag.
    """

    ranks: tuple[int, ...]
    call: PostedCall


class CallLog:
    """Writes the log, in the rank."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _OFFSET + _BYTES)
        self._memory = mmap.mmap(fd, _BYTES, offset=_OFFSET)
        self._encoder = msgspec.msgpack.Encoder()
        self._count = 0

    def write(self, ranks: tuple[int, ...], call: PostedCall) -> None:
        data = self._encoder.encode(LoggedCall(ranks, call))
        if len(data) <= _SLOT_BYTES - _HEADER.size:
            start = self._count % _SLOTS * _SLOT_BYTES
            self._count += 1
            whole = _HEADER.pack(len(data), self._count) + data
            self._memory[start : start + len(whole)] = whole

    def within_call(self, yes: bool) -> None:
        """Record whether the rank is within a call. A library may abort the process there, or raise
        and leave corrupted memory that crashes a later line.
        """
        self._memory[_WITHIN] = yes


def is_within_call(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.pread(fd, 1, _OFFSET + _WITHIN) == b"\1"
    return False


def read_logged_calls(fd: int) -> list[LoggedCall]:
    """Return the calls in a rank's log, oldest first. Invalid records are skipped, because any code
    may run in the rank, and the rank may have died while writing.
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
    return [one for _, one in sorted(found, key=lambda one: one[0])]
