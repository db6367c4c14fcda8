"""Authenticates incoming connections at the front end, concurrently.

An unauthenticated peer cannot delay the others, whether it sends nothing or arbitrary bytes. Its
connection is closed after `HANDSHAKE_S`. If more than `_MOST_WAITING` connections are
unauthenticated, the oldest connection from the address with the most connections is closed, so a
flood evicts only its own connections.
"""

import select
import socket
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from distcheck.worlds.remote import protocol, secret

HANDSHAKE_S = 5.0  # from accepting a connection to its first message
_MOST_WAITING = 256


@dataclass(eq=False)
class _Handshake:
    """A connection that is not authenticated yet. `line` is set once the peer has proved that it
    has the secret.
    """

    connection: socket.socket
    sent: bytes
    until: float
    address: str
    heard: bytes = b""
    line: protocol.Connection | None = None
    words: list[Any] = field(default_factory=list)

    def fileno(self) -> int:
        return self.connection.fileno()


class Handshakes:
    """All connections that are not authenticated yet; used until every rank has connected. Messages
    are of `kind`.
    """

    def __init__(
        self,
        server: socket.socket,
        run: secret.RunSecret,
        kind: Any = protocol.FromHost,
        *,
        translated: Collection[str] = (),
    ) -> None:
        self._server, self._run, self._kind = server, run, kind
        self._translated = translated
        self._waiting: list[_Handshake] = []
        self.refused = 0  # connections with a wrong answer to the challenge
        server.setblocking(False)

    def come(self, timeout_s: float) -> list[tuple[protocol.Connection, list[Any]]]:
        """Return peers that have joined: their connections and messages, `Joining` first."""
        watched = select.poll()
        watched.register(self._server, select.POLLIN)
        for handshake in self._waiting:
            watched.register(handshake, select.POLLIN)
        ready = {fd for fd, _ in watched.poll(timeout_s * 1000)}
        here = []
        for handshake in [one for one in self._waiting if one.fileno() in ready]:
            if self._goes_on(handshake):
                if handshake.words:
                    self._waiting.remove(handshake)
                    assert handshake.line is not None
                    here.append((handshake.line, handshake.words))
            else:
                self._send_away(handshake)
        for _ in range(_MOST_WAITING if self._server.fileno() in ready else 0):
            if not self._let_in():
                break
        now = time.monotonic()
        for handshake in [one for one in self._waiting if one.until < now]:
            self._send_away(handshake)
        return here

    def close(self) -> None:
        for handshake in list(self._waiting):
            self._send_away(handshake)

    def _let_in(self) -> bool:
        """Accept one connection; return False if there is none."""
        try:
            connection, place = self._server.accept()
        except OSError:  # it has closed already, or too many descriptors are open
            return False
        handshake = _Handshake(
            connection, secret.challenge(), time.monotonic() + HANDSHAKE_S, str(place[:1])
        )
        self._waiting.append(handshake)
        try:
            if not secret.is_own_peer(connection):
                raise ConnectionError
            connection.setblocking(False)
            connection.sendall(handshake.sent)
        except OSError:
            self._send_away(handshake)
        strangers = [one for one in self._waiting if one.line is None]
        if len(strangers) > _MOST_WAITING:
            counts = Counter(one.address for one in strangers)
            self._send_away(max(strangers, key=lambda one: counts[one.address]))
        return True

    def _goes_on(self, handshake: _Handshake) -> bool:
        """Process received data. Return False if the connection must be closed."""
        try:
            if handshake.line is None:
                return self._checked(handshake)
            handshake.words += handshake.line.receive()
        except (EOFError, OSError, msgspec.MsgspecError):
            return False
        return not handshake.words or isinstance(handshake.words[0], protocol.Joining)

    def _checked(self, handshake: _Handshake) -> bool:
        piece = handshake.connection.recv(secret.ANSWER_BYTES - len(handshake.heard))
        handshake.heard += piece
        if len(handshake.heard) < secret.ANSWER_BYTES:
            return bool(piece)
        sent, heard = handshake.sent, handshake.heard
        known = self._run.of_accepted(handshake.connection, self._translated)
        shared = next((key for key in known if secret.answer_is_right(sent, heard, key)), None)
        if shared is None:
            self.refused += 1
            return False
        handshake.connection.sendall(secret.proof_of_front(sent, heard, shared))
        keys = secret.keys_of_front(sent, heard, shared)
        handshake.line = protocol.Connection(
            handshake.connection, self._kind, keys, patience_s=HANDSHAKE_S
        )
        return True

    def _send_away(self, handshake: _Handshake) -> None:
        self._waiting.remove(handshake)
        handshake.connection.close()
