"""What front, helper and children say to each other: msgpack in frames of known length.

front -> helper    Spawn (with the child's file descriptors), Signal
helper -> front    Ready, Spawned, Exited
child -> front     Progress, Said, Done, Raised, Stacks, over a pipe of the child's own
"""

import os
import socket
import struct
import time
from typing import Any

import msgspec

from distcheck.records import Collective

_LENGTH = struct.Struct("<I")
LOADING = "load"  # the phase in which a rank imports strategy and workload
_MOST_FDS = 32
_MOST_BYTES = 1 << 28  # of a message; what claims to be longer is none


class Spawn(msgspec.Struct, tag=True):
    """Fork a child that calls `target` ("module:function") with `payload`.

    The message carries file descriptors: events, output, stacks, release, dump, then the job's
    own, then those whose numbers go into the variables `fd_names`. `path`, `cwd` and `env` are the
    front's. `imports` are distcheck's own modules that other children needed: the helper imports
    them first, once for all.
    """

    key: int
    target: str
    payload: bytes
    cwd: str
    path: list[str]
    env: dict[str, str]
    fd_names: list[str] = []
    imports: list[str] = []


class Signal(msgspec.Struct, tag=True):
    """Send a signal to a child, if it is still there."""

    key: int
    signal: int


class Ready(msgspec.Struct, tag=True):
    """The helper has imported what its children need; or says why it could not."""

    torch_version: str
    error: str = ""


class Spawned(msgspec.Struct, tag=True):
    """A child was forked; or not, and why."""

    key: int
    pid: int
    error: str = ""


class Exited(msgspec.Struct, tag=True):
    """A child is gone: its exit code, or the signal that killed it."""

    key: int
    code: int | None
    signal: int | None


class Progress(msgspec.Struct, tag=True):
    """A child entered a phase of a step."""

    step: int
    phase: str


class Said(msgspec.Struct, tag=True):
    """A child tells the front something that only its own job understands."""

    payload: bytes


class Done(msgspec.Struct, tag=True):
    """A child's job returned. `imported` are the modules of distcheck that it had to import."""

    payload: bytes
    imported: list[str] = []


class Raised(msgspec.Struct, tag=True):
    """A child's job raised. `at` is the monotonic clock, which all processes share.

    `exit_code` is set for errors that are meant for a person (`DistcheckError`), and `defect`
    is the whole traceback where no code but that of distcheck and its libraries is in it.
    """

    kind: str
    message: str
    traceback: str
    at: float
    exit_code: int | None = None
    collective: str = ""
    collectives: tuple[Collective, ...] = ()
    defect: str = ""


class Stacks(msgspec.Struct, tag=True):
    """What a child was doing when it was asked: Python stacks, and its last collective."""

    text: str
    collective: str
    collectives: tuple[Collective, ...] = ()


Request = Spawn | Signal
Notice = Ready | Spawned | Exited
Event = Progress | Said | Done | Raised | Stacks

_encode = msgspec.msgpack.Encoder().encode


def garbled() -> Raised:
    """What stands for the end of a child that can no longer be understood."""
    text = (
        "distcheck's own pipe holds something that it did not write: the code wrote to a "
        "descriptor that it had not opened"
    )
    return Raised("ProtocolError", text, text, time.monotonic())


def text_of(error: BaseException) -> str:
    """What an exception says, or that it cannot."""
    try:
        return str(error)
    except Exception as another:  # theirs
        return f"(its text cannot be had: {type(another).__name__})"


def printable(text: str) -> str:
    """Text without lone surrogates, which can be sent and written nowhere."""
    return text.encode(errors="backslashreplace").decode()


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length in front."""
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
            try:
                messages.append(self._decode(bytes(self._buffer[_LENGTH.size : end])))
            except (UnicodeDecodeError, RecursionError) as error:
                raise msgspec.DecodeError(str(error)) from error
            del self._buffer[:end]
        return messages


def write_all(fd: int, data: bytes) -> None:
    """Writes everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def send_with_fds(connection: socket.socket, message: msgspec.Struct, fds: list[int]) -> None:
    """Sends one message; the descriptors travel with its first byte."""
    data = frame(message)
    sent = socket.send_fds(connection, [data[:1]], fds)
    connection.sendall(data[sent:])


def receive_with_fds(connection: socket.socket, kind: Any) -> tuple[Any, list[int]]:
    """Receives one whole message and its descriptors. Raises EOFError at the end."""
    first, fds, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
    header = first + _exactly(connection, _LENGTH.size - 1) if first else b""
    if not header:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    return msgspec.msgpack.decode(_exactly(connection, length), type=kind), fds


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
