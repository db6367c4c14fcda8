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
        """Sends away those that are still waiting."""
        for handshake in list(self._waiting):
            self._send_away(handshake)

    def _let_in(self) -> bool:
        """Takes one connection; False where there is none."""
        try:
            connection, place = self._server.accept()
        except OSError:  # or it has left already, or there are too many
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
        """Takes what has arrived; False where this is a stranger."""
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
        if not secret.answer_is_right(handshake.sent, handshake.heard, self._secret):
            self.refused += 1
            return False
        proof = secret.proof_of_front(handshake.sent, handshake.heard, self._secret)
        handshake.connection.sendall(proof)
        handshake.line = protocol.Connection(
            handshake.connection, self._kind, patience_s=HANDSHAKE_S
        )
        return True

    def _send_away(self, handshake: _Handshake) -> None:
        self._waiting.remove(handshake)
        handshake.connection.close()
