"""A job on several machines: recordings come together, and one machine judges."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distcheck.errors import CannotRunError
from distcheck.job import machines
from distcheck.job.inside import ending
from distcheck.job.inside.ending import RankStatuses
from distcheck.job.inside.rank import _name_of_run
from distcheck.job.machines import AllSent, FileChunk, JudgedThereError
from distcheck.job.running import CommandResult
from distcheck.recordings.jobs.records import RankRecord, rank_folder, write_json
from distcheck.worlds.remote import bootstrap, protocol, secret
from tests.job.planted import FOLDER
from tests.launchers.namespaces import hosts
from tests.launchers.processes import finish, free_port, start

HERE, THERE = (0, 1), (2, 3)


def recorded(
    folder: Path, ranks: tuple[int, ...], port: int, *, world: int = 4, run: str = ""
) -> Path:
    """What ranks of a world of four have written on one machine."""
    folder.mkdir()
    for rank in ranks:
        mine = rank_folder(folder, rank)
        mine.mkdir()
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
        record = RankRecord(
            rank=rank, world=world, arguments=(), folder="", backend="gloo", device="cpu", torch="",
            variables=variables, run=run,
        )  # fmt: skip
        write_json(mine / "rank.json", record)
        (mine / "step-000000.safetensors").write_bytes(bytes([rank]) * (machines._CHUNK + 5))
        (mine / "ended").touch()
    (folder / "raised-17").write_text(f"{ranks[0]}\nValueError\n")
    (folder / f"drawn-{ranks[0]:04d}-torch-ab12").touch()
    return folder


class Other(threading.Thread):
    """The other machine, with what it came to."""

    def __init__(self, folder: Path, ran: CommandResult, patience_s: float = 20.0) -> None:
        super().__init__(daemon=True)
        self.folder, self.ran, self.patience_s = folder, ran, patience_s
        self.came_to: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with machines.gather_recording(self.folder, self.ran, patience_s=self.patience_s):
                pass
        except Exception as error:
            self.came_to = error

    def result(self) -> Exception | None:
        self.join(30)
        return self.came_to


@pytest.fixture(autouse=True)
def a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, "a secret of this test, not of another")


def test_recordings_come_together_and_the_verdict_goes_back(tmp_path: Path) -> None:
    port = free_port()
    here, there = recorded(tmp_path / "a", HERE, port), recorded(tmp_path / "b", THERE, port)
    other = Other(there, CommandResult(7, ()))
    with machines.gather_recording(here, CommandResult(0, ()), patience_s=20.0) as whole:
        for rank in THERE:
            mine, theirs = rank_folder(here, rank), rank_folder(there, rank)
            for name in ("rank.json", "step-000000.safetensors"):
                assert (mine / name).read_bytes() == (theirs / name).read_bytes()
            assert not (mine / "ended").exists()
        assert (here / "drawn-0002-torch-ab12").exists()
        assert (whole.ran.code, {one.rank for one in whole.ran.raised}) == (7, {0, 2})
        whole.tell(1, "FAIL train.py: missing-sync")
    said = other.result()
    assert isinstance(said, JudgedThereError)
    assert (said.exit_code, str(said)) == (1, "judged on 127.0.0.1: FAIL train.py: missing-sync")


def test_why_nothing_was_judged_goes_back_as_well(tmp_path: Path) -> None:
    port = free_port()
    here, there = recorded(tmp_path / "a", HERE, port), recorded(tmp_path / "b", THERE, port)
    other = Other(there, CommandResult(0, ()))
    with (
        pytest.raises(CannotRunError),
        machines.gather_recording(here, CommandResult(0, ()), patience_s=20.0),
    ):
        raise CannotRunError("the recording is damaged")
    said = other.result()
    assert isinstance(said, JudgedThereError)
    assert (said.exit_code, str(said)) == (3, "judged on 127.0.0.1: the recording is damaged")


def test_one_machine_is_asked_nothing(tmp_path: Path) -> None:
    """All ranks are here, or no master was named, or a rank that is missing may have failed."""
    folder = recorded(tmp_path / "a", (0, 1, 2, 3), 1)
    with machines.gather_recording(folder, CommandResult(0, ())) as whole:
        assert whole.hosts == ()
    one = recorded(tmp_path / "b", (0,), 1)
    for ran, variables in (
        (CommandResult(0, ()), {}),
        (CommandResult(1, ()), {"MASTER_PORT": "1"}),
    ):
        record = RankRecord(
            rank=0, world=4, arguments=(), folder="", backend="", device="", torch="",
            variables=variables,
        )  # fmt: skip
        write_json(rank_folder(one, 0) / "rank.json", record)
        with machines.gather_recording(one, ran) as whole:
            assert whole.hosts == ()


def test_a_machine_that_does_not_come_is_named_by_its_ranks(tmp_path: Path) -> None:
    here = recorded(tmp_path / "a", HERE, free_port())
    with (
        pytest.raises(
            CannotRunError, match="ranks 2, 3 were recorded on machines that sent nothing"
        ),
        machines.gather_recording(here, CommandResult(0, ()), patience_s=0.5),
    ):
        pass


def test_a_wrong_secret_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    here = recorded(tmp_path / "a", HERE, port)
    coming = threading.Event()

    def stranger() -> None:
        coming.wait(10)
        own = secret.RunSecret(b"another secret altogether", "job")
        with pytest.raises(CannotRunError):
            bootstrap.connect(lambda: ("127.0.0.1", port), own, deadline_s=1)

    thread = threading.Thread(target=stranger)
    thread.start()
    coming.set()
    with (
        pytest.raises(CannotRunError, match="did not have this run's secret"),
        machines.gather_recording(here, CommandResult(0, ()), patience_s=2.5),
    ):
        pass
    thread.join()
    assert not rank_folder(here, 2).exists()


@pytest.mark.parametrize("theirs", [{"run": "another"}, {"run": ""}, {"world": 5}], ids=str)
def test_a_machine_of_another_run_is_refused(tmp_path: Path, theirs: dict[str, Any]) -> None:
    """It waited for the judge of an earlier job at the same port, with ranks that the judge misses:
    another run's recording was judged, and passed.
    """
    port = free_port()
    here = recorded(tmp_path / "a", HERE, port, run="this")
    there = recorded(tmp_path / "b", THERE, port, **{"run": "this", **theirs})
    other = Other(there, CommandResult(0, ()), patience_s=0.2)
    with (
        pytest.raises(CannotRunError, match="ranks 2, 3 were recorded on machines that sent"),
        machines.gather_recording(here, CommandResult(0, ()), patience_s=0.8),
    ):
        pass
    assert not rank_folder(here, 2).exists()
    came_to = other.result()
    assert isinstance(came_to, CannotRunError)
    assert not isinstance(came_to, JudgedThereError)


def test_ranks_share_a_name_of_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through their group's store; a group without one (MPI) has no name."""
    for _ in range(2):
        store = dist.HashStore()
        monkeypatch.setattr("distcheck.machine.compat.default_store", lambda store=store: store)
        name = _name_of_run()
        assert len(name) == 32
        assert _name_of_run() == name
    monkeypatch.setattr("distcheck.machine.compat.default_store", lambda: None)
    assert _name_of_run() == ""


@pytest.mark.parametrize(("host", "port"), [("a" * 64, "1"), ("127.0.0.1", "9" * 5000)])
def test_a_master_that_cannot_be(tmp_path: Path, host: str, port: str) -> None:
    folder = recorded(tmp_path / "a", HERE, 1)
    record = RankRecord(
        rank=0, world=4, arguments=(), folder="", backend="", device="", torch="",
        variables={"MASTER_ADDR": host, "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"},
    )  # fmt: skip
    write_json(rank_folder(folder, 0) / "rank.json", record)
    with (
        pytest.raises(CannotRunError, match="is not a rendezvous address"),
        machines.gather_recording(folder, CommandResult(0, ()), patience_s=0.1),
    ):
        pass


@pytest.mark.parametrize(
    "name", ["../escaped", "/escaped", "rank-0000/rank.json", "rank-0002/../../x", "settings.json"]
)
def test_a_file_that_no_rank_there_writes_is_refused(tmp_path: Path, name: str) -> None:
    port = free_port()
    here = recorded(tmp_path / "a", HERE, port)
    before = sorted(tmp_path.rglob("*"))

    def hostile() -> None:
        place = ("127.0.0.1", port)
        own = secret.RunSecret(secret.shared_secret(), "job")
        line = bootstrap.connect(lambda: place, own, deadline_s=10)
        line.send(protocol.Joining(protocol=protocol.PROTOCOL, ranks=THERE, world=4, host="evil"))
        line.send(FileChunk(name=name, data=b"x"))
        line.send(AllSent(code=0))
        said.append(line.next()[0])

    said: list[Any] = []
    thread = threading.Thread(target=hostile)
    thread.start()
    with (
        pytest.raises(
            CannotRunError,
            match=r"evil did not arrive completely \(it sent a file "
            r"that no",
        ),
        machines.gather_recording(here, CommandResult(0, ()), patience_s=10.0),
    ):
        pass
    thread.join()
    assert isinstance(said[0], protocol.Shutdown)
    assert said[0].exit_code == 3
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/escaped").exists()


def test_ranks_elsewhere_say_that_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(master.port))
    monkeypatch.setattr(ending, "_ASK_S", 0.0)
    one = RankStatuses(0, 2)
    assert not one.have_ended()
    other = RankStatuses(1, 2)
    assert one.have_ended()
    assert other.have_ended()
    other.goes_on()
    assert not one.have_ended()
    del master
    assert one.have_ended(), "the master leaves when all have ended"
    other.goes_on()  # which nobody hears
    assert RankStatuses(0, 2).have_ended()
    monkeypatch.delenv("MASTER_PORT")
    assert RankStatuses(0, 2).have_ended(), "without a store nothing is waited for"


# Writes down all that comes over a network, until its input ends.
LISTENS = """
import select, socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.bind(("eth0", 0))
with open("heard", "wb") as heard:
    print("listens", flush=True)
    while sys.stdin not in select.select([wire, sys.stdin], [], [])[0]:
        heard.write(wire.recv(1 << 16))
"""


@pytest.mark.sweep
def test_a_secret_of_a_command_does_not_go_over_the_network(tmp_path: Path) -> None:
    commands, folders = [], [tmp_path / "a", tmp_path / "b"]
    with hosts(2) as network:
        listener = subprocess.Popen(
            network.on(0, sys.executable, "-c", LISTENS), cwd=tmp_path, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert listener.stdin is not None
        assert listener.stdout is not None
        listener.stdout.readline()
        for n, folder in enumerate(folders):
            folder.mkdir()
            (folder / "train.py").write_text((FOLDER / "plain_ddp.py").read_text())
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            torchrun += ["--nproc-per-node", "1", "--master-addr", network.address(0)]
            script = ["--node-rank", str(n), "train.py", "--hub-token", "swordfish-of-mine"]
            words = [sys.executable, "-m", "distcheck", "job", "--steps", "4", "--save", "kept"]
            commands.append(network.on(n, *words, "--", *torchrun, *script))
        ends = finish(
            [start(c, f, GLOO_SOCKET_IFNAME="eth0", LOCAL_SECRET="hunter2-of-mine")
             for c, f in zip(commands, folders, strict=True)]
        )  # fmt: skip
        listener.stdin.close()
        listener.wait()
    assert [code for code, _, _ in ends] == [0, 0], ends
    heard = (tmp_path / "heard").read_bytes()
    assert b"rank-0001/rank.json" in heard
    assert b"train.py" in heard
    kept = [f.read_bytes() for f in folders[0].joinpath("kept").rglob("*") if f.is_file()]
    assert kept
    for secret_text in (b"swordfish", b"hunter2"):
        assert secret_text not in heard
        assert not [content for content in kept if secret_text in content]
    for path in folders[0].joinpath("kept").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.sweep
@pytest.mark.parametrize("find", ["", "DistributedSampler(data)"])
def test_torchrun_on_two_hosts(tmp_path: Path, find: str) -> None:
    text = (FOLDER / "plain_ddp.py").read_text()
    text = text.replace(find, "DistributedSampler(data, num_replicas=1, rank=0)") if find else text
    commands, folders = [], [tmp_path / "a", tmp_path / "b"]
    with hosts(2) as network:
        for n, folder in enumerate(folders):
            folder.mkdir()
            (folder / "train.py").write_text(text)
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            torchrun += ["--nproc-per-node", "2", "--master-addr", network.address(0)]
            words = [sys.executable, "-m", "distcheck", "job", "--steps", "4", "--"]
            commands.append(network.on(n, *words, *torchrun, "--node-rank", str(n), "train.py"))
        ends = finish(
            [start(c, f, GLOO_SOCKET_IFNAME="eth0") for c, f in zip(commands, folders, strict=True)]
        )
    assert [code for code, _, _ in ends] == ([1, 1] if find else [0, 0]), ends
    found = "FAIL    train.py   4 ranks: same-data" if find else "PASS    train.py   4 ranks"
    assert found in ends[0][1]
    assert f"judged on {network.address(0)}: {found[:4]} train.py" in ends[1][2]
