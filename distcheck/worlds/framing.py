"""How messages travel: msgpack in frames of known length, through pipes and sockets."""

import os
import socket
import struct
from collections.abc import Iterable
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")
_MOST_FDS = 32
_MOST_BYTES = 1 << 28  # of a message; what claims to be longer is none

_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages of the union `kind`."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes. Raises msgspec.DecodeError for anything else."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _MOST_BYTES:
                raise msgspec.DecodeError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages

    def decode(self, body: bytes) -> Any:
        """One message. Raises msgspec.DecodeError."""
        try:
            return self._decode(body)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error


class Line:
    """One end of a connection, at which messages of the union `kind` arrive.

    What may wait does so for as long as the socket's own timeout says.
    """

    receive_bytes = 1 << 16  # at once

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._connection = connection
        self._frames = Frames(kind)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: msgspec.Struct, fds: Iterable[int] = ()) -> None:
        """Sends one message; descriptors travel with its first byte. Raises OSError where the other
        end cannot be reached.
        """
        data, given = frame(message), list(fds)
        sent = socket.send_fds(self._connection, [data[:1]], given) if given else 0
        self._connection.sendall(data[sent:])

    def receive(self) -> list[Any]:
        """The messages that have arrived. Raises EOFError at the end, OSError where the connection
        broke, and msgspec.DecodeError for anything else.
        """
        try:
            data = self._connection.recv(self.receive_bytes)
        except (BlockingIOError, TimeoutError):
            return []
        if not data:
            raise EOFError
        return self._frames.feed(data)

    def next(self) -> tuple[Any, list[int]]:
        """Waits for one whole message, with its descriptors; not together with `receive`. Raises as
        that does. For what a process hears of its own front, which may be of any length.
        """
        first, fds, _, _ = socket.recv_fds(self._connection, 1, _MOST_FDS)
        if not first:
            raise EOFError
        (length,) = _LENGTH.unpack(first + self._exactly(_LENGTH.size - 1))
        return self._frames.decode(self._exactly(length)), fds

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def write_all(fd: int, data: bytes) -> None:
    """Writes everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
