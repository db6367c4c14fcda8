"""The front's door: connections are let in side by side, each when it has shown who it is.

A stranger may say nothing, or something else, for as long as it likes: the others do not wait for
it, and it is sent away after `HANDSHAKE_S`. Of more than `_MOST_WAITING`, one without the secret is
sent away: the oldest of the address that has the most. So a flood sends away its own.
"""

import select
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from distcheck.worlds.remote import protocol, secret

HANDSHAKE_S = 5.0  # from a connection to its first words
_MOST_WAITING = 256


@dataclass(eq=False)
class _Handshake:
    """A connection that has not yet said who it is. `line` is there once it has the secret."""

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
    """Everybody at the door. Close it when all have come. `kind`: what they may say."""

    def __init__(
        self, server: socket.socket, own_secret: bytes, kind: Any = protocol.FromHost
    ) -> None:
        self._server, self._secret, self._kind = server, own_secret, kind
        self._waiting: list[_Handshake] = []
        self.refused = 0  # connections without the secret, though they spoke of one
        server.setblocking(False)

    def come(self, timeout_s: float) -> list[tuple[protocol.Connection, list[Any]]]:
        """Those that have said who they are: their line, and their words, `Joining` first."""
        watched = select.poll()
        watched.register(self._server, select.POLLIN)
        for greeting in self._waiting:
            watched.register(greeting, select.POLLIN)
        ready = {fd for fd, _ in watched.poll(timeout_s * 1000)}
        here = []
        for greeting in [one for one in self._waiting if one.fileno() in ready]:
            if self._goes_on(greeting):
                if greeting.words:
                    self._waiting.remove(greeting)
                    assert greeting.line is not None
                    here.append((greeting.line, greeting.words))
            else:
                self._send_away(greeting)
        for _ in range(_MOST_WAITING if self._server.fileno() in ready else 0):
            if not self._let_in():
                break
        now = time.monotonic()
        for greeting in [one for one in self._waiting if one.until < now]:
            self._send_away(greeting)
        return here

    def close(self) -> None:
        """Sends away those that are still waiting."""
        for greeting in list(self._waiting):
            self._send_away(greeting)

    def _let_in(self) -> bool:
        """Takes one connection; False where there is none."""
        try:
            connection, place = self._server.accept()
        except OSError:  # or it has left already, or there are too many
            return False
        greeting = _Handshake(
            connection, secret.challenge(), time.monotonic() + HANDSHAKE_S, str(place[:1])
        )
        self._waiting.append(greeting)
        try:
            if not secret.is_own_peer(connection):
                raise ConnectionError
            connection.setblocking(False)
            connection.sendall(greeting.sent)
        except OSError:
            self._send_away(greeting)
        strangers = [one for one in self._waiting if one.line is None]
        if len(strangers) > _MOST_WAITING:
            counts = Counter(one.address for one in strangers)
            self._send_away(max(strangers, key=lambda one: counts[one.address]))
        return True

    def _goes_on(self, greeting: _Handshake) -> bool:
        """Takes what has arrived; False where this is a stranger."""
        try:
            if greeting.line is None:
                return self._checked(greeting)
            greeting.words += greeting.line.receive()
        except (EOFError, OSError, msgspec.MsgspecError):
            return False
        return not greeting.words or isinstance(greeting.words[0], protocol.Joining)

    def _checked(self, greeting: _Handshake) -> bool:
        piece = greeting.connection.recv(secret.ANSWER_BYTES - len(greeting.heard))
        greeting.heard += piece
        if len(greeting.heard) < secret.ANSWER_BYTES:
            return bool(piece)
        if not secret.answer_is_right(greeting.sent, greeting.heard, self._secret):
            self.refused += 1
            return False
        proof = secret.proof_of_front(greeting.sent, greeting.heard, self._secret)
        greeting.connection.sendall(proof)
        greeting.line = protocol.Connection(greeting.connection, self._kind, patience_s=HANDSHAKE_S)
        return True

    def _send_away(self, greeting: _Handshake) -> None:
        self._waiting.remove(greeting)
        greeting.connection.close()
