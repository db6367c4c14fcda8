"""Mutual authentication of the processes of one run by a shared secret.

The secret is the first of these that exists:

 DISTCHECK_SECRET       its value, of at least 32 characters; the launcher passes it to all
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
third process. Messages are not encrypted.

All runs of a user have one secret, so a third process could connect an end of one run to an end of
another. Therefore every HMAC also covers the run (`RunSecret`): its purpose, its name, and the
destination of the connection as each end's own kernel reports it. Both ends of a direct connection
see the same destination, however they spell the address, while a relay listens elsewhere.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from distcheck import private
from distcheck.errors import CannotRunError

VARIABLE, FILE_VARIABLE = "DISTCHECK_SECRET", "DISTCHECK_SECRET_FILE"
GREETING = b"distcheck/6\n"
CHALLENGE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
ADVICE = (
    f"start every process as the same user with the same home folder, or set the same {VARIABLE} "
    "for all of them; pass them the same file:// path; if an address translation leads to rank 0, "
    "set DISTCHECK_LISTEN_ADDR there"
)
# Heuristic: every listener receives an HMAC that can confirm guesses of the secret.
_LEAST_CHARACTERS = 32
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
            f"{name} has {len(text)} characters; a secret needs at least {_LEAST_CHARACTERS} "
            "random ones, such as those of `openssl rand -hex 32`"
        )
    return text.encode(errors="surrogateescape")


def private_name(name: str, secret: bytes) -> str:
    """Return a socket name derived from `name` that only processes with the secret can compute."""
    return f"{name}-{hmac.new(secret, name.encode(), hashlib.sha256).hexdigest()[:32]}"


@dataclass(frozen=True)
class RunSecret:
    """The user's secret, restricted to one run: its `purpose` ("verify" or "job"), and a name that
    all processes of the `run` have (`Launch.key_name`, `RankRecord.run`).
    """

    secret: bytes
    purpose: str
    run: str = ""

    def of(self, destination: str) -> bytes:
        """Return the key for connections of this run to a destination."""
        covered = ascii((self.purpose, self.run, destination)).encode()
        return hmac.digest(self.secret, b"run\0" + covered, "sha256")

    def of_accepted(
        self, connection: socket.socket, translated: Collection[str] = ()
    ) -> set[bytes]:
        """Return the keys that the peer of an accepted connection may have. `translated` are the
        destinations that an address translation changes into this one.
        """
        own, peer = connection.getsockname(), connection.getpeername()
        return {self.of(place) for place in (_destination(own, peer), *translated)}


def _destination(to: Any, source: Any) -> str:
    """Return the destination of a connection between two socket addresses. Addresses that several
    machines may have are completed with this machine: loopback, and an address that connects to
    itself.
    """
    if not isinstance(to, tuple):  # of a Unix socket
        return os.fsdecode(to)
    host, other = numeric_address(to[0]), numeric_address(source[0])
    place = spelled(str(host), to[1])
    return f"{place} {_this_machine()}" if host.is_loopback or host == other else place


def numeric_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a socket, in one form for IPv4 over IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def spelled(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _this_machine() -> str:
    """Return a name of this machine's network, which all processes that can reach each other by
    loopback share.
    """
    boot = ""
    with contextlib.suppress(OSError):  # hidden by some containers
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    about = os.stat("/proc/self/ns/net")
    return f"{boot} {about.st_dev} {about.st_ino}"


def challenge() -> bytes:
    """Return the front end's greeting, with a new challenge."""
    return GREETING + secrets.token_bytes(CHALLENGE_BYTES)


class Keys(NamedTuple):
    """Keys that sign the messages of one end of a connection, and those of its peer."""

    own: bytes
    peer: bytes


def answer_is_right(sent: bytes, answer: bytes, secret: bytes) -> bool:
    """Return True if a peer's answer to the challenge `sent` proves that the peer has
    the secret.
    """
    wanted = _proof(b"host", sent, answer, secret)
    return hmac.compare_digest(answer[CHALLENGE_BYTES:], wanted)


def proof_of_front(sent: bytes, answer: bytes, secret: bytes) -> bytes:
    """Return the front end's proof for an agent whose answer was right."""
    return _proof(b"front", sent, answer, secret)


def keys_of_front(sent: bytes, answer: bytes, secret: bytes) -> Keys:
    """Return the keys of the front end's end of a connection."""
    return Keys(*(_proof(role, sent, answer, secret) for role in (b"by front", b"by host")))


def prove(connection: socket.socket, run: RunSecret, *, timeout_s: float) -> Keys:
    """Authenticate as the agent that has made the connection, and return the keys of later
    messages. Raises ConnectionError if the peer does not have the secret, OSError if it has not
    sent its part within `timeout_s` seconds.
    """
    secret = run.of(_destination(connection.getpeername(), connection.getsockname()))
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
    """Return True if the process at the other end of a local connection belongs to this user.
    Return True for network connections, whose owner is unknown.
    """
    if connection.family != socket.AF_UNIX:
        return True
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(data)[1]) == os.geteuid()
