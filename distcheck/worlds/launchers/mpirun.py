"""Detects mpirun and mpiexec: by OMPI_COMM_WORLD_* of Open MPI, or PMI_* of MPICH and its
derivatives.
"""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from distcheck.errors import CannotRunError
from distcheck.worlds.launchers import Launch, optional_integer, required_integer, tcp_address

NAME = "mpirun"
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "hydra_bstrap", "mpiexec", "mpirun")
_OPEN_MPI = "OMPI_COMM_WORLD"
_VARIABLES = (  # rank, size; local rank, local size
    (
        f"{_OPEN_MPI}_RANK",
        f"{_OPEN_MPI}_SIZE",
        f"{_OPEN_MPI}_LOCAL_RANK",
        f"{_OPEN_MPI}_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that mpirun's variables describe; None if mpirun did not start this
    process.
    """
    for rank_name, size_name, local_rank_name, local_size_name in _VARIABLES:
        if rank_name not in environ or ("SLURM_PROCID" in environ and rank_name == "PMI_RANK"):
            continue
        rank = required_integer(environ, rank_name, launcher=NAME)
        world = required_integer(environ, size_name, launcher=NAME)
        local_world = optional_integer(environ, local_size_name, 1, launcher=NAME)
        meeting = tcp_address(environ)
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
            local_rank=optional_integer(environ, local_rank_name, 0, launcher=NAME),
            local_world=local_world,
            meeting=meeting,
            job=environ.get("PMIX_NAMESPACE", ""),
        )
    return None


def _job(environ: Mapping[str, str]) -> str:
    """Return a name that only the processes of one mpirun on this machine share: the name of the
    job, or else the process id and the start time of their common ancestor.
    """
    if "PMIX_NAMESPACE" in environ:
        return f"{zlib.crc32(environ['PMIX_NAMESPACE'].encode()):08x}"
    pid, began = _proxy()
    return f"{pid}-{began}"


def _proxy() -> tuple[int, str]:
    """Return the process id and the start time of MPICH's proxy, an ancestor of all ranks on this
    machine. If no ancestor has the proxy's name, return those of the parent.
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
