"""How the end of a process elsewhere is told."""

import errno

import pytest

from distcheck.worlds.remote import protocol
from distcheck.worlds.remote.coordinator import Link


class Line:
    """A connection on which everything fails alike."""

    peer_address = ""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def receive(self) -> list[protocol.FromHost]:
        raise self.error

    def send(self, message: object) -> None:
        raise self.error


# A process that is killed while something of ours is unread in its socket resets the connection.
ENDED = [
    EOFError(), ConnectionResetError(errno.ECONNRESET, "reset"), BrokenPipeError(errno.EPIPE, ""),
]  # fmt: skip


def link_that_fails(error: Exception) -> Link:
    coming = protocol.Joining(protocol.PROTOCOL, (1,), 2, "far", "")
    return Link(Line(error), coming, lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", ENDED, ids=lambda error: type(error).__name__)
def test_a_process_that_is_gone_has_ended(error: Exception) -> None:
    link = link_that_fails(error)
    link.on_readable()
    assert link.lost.endswith("can no longer be reached: its process exited")


@pytest.mark.parametrize("error", ENDED[1:], ids=lambda error: type(error).__name__)
def test_so_it_is_where_telling_it_something_shows_that(error: Exception) -> None:
    link = link_that_fails(error)
    link.send(protocol.Heartbeat())
    assert link.lost.endswith("can no longer be reached: its process exited")


def test_a_network_that_is_gone_is_told_as_the_kernel_does() -> None:
    link = link_that_fails(OSError(errno.EHOSTUNREACH, "No route to host"))
    link.on_readable()
    assert link.lost.endswith("can no longer be reached: No route to host")
