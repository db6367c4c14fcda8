"""What a pool does with its helper, whatever that is."""

import os
import signal
import socket
from collections.abc import Iterator, Sequence

import pytest

from distcheck.worlds import messages
from distcheck.worlds.framing import frame
from distcheck.worlds.pool import Pool


class Helper:
    """Starts nothing. Ctrl-C comes while it is ended, which takes its time."""

    pid = 0

    def __init__(self, *, ready: bool) -> None:
        self._ready = ready
        self.patience_s = -1.0
        self.interrupt = False
        self.ended = False

    def start(
        self, control: socket.socket, *, ours: socket.socket, imports: Sequence[str] = ()
    ) -> None:
        self._control = control.dup()
        if self._ready:
            control.sendall(frame(messages.Ready("2.15")))

    @property
    def running(self) -> bool:
        return not self.ended

    def end(self, patience_s: float) -> None:
        if self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        self.patience_s = patience_s
        self.ended = True
        self._control.close()

    def last_words(self) -> str:
        return ""

    def import_path(self) -> list[str]:
        return []

    def variables(self) -> dict[str, str]:
        return {}


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


class Further(Helper):
    """Stands for an interpreter: what it says when it is started."""

    started: list[int] = []  # noqa: RUF012
    error = ""
    ends = False

    def __init__(self, *, hash_seed: int, variant: int) -> None:
        super().__init__(ready=True)
        self._variant = variant

    def start(
        self, control: socket.socket, *, ours: socket.socket, imports: Sequence[str] = ()
    ) -> None:
        self.started.append(self._variant)
        self._control = control.dup()
        if self.ends:
            self._control.shutdown(socket.SHUT_RDWR)
        else:
            control.sendall(frame(messages.Ready("2.15", self.error)))

    def last_words(self) -> str:
        return "MemoryError"


@pytest.fixture
def further(monkeypatch: pytest.MonkeyPatch) -> type[Further]:
    monkeypatch.setattr("distcheck.worlds.pool.CleanHelper", Further)
    monkeypatch.setattr(Further, "started", [])
    return Further


def test_spares_start_in_turn(monkeypatch: pytest.MonkeyPatch, further: type[Further]) -> None:
    """On two cores one beside the helper; the second when one of the two is ready."""
    monkeypatch.setattr("distcheck.worlds.pool.cores", lambda: 2)
    pool = Pool(Helper(ready=False))
    pool.open_interpreters()
    assert further.started == [1]
    pool.pump(0)
    assert further.started == [1, 2]
    pool.pump(0)
    assert pool.interpreters_ready
    assert pool.why_no_interpreters() == ""
    pool.open_interpreters()
    assert further.started == [1, 2], "they are kept"
    made = [pool.place_of(number)._helper for number in (0, 1)]
    pool.close()
    assert not any(helper.running for helper in made)


@pytest.mark.parametrize(("error", "ends", "why"), [("no room", False, "no room"),
                                                    ("", True, "MemoryError")])  # fmt: skip
def test_an_interpreter_that_cannot_start_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, further: type[Further], error: str, ends: bool, why: str
) -> None:
    monkeypatch.setattr(further, "error", error)
    monkeypatch.setattr(further, "ends", ends)
    pool = Pool(Helper(ready=True))
    pool.open_interpreters()
    for _ in range(3):
        pool.pump(0)
    assert pool.wait_ready() == "2.15"
    assert not pool.interpreters_ready
    assert pool.why_no_interpreters() == f"a further interpreter could not be started: {why}"
    monkeypatch.setattr(further, "error", "")
    monkeypatch.setattr(further, "ends", False)
    pool.open_interpreters()
    for _ in range(3):
        pool.pump(0)
    assert pool.interpreters_ready, "the next time may be luckier"
    pool.close()


def test_low_memory_starts_none(monkeypatch: pytest.MonkeyPatch, further: type[Further]) -> None:
    monkeypatch.setattr("distcheck.worlds.pool.available_bytes", lambda: 700 << 20)
    pool = Pool(Helper(ready=True))
    pool.open_interpreters()
    assert further.started == []
    assert pool.why_no_interpreters().endswith("it needs 1.0 GiB of memory and 0.7 are available")
    pool.close()
