"""The last words between a front and the processes that lend it their ranks."""

import os
from collections.abc import Callable
from threading import Thread

import pytest

from distcheck.errors import RankLostError
from distcheck.verification.own_code import AllowedCode
from distcheck.worlds.launchers import Launch
from distcheck.worlds.remote import bootstrap, protocol, secret
from distcheck.worlds.remote.agent import Agent
from distcheck.worlds.remote.handshake import Handshakes


class Inattentive:
    """A pool that hears of the front only once, if at all, and too late."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self.heard = heard
        self.read: Callable[[], None] | None = None

    def open(self) -> None:
        pass

    def wait_ready(self) -> str:
        return "2.11"

    def watch(self, _line: protocol.Connection, read: Callable[[], None]) -> None:
        self.read = read

    def pump(self, _timeout_s: float) -> None:
        self.heard()


def serve(
    monkeypatch: pytest.MonkeyPatch, *last_words: protocol.Shutdown, reads: bool = False
) -> protocol.Shutdown:
    """A host whose front says its last words, and is gone before the host looks again."""
    monkeypatch.setattr(protocol, "SIGN_EVERY_S", 0.0)
    name = f"distcheck-test-{os.getpid()}"
    own_secret = secret.shared_secret()
    server = bootstrap.listen_here(secret.private_name(name, own_secret))

    launch = Launch(
        launcher="test", rank=1, world=2, ranks_here=(1,), local_rank=1, local_world=2,
        meeting=f"unix://{name}",
    )  # fmt: skip

    def front() -> None:
        handshakes, came = (
            Handshakes(server, secret.RunSecret(own_secret, "verify", launch.key_name)),
            [],
        )
        while not came:
            came = handshakes.come(1.0)
        line, said = came[0]
        line.be_patient(30)
        while not any(isinstance(word, protocol.Hello) for word in said):
            said += line.receive()
        for word in last_words:
            line.send(word)
        line.close()

    leaving = Thread(target=front)

    def heard() -> None:
        leaving.join()
        if reads:
            assert pool.read is not None
            pool.read()

    pool = Inattentive(heard)
    host = Agent(pool, launch, deadline_s=30)  # type: ignore[arg-type]
    leaving.start()
    try:
        return host.serve({}, AllowedCode(()))
    finally:
        leaving.join()
        host.close()
        server.close()


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
def test_a_verdict_outlives_its_front(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """A launcher would take another exit code for a failure, and start everything anew."""
    over = serve(monkeypatch, protocol.Shutdown(1, "FAIL"), reads=reads)
    assert (over.exit_code, over.summary) == (1, "FAIL")


def test_a_front_that_goes_without_a_verdict_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankLostError, match="rank 0 exited without a verdict"):
        serve(monkeypatch)
