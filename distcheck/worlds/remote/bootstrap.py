"""Connects processes that were started together: one listens, the others connect.

The schemes are those of `launchers.Launch.meeting`. Both ends prove that they have the run's secret
(`secret.py`) before any message; on one machine, both must belong to one user. All addresses come
from `address_of`, which rejects those that no function of Python's could handle.
"""

import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil

from distcheck import private
from distcheck.errors import CannotRunError
from distcheck.records.decoding import read_bounded
from distcheck.worlds.jobs import Descriptors, Job, Reporter
from distcheck.worlds.remote import protocol, secret

LISTEN = "DISTCHECK_LISTEN_ADDR"
_RETRY_S = 0.1
_MOST_BYTES = 1 << 10  # of an address
_MOST_SHOWN = 100  # characters of an invalid one

Finder = Callable[[], tuple[str, int] | str | None]  # an address, an abstract socket, or not yet


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Publish rank 0's address under `key` in the TCPStore at host:port or, if `value` is empty,
    wait for it. `size_key` holds the number of ranks with which the run was first started.
    """

    host: str
    port: int
    key: str
    value: str
    size_key: str
    size: int
    deadline_s: float


class PublishedAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The published address, and the number of ranks with which the run was first started."""

    value: str
    first_size: int


THROUGH_STORE = Job(
    "distcheck.worlds.remote.bootstrap:through_store", StoreRequest, PublishedAddress
)


@THROUGH_STORE.does
def through_store(job: StoreRequest, fds: Descriptors, reporter: Reporter) -> PublishedAddress:
    """Exchange rank 0's address through the launcher's store. It is a job because only torch can
    access the store. Raises CannotRunError.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=job.deadline_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            job.host, job.port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        first = store.compare_set(job.size_key, "", str(job.size))
        if job.value:
            store.set(job.key, job.value)
        value = store.get(job.key)
        return PublishedAddress(value=value.decode(), first_size=int(first))
    except (RuntimeError, ValueError) as error:  # torch's DistError; other users can write there
        last = str(error).strip().splitlines()[0]
        raise CannotRunError(
            f"the launcher's store at {job.host}:{job.port} did not respond correctly within "
            f"{job.deadline_s:g} s: {last}"
        ) from None


def address_of(meeting: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT or store://HOST:PORT. Raises CannotRunError."""
    _, _, place = meeting.partition("://")
    host, _, port = place.rpartition(":")
    if not _is_host(host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise CannotRunError(
            f"{meeting[:_MOST_SHOWN]!r} is not a rendezvous address; expected tcp://HOST:PORT with "
            "a valid name and a port from 1 to 65535"
        )
    return host.strip("[]"), int(port)


def _is_host(text: str) -> bool:
    """Return True if a text can be looked up as the name of a host."""
    with contextlib.suppress(UnicodeError):
        return text.isprintable() and bool(text.encode("idna"))
    return False


def address_in(file: Path) -> tuple[str, int] | None:
    """Return the host and port that rank 0 has written to a file; None until it has
    written them.
    """
    try:
        text = read_bounded(file, _MOST_BYTES).decode()
        return address_of(f"tcp://{text.strip()}")
    except (OSError, CannotRunError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine, or at that of `LISTEN`. Raises CannotRunError."""
    named, host = host, os.environ.get(LISTEN) or host
    family, place = _look_up(host, port)
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(place)
        server.listen(1024)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise CannotRunError(
                f"rank 0 cannot listen at {host}: it is not an address of this machine; pass a "
                f"local address as the master's, or set {LISTEN} to the address to listen on (if "
                f"{named} is routed here)"
            ) from None
        raise CannotRunError(
            f"rank 0 cannot listen at {host}:{port}: {error.strerror}; another program may use "
            "the port; pass a different one with --master-port or MASTER_PORT"
        ) from None
    return server


def _look_up(host: str, port: int) -> tuple[int, Any]:
    """Return family and address of a host. Raises CannotRunError."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, ValueError) as error:  # ValueError: `LISTEN` may be anything
        raise CannotRunError(f"the master's address {host!r} is unknown: {error}") from None
    return family, place


def place_of(server: socket.socket) -> str:
    """Return the address of a socket in the format of `address_of`. For a wildcard address, it has
    the machine's name.
    """
    host, port = server.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # the user asked for all interfaces
        host = socket.gethostname()
    return secret.spelled(host, port)


def translated_to(server: socket.socket, meeting: str) -> set[str]:
    """Return the destinations of connections that an address translation leads to `server`, if the
    user declares one by `LISTEN`. They were made to the `meeting`, or to a published address.
    """
    if not os.environ.get(LISTEN) or server.family == socket.AF_UNIX:
        return set()
    place = meeting if meeting.startswith("tcp://") else f"tcp://{place_of(server)}"
    host, port = address_of(place)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {secret.spelled(str(secret.numeric_address(str(one[4][0]))), port) for one in found}


def listen_on_own() -> socket.socket:
    """Listen at an address of this machine if no launcher has defined one: that of the network
    interface that ranks should use, else that of the machine's name, else loopback.
    """
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    found = [
        str(one.address)
        for one in psutil.net_if_addrs().get(wanted, [])
        if one.family == socket.AF_INET
    ]
    for host in (*found, socket.gethostname()):
        with contextlib.suppress(CannotRunError):
            return listen(host, 0)
    return listen("127.0.0.1", 0)


def listen_on_way_to(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine. If the address belongs to another machine, listen at
    the local end of the route to it.
    """
    try:
        return listen(host, 0)
    except CannotRunError:
        family, place = _look_up(host, port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(place)
            own = str(probe.getsockname()[0])
        return listen(own, 0)


def listen_here(name: str) -> socket.socket:
    """Listen on an abstract socket of this machine, without a file. Raises CannotRunError."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(f"\0{name}")
        server.listen(1024)
    except OSError as error:
        server.close()
        raise CannotRunError(f"rank 0 cannot listen at {name}: {error.strerror}") from None
    return server


@contextlib.contextmanager
def publish_address_in_file(path: str, place: str) -> Iterator[None]:
    """Publish rank 0's address in a file until the end of the block. Raises CannotRunError."""
    target = Path(path)
    try:
        private.write(target, place)
    except OSError as error:
        raise CannotRunError(f"{path} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            target.unlink()


def connect(find: Finder, run: secret.RunSecret, *, deadline_s: float) -> protocol.Connection:
    """Connect to the address that `find` returns for rank 0 (None: not known yet) and authenticate,
    retrying until the deadline. Raises CannotRunError.
    """
    deadline = time.monotonic() + deadline_s
    reason, place = "its address is not known yet", None
    while True:
        place = find() or place
        if place is not None:
            left = max(deadline - time.monotonic(), _RETRY_S)
            try:
                return _connect_once(place, run, left)
            except OSError as error:
                reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            spelled = place if isinstance(place, str | None) else f"{place[0]}:{place[1]}"
            where = f" at {spelled}" if spelled else ""
            raise CannotRunError(
                f"rank 0{where} could not be reached within {deadline_s:g} s ({reason}); check "
                "that it is running and that the address is right, or raise --deadline"
            )
        time.sleep(_RETRY_S)


def _connect_once(
    place: tuple[str, int] | str, run: secret.RunSecret, timeout_s: float
) -> protocol.Connection:
    if isinstance(place, str):
        connection = socket.socket(socket.AF_UNIX)
    else:
        connection = socket.create_connection(place, timeout=timeout_s)
    try:
        connection.settimeout(timeout_s)
        if isinstance(place, str):
            connection.connect(f"\0{place}")
        if not secret.is_own_peer(connection):
            raise ConnectionError("another user's process listens there")
        keys = secret.prove(connection, run, timeout_s=timeout_s)
    except OSError:
        connection.close()
        raise
    return protocol.Connection(connection, protocol.FromFront, keys, patience_s=timeout_s)
