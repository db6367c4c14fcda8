"""Mutual authentication of the processes of one run by a shared secret.

The secret is the first of these that exists:

 DISTCHECK_SECRET       its value, of at least 16 characters; the launcher passes it to all
                        processes
 DISTCHECK_SECRET_FILE  a file with the secret, readable only by its owner
 ~/.config/distcheck/secret
                        created at the first use, with mode 0600; machines that share a home
                        folder share it

Without a writable home folder, a private folder of the user in the temporary directory replaces it;
that is sufficient on one machine.

Each end sends a fresh random challenge and answers the other's with an HMAC over both, so the
secret itself is never sent and an answer cannot be replayed. Every later message is signed with a
key that depends on both challenges, because the handshake of two honest ends may pass through a
third process. If the front end has published its address where others can change it, the HMACs
cover that address, so that no other address can be relayed. Messages are not encrypted.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from distcheck import private
from distcheck.errors import CannotRunError

VARIABLE, FILE_VARIABLE = "DISTCHECK_SECRET", "DISTCHECK_SECRET_FILE"
GREETING = b"distcheck/4\n"
CHALLENGE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
ADVICE = (
    f"start every process as the same user with the same home folder, or set the same {VARIABLE} "
    "for all of them"
)
_LEAST_CHARACTERS = 16
_PEER = struct.Struct("3i")  # pid, uid, gid


def shared_secret() -> bytes:
    """Return this run's secret. Raises CannotRunError for one that other users may know."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return _long_enough(given, VARIABLE)
    file = os.environ.get(FILE_VARIABLE)
    if file is not None:
        return _long_enough(_read(Path(file)), f"{FILE_VARIABLE} {file}")
    temporary = Path(tempfile.gettempdir())
    folders = [temporary / f"distcheck-{os.getuid()}"]
    with contextlib.suppress(RuntimeError):  # no home folder
        folders.insert(0, Path.home() / ".config" / "distcheck")
    for folder in folders:
        with contextlib.suppress(OSError):
            return _long_enough(_kept(folder), str(folder / "secret"))
    raise CannotRunError(
        "no secret can be stored for the processes of this run: neither the home folder nor "
        f"{temporary} allows a private folder that no other user can write; set {VARIABLE}"
    )


def _kept(folder: Path) -> str:
    """Return the secret in a folder; the first of several processes creates it."""
    place = private.folder(folder, strictly=True) / "secret"
    if not place.exists():
        draft = folder / private.unique(".secret-")
        with private.new_file(draft) as file:
            file.write(secrets.token_hex(32).encode())
        try:
            with contextlib.suppress(FileExistsError):
                os.link(draft, place)
        finally:
            draft.unlink()
    return _read(place)


def _read(place: Path) -> str:
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would block
        with open(fd, errors="surrogateescape") as file:
            about = os.fstat(fd)
            if (
                not stat.S_ISREG(about.st_mode)
                or about.st_uid != os.getuid()
                or about.st_mode & 0o077
            ):
                raise CannotRunError(
                    f"{place} must be your own file that no other user can read; run chmod "
                    f"600 {place}, or set {VARIABLE}"
                )
            return file.read(4096).strip()
    except OSError as error:
        raise CannotRunError(f"{place} cannot be read: {error.strerror}") from None


def _long_enough(text: str, name: str) -> bytes:
    if len(text) < _LEAST_CHARACTERS:
        raise CannotRunError(
            f"{name} has {len(text)} characters; a secret needs at least {_LEAST_CHARACTERS}"
        )
    return text.encode(errors="surrogateescape")


def private_name(name: str, secret: bytes) -> str:
    """Return a socket name derived from `name` that only processes with the secret can compute."""
    return f"{name}-{hmac.new(secret, name.encode(), hashlib.sha256).hexdigest()[:32]}"


def challenge() -> bytes:
    """Return the front end's greeting, with a new challenge."""
    return GREETING + secrets.token_bytes(CHALLENGE_BYTES)


class Keys(NamedTuple):
    """Keys that sign the messages of one end of a connection, and those of its peer."""

    own: bytes
    peer: bytes


def answer_is_right(sent: bytes, answer: bytes, secret: bytes) -> bool:
    wanted = _proof(b"host", sent, answer, secret)
    return hmac.compare_digest(answer[CHALLENGE_BYTES:], wanted)


def proof_of_front(sent: bytes, answer: bytes, secret: bytes) -> bytes:
    """Return the front end's proof for an agent whose answer was right."""
    return _proof(b"front", sent, answer, secret)


def keys_of_front(sent: bytes, answer: bytes, secret: bytes) -> Keys:
    """Return the keys of the front end's end of a connection."""
    return Keys(*(_proof(role, sent, answer, secret) for role in (b"by front", b"by host")))


def for_address(secret: bytes, place: str) -> bytes:
    """Return the secret for a connection to an address that the front end has published."""
    return hmac.new(secret, b"address\0" + place.encode(), hashlib.sha256).digest()


def prove(connection: socket.socket, secret: bytes, *, timeout_s: float) -> Keys:
    """Authenticate as an agent, and return the keys of later messages. Raises ConnectionError if
    the peer does not have the secret, OSError if it has not sent its part within `timeout_s`
    seconds.
    """
    until = time.monotonic() + timeout_s
    sent = _receive_exactly(connection, len(GREETING) + CHALLENGE_BYTES, until)
    if not sent.startswith(GREETING):
        raise ConnectionError("the peer there is not this version of distcheck")
    own = secrets.token_bytes(CHALLENGE_BYTES)
    connection.sendall(own + _proof(b"host", sent, own, secret))
    proof = _receive_exactly(connection, PROOF_BYTES, until)
    if not hmac.compare_digest(proof, _proof(b"front", sent, own, secret)):
        raise ConnectionError(f"the peer there does not have this run's secret: {ADVICE}")
    return Keys(*reversed(keys_of_front(sent, own, secret)))


def _proof(role: bytes, sent: bytes, answer: bytes, secret: bytes) -> bytes:
    both = sent[len(GREETING) :] + answer[:CHALLENGE_BYTES]
    return hmac.new(secret, role + both, hashlib.sha256).digest()


class Signer:
    """Signs the messages of one end, or removes their signatures, in the order in which they are
    sent: a message cannot be changed, repeated or left out.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def sign(self, body: bytes) -> bytes:
        tag = hmac.digest(self._key, self._number.to_bytes(8, "little") + body, "sha256")
        self._number += 1
        return tag + body

    def verify(self, signed: bytes) -> bytes:
        """Return the body of a signed message. Raises msgspec.DecodeError."""
        body = signed[PROOF_BYTES:]
        if not hmac.compare_digest(self.sign(body), signed):
            raise msgspec.DecodeError("it is not signed by the peer")
        return body


def _receive_exactly(connection: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        left = until - time.monotonic()  # of the whole handshake: its bytes may come one by one
        if left <= 0:
            raise TimeoutError("it did not complete the handshake")
        connection.settimeout(left)
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError(
                f"it closed the connection, as it does for a different secret: {ADVICE}"
            )
        data += piece
    return data


def is_own_peer(connection: socket.socket) -> bool:
    """Return True if the peer of a connection on this machine belongs to this user. Network
    connections have no owner and return True.
    """
    if connection.family != socket.AF_UNIX:
        return True
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(data)[1]) == os.geteuid()
