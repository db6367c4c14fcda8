"""Authenticates incoming connections at the front end, concurrently.

An unauthenticated peer may send nothing, or arbitrary bytes, without delaying the others; its
connection is closed after `GREETING_S`. If more than `_MOST_WAITING` are unauthenticated, the
oldest one of the address with the most is closed, so that a flood only evicts its own connections.
"""

import select
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from distcheck.worlds.remote import secret, wire

GREETING_S = 5.0  # from accepting a connection to its first message
_MOST_WAITING = 256


@dataclass(eq=False)
class _Greeting:
    """A connection that has not introduced itself. `line` is set once it has proved the secret."""

    connection: socket.socket
    sent: bytes
    until: float
    address: str
    heard: bytes = b""
    line: wire.Wire | None = None
    words: list[Any] = field(default_factory=list)

    def fileno(self) -> int:
        return self.connection.fileno()


class Greetings:
    """All pending connections, until every rank has connected; messages are of `kind`."""

    def __init__(self, server: socket.socket, own_secret: bytes, kind: Any = wire.FromHost) -> None:
        self._server, self._secret, self._kind = server, own_secret, kind
        self._waiting: list[_Greeting] = []
        self.refused = 0  # connections with a wrong answer to the challenge
        server.setblocking(False)

    def come(self, timeout_s: float) -> list[tuple[wire.Wire, list[Any]]]:
        """Return peers that have introduced themselves: connection and messages, `Coming` first."""
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
        for greeting in list(self._waiting):
            self._send_away(greeting)

    def _let_in(self) -> bool:
        """Accept one connection; return False if there is none."""
        try:
            connection, place = self._server.accept()
        except OSError:  # it has closed already, or too many descriptors are open
            return False
        greeting = _Greeting(
            connection, secret.challenge(), time.monotonic() + GREETING_S, str(place[:1])
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

    def _goes_on(self, greeting: _Greeting) -> bool:
        """Process received data; return False if the connection must be closed."""
        try:
            if greeting.line is None:
                return self._checked(greeting)
            greeting.words += greeting.line.receive()
        except (EOFError, OSError, msgspec.MsgspecError):
            return False
        return not greeting.words or isinstance(greeting.words[0], wire.Coming)

    def _checked(self, greeting: _Greeting) -> bool:
        piece = greeting.connection.recv(secret.ANSWER_BYTES - len(greeting.heard))
        greeting.heard += piece
        if len(greeting.heard) < secret.ANSWER_BYTES:
            return bool(piece)
        if not secret.answer_is_right(greeting.sent, greeting.heard, self._secret):
            self.refused += 1
            return False
        proof = secret.proof_of_front(greeting.sent, greeting.heard, self._secret)
        greeting.connection.sendall(proof)
        greeting.line = wire.Wire(greeting.connection, self._kind, patience_s=GREETING_S)
        return True

    def _send_away(self, greeting: _Greeting) -> None:
        self._waiting.remove(greeting)
        greeting.connection.close()
