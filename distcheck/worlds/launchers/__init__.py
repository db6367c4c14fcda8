"""Detects the launcher that started this process; one file per launcher.

Each file has `NAME` and `detect(environ) -> Launch | None`, which reads the variables that the
launcher sets and has no side effects. Several launchers match if one starts another (srun starts
torchrun's agents); `detect` of this package selects the innermost.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distcheck.errors import CannotRunError, DistcheckError, UsageError

_MOST_DIGITS = 18


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One of several processes that a launcher started together.

    rank, world    rank of this process and number of launched processes; `ranks_here` lists the
                   ranks
        that this process runs, usually only its own
    local_rank     of the first of these ranks, among the `local_world` ranks of this machine
    meeting        rendezvous address of the processes, by scheme:
        tcp://HOST:PORT       the process with rank 0 listens there
        store://HOST:PORT     a TCPStore exists there; it holds rank 0's address
        file://PATH           the file holds rank 0's address
        unix://NAME           rank 0 listens on this abstract socket; all ranks are on one machine
    owned          True if the launcher is this process's parent, so that the run ends with it
    restarts       number of times that the launcher has restarted all processes
    run            the launcher's own name for the run, if it has one
    job            another ID that all processes of the run received from the launcher
    """

    launcher: str
    rank: int
    world: int
    ranks_here: tuple[int, ...]
    local_rank: int
    local_world: int
    meeting: str
    owned: bool = True
    restarts: int = 0
    run: str = ""
    job: str = ""

    @property
    def key_name(self) -> str:
        """The name of the run in the keys of its connections. Others can edit the store or the file
        that holds rank 0's address, so the name includes the port of the store or the path of the
        file.
        """
        scheme, _, place = self.meeting.partition("://")
        found = {"store": place.rpartition(":")[2], "file": os.path.normpath(place)}
        return ascii((self.run, self.job, found.get(scheme, "")))

    @property
    def is_front(self) -> bool:
        """True if this process plans, judges and reports. Other processes only run ranks."""
        return 0 in self.ranks_here


def required_integer(environ: Mapping[str, str], name: str, *, launcher: str) -> int:
    """Return the value of a required integer variable. Raises CannotRunError if it is missing or
    invalid.
    """
    text = environ.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        said = f"is {environ[name][:80]!r}" if name in environ else "is missing"
        raise CannotRunError(
            f"{launcher} seems to have started this process, but {name} {said}; expected a number"
        )
    return int(text)


def optional_integer(environ: Mapping[str, str], name: str, default: int, *, launcher: str) -> int:
    """Return the value of an optional integer variable. Raises CannotRunError if it is invalid."""
    return required_integer(environ, name, launcher=launcher) if name in environ else default


def tcp_address(environ: Mapping[str, str]) -> str | None:
    """Return the tcp:// address defined by MASTER_ADDR and MASTER_PORT; None if one is unset."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return f"tcp://{host}:{port}" if host and port else None


_DEFAULT_WORLD = 4
# Options that define the ranks of this machine by hand, without a launcher.
OPTIONS = {
    "nnodes": "--nnodes",
    "machine": "--node-rank",
    "master_addr": "--master-addr",
    "master_port": "--master-port",
    "init_method": "--init-method",
}
_DEFAULT_PORT = 29500  # torchrun's

# The innermost first: its ranks and hosts are the most specific.
_LAUNCHERS = ("torchrun", "mpirun", "slurm", "variables")
_MAY_START = {("slurm", "torchrun"), ("slurm", "mpirun")}  # (outer, inner)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch to which this process belongs; None if the user started it directly.

    Raises CannotRunError if two launchers match, or if a variable that the rendezvous requires is
    missing.
    """
    found: dict[str, Launch] = {}
    for name in _LAUNCHERS:
        launch = importlib.import_module(f"{__name__}.{name}").detect(environ)
        if launch is not None:
            found[name] = launch
    if not found:
        return None
    inner = next(iter(found))
    if not 0 <= found[inner].rank < found[inner].world:
        raise CannotRunError(
            f"{found[inner].launcher}: rank {found[inner].rank} of {found[inner].world} ranks is "
            f"out of range; expected 0 to {found[inner].world - 1}; start the launcher again"
        )
    for outer, launch in list(found.items())[1:]:
        if (outer, inner) in _MAY_START or outer == "variables":
            continue
        raise CannotRunError(
            f"both {found[inner].launcher} (rank {found[inner].rank} of {found[inner].world}) and "
            f"{launch.launcher} (rank {launch.rank} of {launch.world}) have started this process; "
            "start it with one of them"
        )
    return found[inner]


def launch_of(
    machines: Mapping[str, Any], worlds: tuple[int, ...]
) -> tuple[Launch | None, tuple[int, ...]]:
    """Return the launch of this process, and the world sizes to run. Under a launcher, the world
    size is that of the launcher. `machines` holds the options that belong to `--nnodes`. Raises
    UsageError or CannotRunError.
    """
    launch = detect(os.environ)
    given = [name for name, value in machines.items() if value is not None]
    if given and launch is not None:
        raise CannotRunError(
            f"{launch.launcher} has started this process as rank {launch.rank} of {launch.world}, "
            f"but {OPTIONS[given[0]]} requests a different way; use only one of them"
        )
    if given:
        if machines["nnodes"] is None:
            raise UsageError(
                f"{OPTIONS[given[0]]} requires --nnodes; pass the number of machines, --nnodes 2"
            )
        if len(worlds) > 1:
            raise UsageError(
                "--nnodes accepts only one --world, whose ranks are distributed over the machines"
            )
        launch = launch_here(**machines, world=worlds[0] if worlds else _DEFAULT_WORLD)
    if launch is None:
        return None, worlds or (_DEFAULT_WORLD,)
    if any(world != launch.world for world in worlds):
        wanted = ", ".join(map(str, worlds))
        raise UsageError(
            f"--world {wanted} was given, but {launch.launcher} started {launch.world} ranks; "
            "remove --world, or start that many"
        )
    if launch.world == 1 and not launch.run:
        return None, (1,)  # a named run may be the rest of a larger one
    return launch, (launch.world,)


def launch_here(
    *,
    nnodes: int,
    machine: int | None,
    master_addr: str | None,
    master_port: int | None,
    init_method: str | None,
    world: int,
) -> Launch:
    """Return the launch of this machine, which runs consecutive ranks of a world. If the world size
    is not divisible by the number of machines, the first machines run one rank more. Raises
    UsageError.
    """
    if nnodes < 1:
        raise UsageError(f"--nnodes {nnodes} is out of range; it takes 1 or more")
    if machine is None or not 0 <= machine < nnodes:
        said = "is missing" if machine is None else f"{machine} is out of range"
        raise UsageError(f"--node-rank {said}; with --nnodes {nnodes} expected 0 to {nnodes - 1}")
    if world < nnodes:
        raise UsageError(
            f"--world {world} is smaller than --nnodes {nnodes}: a machine would have no rank"
        )
    if init_method is None:
        if not master_addr:
            raise UsageError(
                "--master-addr is missing; pass an address of machine 0 that the others can reach"
            )
        port = _DEFAULT_PORT if master_port is None else master_port
        if not 0 < port < 65536:
            raise UsageError(f"--master-port {port} is out of range; it takes 1 to 65535")
        init_method = f"tcp://{master_addr}:{port}"
    elif not init_method.startswith(("tcp://", "file://")):
        raise UsageError(
            f"--init-method {init_method!r} is not supported; expected tcp://HOST:PORT or "
            "file:///PATH"
        )
    each, more = divmod(world, nnodes)
    first = machine * each + min(machine, more)
    ranks = range(first, first + each + (machine < more))
    return Launch(
        launcher="--nnodes",
        rank=machine,
        world=world,
        ranks_here=tuple(ranks),
        local_rank=0,
        local_world=len(ranks),
        meeting=init_method,
        owned=False,
    )


def is_rank_0_elsewhere() -> bool:
    """Return True if a launcher started this process and another process has rank 0. Commands that
    start no world run only in the process with rank 0.
    """
    try:
        launch = detect(os.environ)
    except DistcheckError:
        return False
    return launch is not None and not launch.is_front
