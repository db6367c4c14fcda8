"""Where the processes of a launcher meet: no stranger, no other user and no other code gets in."""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from distcheck.errors import CannotRunError
from distcheck.records import Case
from distcheck.training.jobs import CALIBRATE, RECORD
from distcheck.verification.own_code import AllowedCode
from distcheck.worlds.framing import frame
from distcheck.worlds.launchers import Launch, detect
from distcheck.worlds.remote import bootstrap, protocol, secret
from distcheck.worlds.remote.agent import Agent
from distcheck.worlds.remote.coordinator import Coordinator
from distcheck.worlds.remote.handshake import Handshakes

SECRET = b"a secret of this run's"
RUN = secret.RunSecret(SECRET, "verify")
COMING = protocol.Joining(protocol.PROTOCOL, (1,), 2, "host")


@contextmanager
def door(server: socket.socket | None = None) -> Iterator[tuple[Handshakes, int]]:
    server = server or bootstrap.listen("127.0.0.1", 0)
    handshakes = Handshakes(server, RUN)
    try:
        yield handshakes, server.getsockname()[1]
    finally:
        handshakes.close()
        server.close()


def host(
    place: "tuple[str, int] | str", own: secret.RunSecret = RUN, *, deadline_s: float = 3.0
) -> Thread:
    """A host that comes, in a thread of its own."""

    def come() -> None:
        try:
            connection = bootstrap.connect(lambda: place, own, deadline_s=deadline_s)
        except CannotRunError:
            return
        connection.send(COMING)
        connection.close()

    thread = Thread(target=come)
    thread.start()
    return thread


def those_who_come(handshakes: Handshakes, *, within_s: float) -> list[list[Any]]:
    until, found = time.monotonic() + within_s, []
    while not found and time.monotonic() < until:
        found += handshakes.come(0.05)
    for line, _ in found:
        line.close()
    return [words for _, words in found]


def test_one_with_the_secret_is_let_in() -> None:
    with door() as (handshakes, port):
        thread = host(("127.0.0.1", port))
        assert those_who_come(handshakes, within_s=10) == [[COMING]]
        thread.join()


STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda s: None,
    "another protocol": lambda s: s.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "the former first words": lambda s: s.sendall(frame(COMING)),
    "part of an answer": lambda s: s.sendall(b"x" * (secret.ANSWER_BYTES - 1)),
    "a guess": lambda s: s.sendall(b"x" * secret.ANSWER_BYTES + frame(COMING)),
    "the challenge again": lambda s: s.sendall(s.recv(44)[12:] * 2 + frame(COMING)),
}


@pytest.mark.parametrize("does", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_rejected_without_delay(does: Callable[[socket.socket], None]) -> None:
    """Six silent ones took 30 s, the whole of the time in which ranks may come."""
    with door() as (handshakes, port):
        strangers = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(40)]
        for _ in range(10):
            assert handshakes.come(0.01) == []
        for stranger in strangers:
            does(stranger)
        for _ in range(10):
            assert handshakes.come(0.01) == []
        thread = host(("127.0.0.1", port))
        assert those_who_come(handshakes, within_s=4) == [[COMING]], (
            "sooner than they are sent away"
        )
        thread.join()
        for stranger in strangers:
            stranger.close()


def test_silence_and_crowds_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcheck.worlds.remote.handshake.HANDSHAKE_S", 0.1)
    monkeypatch.setattr("distcheck.worlds.remote.handshake._MOST_WAITING", 3)
    with door() as (handshakes, port):
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        for _ in range(10):
            handshakes.come(0.01)
        assert len(handshakes._waiting) <= 3
        time.sleep(0.2)
        handshakes.come(0.01)
        assert handshakes._waiting == []
        for stranger in strangers:
            stranger.close()


def test_a_flood_sends_away_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that has proven who it is, and not one of another address that still may."""
    monkeypatch.setattr("distcheck.worlds.remote.handshake._MOST_WAITING", 3)
    with door() as (handshakes, port):
        known = socket.create_connection(("127.0.0.1", port), 10)
        keys: list[secret.Keys] = []
        proving = Thread(target=lambda: keys.append(secret.prove(known, RUN, timeout_s=60)))
        proving.start()
        while not any(one.line is not None for one in handshakes._waiting):
            handshakes.come(0.01)
        proving.join()
        elsewhere = socket.create_connection(
            ("127.0.0.1", port), 10, source_address=("127.0.0.9", 0)
        )
        handshakes.come(0.01)
        strangers = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(30)]
        for _ in range(30):
            assert handshakes.come(0.01) == []
        addresses = [one.address for one in handshakes._waiting if one.line is None]
        assert len(addresses) == 3
        assert sum("127.0.0.9" in address for address in addresses) == 1
        protocol.Connection(known, protocol.FromFront, keys[0], patience_s=60).send(COMING)
        assert those_who_come(handshakes, within_s=4) == [[COMING]]
        for one in (known, elsewhere, *strangers):
            one.close()


@pytest.mark.parametrize(
    "own",
    [
        secret.RunSecret(b"another secret, as long", "verify"),
        secret.RunSecret(SECRET, "job"),
        secret.RunSecret(SECRET, "verify", "another run"),
    ],
    ids=["another secret", "another purpose", "another run"],
)
def test_one_of_another_run_is_refused_and_counted(own: secret.RunSecret) -> None:
    with door() as (handshakes, port):
        thread = host(("127.0.0.1", port), own, deadline_s=0.2)
        assert those_who_come(handshakes, within_s=0.5) == []
        assert handshakes.refused > 0
        thread.join()


def of_torchrun(rank: int, port: int) -> Launch:
    launch = detect({
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    })  # fmt: skip
    assert launch is not None
    return launch


@pytest.mark.parametrize(("other", "comes"), [(29511, True), (29512, False)], ids=str)
def test_a_rank_that_is_sent_to_another_run_is_refused(
    other: int, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs have torchrun's usual ID, and an edited store led rank 1 of one to the other."""
    monkeypatch.setenv(secret.VARIABLE, "of one user, for each of the runs")
    front = Coordinator(of_torchrun(0, 29511), deadline_s=1, identity={})
    agent = Agent(SimpleNamespace(watch=print), of_torchrun(1, other), deadline_s=1)  # type: ignore[arg-type]
    with bootstrap.listen("127.0.0.1", 0) as server:
        place = server.getsockname()[:2]
        monkeypatch.setattr(agent, "_make_finder", lambda *_: lambda: place)
        handshakes = Handshakes(server, front._run)

        def meet() -> None:
            with suppress(CannotRunError):
                agent._meet(error="", patience_s=0.3)

        thread = Thread(target=meet)
        thread.start()
        came = those_who_come(handshakes, within_s=0.8)
        thread.join()
        assert (len(came), handshakes.refused > 0) == (int(comes), not comes)
        handshakes.close()
        agent.close()


@contextmanager
def relay(port: int, change: Callable[[bytes], bytes] = bytes) -> Iterator[int]:
    """A process between two ends with the secret: it passes on the handshake, and what `change`
    makes of each later piece that the host sends.
    """

    def pass_on() -> None:
        theirs, _ = server.accept()
        with theirs, socket.create_connection(("127.0.0.1", port)) as front:
            for source, target, length in (
                (front, theirs, len(secret.challenge())),
                (theirs, front, secret.ANSWER_BYTES),
                (front, theirs, secret.PROOF_BYTES),
            ):
                if not (piece := source.recv(length, socket.MSG_WAITALL)):
                    return
                target.sendall(piece)
            front.sendall(change(theirs.recv(1 << 16)))
            front.recv(1)

    with bootstrap.listen("127.0.0.1", 0) as server:
        thread = Thread(target=pass_on)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            thread.join()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (bytes, [[COMING]]),
        (lambda sent: sent.replace(b"host", b"evil"), []),
        (lambda sent: frame(COMING), []),
        (lambda sent: sent + sent, []),
    ],
    ids=["nothing", "a message is changed", "a message without a signature", "one comes twice"],
)
def test_a_relay_cannot_change_what_is_sent(
    change: Callable[[bytes], bytes], expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the relay could take rank 0's own address: there, the handshake passes through."""
    monkeypatch.setattr(secret, "_destination", lambda to, source: "the same")
    with door() as (handshakes, port), relay(port, change) as other:
        thread = host(("127.0.0.1", other))
        assert those_who_come(handshakes, within_s=2) == expected
        handshakes.close()
        thread.join()


def test_a_relay_cannot_connect_two_runs_of_one_user() -> None:
    """Run A's host was led to the front of run B, with the same secret: a wrong run passed."""
    with door() as (handshakes, port), relay(port) as other:
        thread = host(("127.0.0.1", other), deadline_s=0.2)
        assert those_who_come(handshakes, within_s=0.5) == []
        assert handshakes.refused == 1
        thread.join()
        thread = host(("127.0.0.1", port))
        assert those_who_come(handshakes, within_s=10) == [[COMING]]
        thread.join()


@pytest.mark.parametrize(
    ("listens", "called"),
    [
        ("127.0.0.1", "localhost"), ("localhost", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"), ("::1", "::1"), ("127.0.0.2", "127.0.0.2"),
        ("0.0.0.0", socket.gethostname()), (socket.gethostname(), socket.gethostname()),
    ],
)  # fmt: skip
def test_both_ends_may_write_the_address_differently(listens: str, called: str) -> None:
    try:
        server = bootstrap.listen(listens, 0)
    except CannotRunError:
        pytest.skip(f"this machine has no {listens}")
    with door(server) as (handshakes, port):
        thread = host((called, port))
        assert those_who_come(handshakes, within_s=10) == [[COMING]]
        thread.join()


def test_loopback_of_another_machine_is_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay between machines may listen at the same loopback address and port on each."""
    keys = {RUN.of(secret._destination(("127.0.0.1", 5), ("127.0.0.1", 6)))}
    keys.add(RUN.of(secret._destination(("192.0.2.1", 5), ("192.0.2.1", 6))))
    monkeypatch.setattr(secret, "_this_machine", lambda: "another")
    keys.add(RUN.of(secret._destination(("127.0.0.1", 5), ("127.0.0.1", 6))))
    keys.add(RUN.of(secret._destination(("192.0.2.1", 5), ("192.0.2.1", 6))))
    assert len(keys) == 4
    far = RUN.of(secret._destination(("::ffff:192.0.2.1", 5), ("192.0.2.2", 6)))
    assert far == RUN.of("192.0.2.1:5")


@pytest.mark.parametrize("meeting", ["tcp://192.0.2.9:5", "store://192.0.2.9:5"])
def test_an_address_translation_is_declared_by_the_user(
    meeting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts call an address that leads here; a published one is that of the server."""
    with bootstrap.listen("127.0.0.1", 0) as server:
        assert bootstrap.translated_to(server, meeting) == set()
        monkeypatch.setenv(bootstrap.LISTEN, "127.0.0.1")
        called = "192.0.2.9:5" if meeting.startswith("tcp") else bootstrap.place_of(server)
        assert bootstrap.translated_to(server, meeting) == {called}
        with door(server) as (handshakes, port):
            connection = socket.create_connection(("127.0.0.1", port))
            handshakes.come(1.0)
            accepted = handshakes._waiting[0].connection
            assert RUN.of("192.0.2.9:5") in RUN.of_accepted(accepted, {"192.0.2.9:5"})
            assert RUN.of("192.0.2.9:5") not in RUN.of_accepted(accepted)
            connection.close()


BAD_HOSTS = ("", "a" * 64 + ".b", "..", "xn--" + "a" * 70, "\udc80", "a\0b", "a\nb", "ä" * 70)
BAD_PORTS = ("", "0", "65536", "9" * 5000, "²", "٣", "-1", "1 ", "0x1")


@pytest.mark.parametrize("place", [*(f"{host}:1" for host in BAD_HOSTS),
                                   *(f"localhost:{port}" for port in BAD_PORTS)])  # fmt: skip
def test_an_address_may_be_anything(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of the environment, an option, torchrun's store, or a file."""
    with pytest.raises(CannotRunError, match="is not a rendezvous address") as caught:
        bootstrap.address_of(f"tcp://{place}")
    assert len(str(caught.value)) < 400
    monkeypatch.setenv(bootstrap.LISTEN, place.rpartition(":")[0].replace("\0", "..") or "..")
    if not place.startswith("localhost"):
        with pytest.raises(CannotRunError, match="is unknown"):
            bootstrap.listen("127.0.0.1", 0)


def test_a_port_that_is_taken_before_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets may be bound to one port; only one of them listens."""

    class Late(socket.socket):
        def listen(self, backlog: int = 1) -> None:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    monkeypatch.setattr(socket, "socket", Late)
    with pytest.raises(CannotRunError, match="Address already in use"):
        bootstrap.listen("127.0.0.1", 0)
    with pytest.raises(CannotRunError, match="Address already in use"):
        bootstrap.listen_here(f"distcheck-test-{os.getpid()}-late")


def test_a_message_has_a_limit() -> None:
    """Its length comes before its signature: a relay announced 2 GiB, and sent them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = protocol.Connection(ours, protocol.FromFront, secret.Keys(b"a", b"b"), patience_s=5)
        theirs.sendall(b"\xff\xff\xff\x7f")
        with pytest.raises(msgspec.DecodeError, match="a message of 2147483647 bytes"):
            line.next()


@pytest.mark.parametrize("held", [(b"2", b"\xff"), (b"x", b"127.0.0.1:1")])
def test_garbage_in_the_launchers_store_is_no_defect(
    held: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of the machine can write there."""
    size, place = held
    store = SimpleNamespace(compare_set=lambda *_: size, get=lambda _: place)
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *_, **__: store)
    request = bootstrap.StoreRequest(
        host="127.0.0.1", port=1, key="k", value="", size_key="s", size=2, deadline_s=1.0
    )
    with pytest.raises(CannotRunError, match="did not respond correctly"):
        bootstrap.through_store(bootstrap.THROUGH_STORE.encode(request), {}, None)  # type: ignore[arg-type]


def imposter(server: socket.socket, answer: Callable[[bytes, bytes], bytes]) -> Thread:
    """A front without the secret, which sends what `answer` makes of challenge and answer."""

    def listen() -> None:
        connection, _ = server.accept()
        sent = secret.challenge()
        connection.sendall(sent)
        heard = connection.recv(secret.ANSWER_BYTES, socket.MSG_WAITALL)
        connection.sendall(answer(sent, heard))
        connection.close()

    thread = Thread(target=listen)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "answer",
    [
        lambda sent, heard: b"x" * secret.PROOF_BYTES,
        lambda sent, heard: heard[secret.CHALLENGE_BYTES :],  # the host's own proof
        lambda sent, heard: secret.proof_of_front(sent, heard, b"another secret, as long"),
        lambda sent, heard: b"",
    ],
    ids=["a guess", "the host's own", "another secret", "nothing"],
)
def test_a_host_refuses_a_front_without_the_secret(answer: Callable[[bytes, bytes], bytes]) -> None:
    with bootstrap.listen("127.0.0.1", 0) as server:
        thread = imposter(server, answer)
        with (
            socket.create_connection(server.getsockname()) as connection,
            pytest.raises(ConnectionError, match="secret"),
        ):
            secret.prove(connection, RUN, timeout_s=5)
        thread.join()


def test_a_handshake_ends_in_time_however_slowly_its_bytes_come() -> None:
    """The time is that of all bytes, not of each: here there is none left."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(secret.challenge())
        with pytest.raises(TimeoutError, match="handshake"):
            secret.prove(theirs, RUN, timeout_s=0)


def test_the_secret_is_never_sent_and_no_answer_serves_twice() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent, key = secret.challenge(), RUN.of("")  # a pair of sockets has no name
        ours.sendall(sent + secret.proof_of_front(sent, bytes(secret.ANSWER_BYTES), key))
        with pytest.raises(ConnectionError):
            secret.prove(theirs, RUN, timeout_s=5)
        answer = ours.recv(secret.ANSWER_BYTES)
    assert SECRET not in answer
    assert secret.answer_is_right(sent, answer, key)
    assert not secret.answer_is_right(secret.challenge(), answer, key)


AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
name = "\\0" + sys.argv[2]
s = socket.socket(socket.AF_UNIX)
if sys.argv[1] == "listen":
    s.bind(name); s.listen()
    print("ready", flush=True)
    s.accept()[0].recv(1)
else:
    s.connect(name)
    print(len(s.recv(1)), flush=True)
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")


def other_user(what: str, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-S", "-c", AS_NOBODY, what, name], stdout=subprocess.PIPE, text=True,
        cwd="/",
    )  # fmt: skip


@as_root
def test_another_user_who_connects_hears_nothing() -> None:
    """Even with the secret: nothing is said to a process of another user's."""
    name = f"distcheck-test-{os.getpid()}-connect"
    with door(bootstrap.listen_here(name)) as (handshakes, _):
        child = other_user("connect", name)
        while child.poll() is None:
            assert handshakes.come(0.05) == []
        assert child.communicate()[0] == "0\n"


@as_root
def test_another_user_who_listens_is_not_spoken_to() -> None:
    """The name was bound before mpirun's rank 0 could: its host ran what it was sent."""
    name = f"distcheck-test-{os.getpid()}-listen"
    child = other_user("listen", name)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(CannotRunError, match="another user's process listens there"):
        bootstrap.connect(lambda: name, RUN, deadline_s=0.0)
    child.kill()
    child.communicate()


def test_a_name_on_this_machine_cannot_be_guessed() -> None:
    name = secret.private_name("distcheck-0-4711", SECRET)
    assert name != secret.private_name("distcheck-0-4711", b"another")
    assert len(name) == len("distcheck-0-4711-") + 32


MINE = Case(id="a", strategy="mine.py:sync", world=2, workload="mine.py:Own")
CALIBRATES: dict[str, Any] = {"rendezvous": {"backend": "gloo"}}


def record(**changes: Any) -> bytes:
    backend = changes.pop("joins", "gloo")
    case = {**msgspec.to_builtins(MINE), **changes}
    return msgspec.msgpack.encode({"rendezvous": {"backend": backend}, "case": case})


@pytest.mark.parametrize(
    "changes",
    [{}, {"workload": "exact"}, {"workload": "generated:seed=1"}, {"batch": 8}, {"steps": 1}],
    ids=str,
)
def test_a_host_runs_what_it_was_started_for(changes: dict[str, Any]) -> None:
    AllowedCode([MINE]).check(RECORD.target, record(**changes))
    AllowedCode([MINE]).check(CALIBRATE.target, msgspec.msgpack.encode(CALIBRATES))


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "theirs.py:sync"}, {"strategy": "mine.py:other"}, {"strategy": "os:system"},
        {"strategy": "ddp"}, {"strategy": ""}, {"workload": "theirs.py:Own"},
        {"backend": "os:getcwd"}, {"joins": "os:getcwd"},
        {"adaptation": {"variables": [["x", "@os:system"]]}},
        {"adaptation": {"arguments": [["x", "@os:system"]]}},
    ],
    ids=str,
)  # fmt: skip
def test_a_host_refuses_code_that_it_was_not_started_with(changes: dict[str, Any]) -> None:
    with pytest.raises(CannotRunError, match="this process was started for different code"):
        AllowedCode([MINE]).check(RECORD.target, record(**changes))


def test_a_host_refuses_a_job_that_makes_no_sense() -> None:
    for payload in (b"", b"\xc1", msgspec.msgpack.encode({"case": 1})):
        with pytest.raises(CannotRunError, match="malformed"):
            AllowedCode([MINE]).check(RECORD.target, payload)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (secret.VARIABLE, secret.FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "home"


def test_a_secret_is_made_once_and_for_its_owner_alone(home: Path) -> None:
    found: list[bytes] = []
    threads = [Thread(target=lambda: found.append(secret.shared_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    folder = home / ".config/distcheck"
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_public_secret_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret.shared_secret()
    place = home / ".config/distcheck/secret"
    place.chmod(0o644)
    with pytest.raises(CannotRunError, match=r"that no other user can read; run chmod 600 "):
        secret.shared_secret()
    place.chmod(0o600)
    monkeypatch.setenv(secret.VARIABLE, "x" * 31)
    with pytest.raises(
        CannotRunError, match="DISTCHECK_SECRET has 31 characters; a secret needs at"
    ):
        secret.shared_secret()
    monkeypatch.setenv(secret.VARIABLE, "x" * 32)
    assert secret.shared_secret() == b"x" * 32
    monkeypatch.delenv(secret.VARIABLE)
    (tmp_path / "link").symlink_to(place)
    monkeypatch.setenv(secret.FILE_VARIABLE, str(tmp_path / "link"))
    with pytest.raises(CannotRunError, match="link cannot be read: Too many levels of symbolic"):
        secret.shared_secret()
    os.mkfifo(tmp_path / "pipe", 0o600)
    monkeypatch.setenv(secret.FILE_VARIABLE, str(tmp_path / "pipe"))
    with pytest.raises(CannotRunError, match="pipe must be your own file that no other"):
        secret.shared_secret()
    monkeypatch.setenv(secret.FILE_VARIABLE, str(place))
    assert secret.shared_secret() == place.read_text().encode()
    place.write_bytes(b"\xff" * 32)
    assert secret.shared_secret() == b"\xff" * 32


def test_a_folder_that_others_can_write_holds_no_secret(home: Path, tmp_path: Path) -> None:
    folder = home / ".config/distcheck"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (folder / "planted").touch()
    secret.shared_secret()
    assert os.listdir(folder) == ["planted"]
    other = tmp_path / f"distcheck-{os.getuid()}"
    assert (other / "secret").exists()
    (other / "secret").unlink()
    other.rmdir()
    (tmp_path / "theirs").mkdir()
    other.symlink_to(tmp_path / "theirs")
    with pytest.raises(CannotRunError, match="no secret can be stored"):
        secret.shared_secret()


def test_an_address_of_another_machine_opens_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was opened on every interface of this one."""
    with pytest.raises(CannotRunError, match=r"192\.0\.2\.77: it is not an address of this mach"):
        bootstrap.listen("192.0.2.77", 0)
    monkeypatch.setenv(bootstrap.LISTEN, "127.0.0.1")
    with bootstrap.listen("192.0.2.77", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"


def test_without_an_address_one_of_this_machine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with bootstrap.listen_on_own() as server:
        assert server.getsockname()[0] == "127.0.0.1"
        assert bootstrap.address_of(f"tcp://{bootstrap.place_of(server)}") == server.getsockname()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name in ("192.0.2.77", "no-such-name.invalid", socket.gethostname()):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        with bootstrap.listen_on_own() as server:
            assert server.getsockname()[0] not in ("0.0.0.0", "::")
    with bootstrap.listen_on_way_to("127.0.0.2", 9) as server:
        assert server.getsockname()[0].startswith("127.")


@pytest.mark.parametrize("content", [b"\xff:1", b"host:0", b"x" * 5000, None, b"host:29500\n"])
def test_a_meeting_file_may_be_anything(content: bytes | None, tmp_path: Path) -> None:
    """A pipe that nobody writes to, or what no rank has written, is no address yet."""
    file = tmp_path / "meeting"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    expected = ("host", 29500) if content == b"host:29500\n" else None
    assert bootstrap.address_in(file) == expected
