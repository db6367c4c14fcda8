"""What each launcher's variables are read as."""

from dataclasses import replace

import pytest

from distcheck.backends import gloo
from distcheck.errors import CannotRunError, UsageError
from distcheck.worlds.launchers import detect, launch_here, launch_of, slurm
from distcheck.worlds.launchers.slurm import first_host

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-a-1@1",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[03-06]",
}  # fmt: skip
NOTHING = {"nnodes": None, "machine": None, "master_addr": None, "master_port": None,
           "init_method": None}  # fmt: skip


def test_a_person_is_no_launcher() -> None:
    assert detect({"HOME": "/root"}) is None
    assert detect({"RANK": "0"}) is None, "a variable of another meaning"
    assert detect({**SLURM, "SLURM_STEP_ID": ""}) is None, "a batch script"
    assert detect({**SLURM, "SLURM_NTASKS": "1"}) is None, "a shell on a machine of a cluster's"


def test_a_list_of_tasks_is_not_written_out() -> None:
    """A number of machines is a word of the environment."""
    listed = {"SLURM_STEP_TASKS_PER_NODE": "2(x99999999999),7", "SLURM_NODEID": "99999999999"}
    assert slurm._tasks_here(listed) == 7
    assert slurm._tasks_here({**listed, "SLURM_NODEID": "5"}) == 2


def test_an_interface_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope")
    assert "names the network interface 'nope', which this machine" in gloo.missing()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo.missing() == ""


def test_torchrun() -> None:
    launch = detect(TORCHRUN)
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world) == (3, 4, 1, 2)
    assert launch.meeting == "store://10.0.0.1:29400", "torchrun's own store is there already"
    assert (launch.restarts, launch.run, launch.is_front) == (2, "abc", False)


def test_mpirun() -> None:
    launch = detect(OPEN_MPI)
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank) == (2, 4, 2)
    assert launch.meeting.startswith("unix://")
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
    launch = detect(hydra)
    assert launch is not None
    assert launch.is_front
    spanning = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(CannotRunError, match="-x MASTER_ADDR"):
        detect(spanning)
    launch = detect({**spanning, "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert launch is not None
    assert launch.meeting == "tcp://a:1"


def test_slurm() -> None:
    launch = detect(SLURM)
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank) == (5, 8, 1)
    other = detect({**SLURM, "SLURM_PROCID": "0"})
    assert other is not None
    assert launch.meeting == other.meeting, "every task comes to the same place without a word"
    assert launch.meeting.startswith("tcp://gpu03:")
    step = detect({**SLURM, "SLURM_STEP_ID": "1"})
    assert step is not None
    assert step.meeting != launch.meeting, "two steps of a job do not meet"


def test_names_of_two_runs_of_one_user_differ() -> None:
    """Another user who edited torchrun's store or a file sent a rank of one run to another run."""

    def name(environ: dict[str, str], **changed: str) -> str:
        launch = detect({**environ, **changed})
        assert launch is not None
        return launch.key_name

    def in_file(path: str) -> str:
        launch = launch_of({**NOTHING, "nnodes": 2, "machine": 0, "init_method": path}, (2,))[0]
        assert launch is not None
        return launch.key_name

    unnamed = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
    assert name(unnamed) != name(unnamed, MASTER_PORT="29401")
    assert name(unnamed) != name(unnamed, TORCHELASTIC_RUN_ID="other")
    assert name(unnamed) == name(unnamed, RANK="0", MASTER_ADDR="localhost"), "of another machine"
    assert in_file("file:///a/b") != in_file("file:///a/c")
    assert in_file("file:///a/b") == in_file("file:///a/./b")
    assert name(OPEN_MPI) != name(OPEN_MPI, PMIX_NAMESPACE="prterun-a-2@1")
    assert name(SLURM) != name(SLURM, SLURM_JOB_ID="78")
    assert name(SLURM) != name(SLURM, SLURM_STEP_ID="1")
    assert name(SLURM) == name(SLURM, SLURM_PROCID="0")
    parts = {**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert name(parts) == name(parts, SLURM_JOB_ID="78"), "parts of one heterogeneous job"
    launch = detect(unnamed)
    assert launch is not None
    assert replace(launch, restarts=3).key_name == launch.key_name, "machines may count differently"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("gpu[007,9],x", "gpu007"), ("r1-n[2]", "r1-n2")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_launchers_that_start_each_other_and_those_that_do_not() -> None:
    launch = detect({**SLURM, **TORCHRUN})
    assert launch is not None
    assert launch.launcher == "torchrun", "srun starts torchrun's agents"
    with pytest.raises(CannotRunError, match=r"both torchrun .* and mpirun .* have started"):
        detect({**OPEN_MPI, **TORCHRUN})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x'; expected a number"),
        ({**TORCHRUN, "RANK": "\u00b2"}, "RANK is '\u00b2'; expected a number"),
        ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9999"),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, "RESTART_COUNT is 'x'; expected a num"),
        ({k: v for k, v in TORCHRUN.items() if k != "WORLD_SIZE"}, "WORLD_SIZE is missing"),
        ({k: v for k, v in SLURM.items() if "NODELIST" not in k}, "or set MASTER_ADDR and"),
        ({**SLURM, "SLURM_STEP_NODELIST": "[3]"},
         r"hosts '\[3\]' is malformed; .* set MASTER_ADDR"),
    ],
)  # fmt: skip
def test_broken_variables(environ: dict[str, str], said: str) -> None:
    with pytest.raises(CannotRunError, match=said):
        detect(environ)


def test_shares_of_machines() -> None:
    machine = {"nnodes": 3, "master_addr": "a", "master_port": None, "init_method": None}
    shares = [launch_here(**machine, machine=i, world=8).ranks_here for i in range(3)]  # type: ignore[arg-type]
    assert shares == [(0, 1, 2), (3, 4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("given", "world", "said"),
    [
        ({"nnodes": 2}, 4, "--node-rank is missing; with --nnodes 2 expected 0 to 1"),
        ({"nnodes": 2, "machine": 2}, 4, "--node-rank 2 is out of range"),
        ({"nnodes": 2, "machine": 0}, 4, "--master-addr is missing"),
        ({"nnodes": 4, "machine": 0, "master_addr": "a"}, 3, "a machine would have no rank"),
        ({"nnodes": 0, "machine": 0, "master_addr": "a"}, 3, "--nnodes 0 is out of range"),
        ({"nnodes": 2, "machine": 0, "init_method": "env://"}, 4, "expected tcp://HOST:PORT or"),
        ({"master_addr": "a"}, 4, "--master-addr requires --nnodes"),
    ],
)
def test_bad_machines(given: dict[str, object], world: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        launch_of({**NOTHING, **given}, (world,))


def test_world_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    launch, worlds = launch_of(NOTHING, ())
    assert launch is not None
    assert worlds == (4,)
    with pytest.raises(UsageError, match="--world 2 was given, but torchrun started 4 ranks"):
        launch_of(NOTHING, (2,))
    with pytest.raises(CannotRunError, match="--nnodes requests a different way"):
        launch_of({**NOTHING, "nnodes": 2}, ())


@pytest.mark.parametrize(
    ("listed", "place", "here"),
    [("2(x3),1", "0", 2), ("2(x3),1", "3", 1), ("4", "0", 4), ("1,3", "1", 3), ("2", "9", 1)],
)
def test_tasks_of_this_machine(listed: str, place: str, here: int) -> None:
    launch = detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": listed, "SLURM_NODEID": place})
    assert launch is not None
    assert launch.local_world == here


def test_a_rank_that_is_none_of_the_world() -> None:
    with pytest.raises(CannotRunError, match="RANK and WORLD_SIZE: rank 5 of 2 ranks"):
        detect({"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
