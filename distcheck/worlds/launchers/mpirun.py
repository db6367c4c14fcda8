"""mpirun and mpiexec: Open MPI's OMPI_COMM_WORLD_*, and PMI_* of MPICH and its kin."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from distcheck.errors import CannotRunError
from distcheck.worlds.launchers import Launch, local_number, number, tcp

NAME = "mpirun"
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "hydra_bstrap", "mpiexec", "mpirun")
_OPEN_MPI = "OMPI_COMM_WORLD"
_VARIABLES = (  # rank, size; the same among those of one machine
    (
        f"{_OPEN_MPI}_RANK",
        f"{_OPEN_MPI}_SIZE",
        f"{_OPEN_MPI}_LOCAL_RANK",
        f"{_OPEN_MPI}_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """What mpirun says; None where it did not start this process."""
    for rank_name, size_name, local_rank_name, local_size_name in _VARIABLES:
        if rank_name not in environ or ("SLURM_PROCID" in environ and rank_name == "PMI_RANK"):
            continue
        rank = number(environ, rank_name, launcher=NAME)
        world = number(environ, size_name, launcher=NAME)
        local_world = local_number(environ, local_size_name, 1, launcher=NAME)
        meeting = tcp(environ)
        if meeting is None:
            if local_world != world:
                raise CannotRunError(
                    "this mpirun spans machines and its processes cannot find each other: pass "
                    "-x MASTER_ADDR=HOST -x MASTER_PORT=PORT, the address of rank 0's machine and "
                    "a free port there (MPICH: -genv MASTER_ADDR HOST)"
                )
            meeting = f"unix://distcheck-{os.getuid()}-{_job(environ)}"
        return Launch(
            launcher=NAME,
            rank=rank,
            world=world,
            ranks_here=(rank,),
            local_rank=local_number(environ, local_rank_name, 0, launcher=NAME),
            local_world=local_world,
            meeting=meeting,
        )
    return None


def _job(environ: Mapping[str, str]) -> str:
    """A name that the processes of one mpirun share, and no others on this machine: that of the
    job, or else of the process that started them all and when it began.
    """
    if "PMIX_NAMESPACE" in environ:
        return f"{zlib.crc32(environ['PMIX_NAMESPACE'].encode()):08x}"
    pid, began = _proxy()
    return f"{pid}-{began}"


def _proxy() -> tuple[int, str]:
    """MPICH's process on this machine, the ancestor of all of its ranks, and when it began; the
    parent where none is called like that.
    """
    pid, found = os.getpid(), []
    while pid > 1:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        fields = rest.split()
        if pid != os.getpid():
            found.append((pid, fields[19]))
            if name.partition("(")[2].startswith(_PROXIES):
                return found[-1]
        pid = int(fields[1])
    return found[0]
