"""Frames messages for pipes and sockets: msgpack with a length prefix."""

import os
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")
_MOST_FDS = 32
MOST_BYTES = 1 << 28  # of a message; a longer length is invalid

_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct, sign: Callable[[bytes], bytes] = bytes) -> bytes:
    """Return the encoded form of a message. `sign` returns the body with a signature."""
    body = sign(_encode(message))
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits a stream of bytes into messages of the union `kind`."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Append `data` and return the messages that are complete with it. Raises
        msgspec.DecodeError.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MOST_BYTES:
                raise msgspec.DecodeError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages

    def decode(self, body: bytes) -> Any:
        try:
            return self._decode(body)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error


class Line:
    """One end of a connection that receives messages of the union `kind`. Blocking calls obey the
    timeout of the socket.
    """

    receive_bytes = 1 << 16  # at once
    most_bytes = 1 << 32  # of a message for `next`; more cannot be announced

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._connection = connection
        self._frames = Frames(kind)
        self._sign: Callable[[bytes], bytes] = bytes

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: msgspec.Struct, fds: Iterable[int] = ()) -> None:
        """Send one message; the descriptors travel with its first byte. Raises OSError if the peer
        has gone.
        """
        data, given = frame(message, self._sign), list(fds)
        sent = socket.send_fds(self._connection, [data[:1]], given) if given else 0
        self._connection.sendall(data[sent:])

    def receive(self) -> list[Any]:
        """Return the messages that have arrived. Raises EOFError if the peer has closed the
        connection, OSError if the connection broke, and msgspec.DecodeError for invalid data.
        """
        try:
            data = self._connection.recv(self.receive_bytes)
        except (BlockingIOError, TimeoutError):
            return []
        if not data:
            raise EOFError
        return self._frames.feed(data)

    def next(self) -> tuple[Any, list[int]]:
        """Wait for one complete message and its descriptors. Raises the same errors as `receive`.

        Do not call both methods on one connection, because `receive` keeps a buffer. Messages from
        a process's own front end may be longer than for `receive`.
        """
        first, fds, _, _ = socket.recv_fds(self._connection, 1, _MOST_FDS)
        if not first:
            raise EOFError
        (length,) = _LENGTH.unpack(first + self._receive_exactly(_LENGTH.size - 1))
        if length > self.most_bytes:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        return self._frames.decode(self._receive_exactly(length)), fds

    def close(self) -> None:
        self._connection.close()

    def _receive_exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
