"""What a pool does with its helper, whatever that is."""

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from distcheck.worlds import messages
from distcheck.worlds.pool import Pool


class Helper:
    """Starts nothing. Ctrl-C comes while it is ended, which takes its time."""

    def __init__(self, *, ready: bool) -> None:
        self._ready = ready
        self.patience_s = -1.0
        self.interrupt = False
        self.ended = False

    def start(self, control: socket.socket, *, ours: socket.socket) -> None:
        if self._ready:
            control.sendall(messages.frame(messages.Ready("2.15")))

    @property
    def running(self) -> bool:
        return not self.ended

    def end(self, patience_s: float) -> None:
        if self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        self.patience_s = patience_s
        self.ended = True

    def last_words(self) -> str:
        return ""

    def import_path(self) -> list[str]:
        return []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever started the tests in a shell's background has had SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_heard_when_nothing_is_left() -> None:
    """Its message says so."""
    helper = Helper(ready=True)
    pool = Pool(helper)
    pool.open()
    helper.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert helper.ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_helper_that_has_forked_nothing_is_not_waited_for() -> None:
    """It imports torch, which it does not interrupt to hear that it is to end."""
    early, late = Helper(ready=False), Helper(ready=True)
    for helper in (early, late):
        pool = Pool(helper)
        pool.open()
        if helper is late:
            assert pool.wait_ready() == "2.15"
        pool.close()
    assert early.patience_s == 0
    assert late.patience_s >= 10, "what ranks started is to be ended, too, on a crowded machine"
