"""Detects srun, by SLURM_PROCID and SLURM_NTASKS of a job step."""

import re
import zlib
from collections.abc import Mapping

from distcheck.errors import CannotRunError
from distcheck.worlds.launchers import Launch, optional_integer, required_integer, tcp_address

NAME = "srun"
_FIRST_PORT, _PORTS = 20000, 10000  # below the ephemeral ports of Linux


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that srun's variables describe; None if srun did not start this process.

    A batch script is itself a step of one task, in which the user starts commands; it does not
    count.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or not step.isdigit():
        return None
    rank = required_integer(environ, "SLURM_PROCID", launcher=NAME)
    world = required_integer(environ, "SLURM_NTASKS", launcher=NAME)
    if "SLURM_STEP_NUM_TASKS" in environ:
        world = required_integer(environ, "SLURM_STEP_NUM_TASKS", launcher=NAME)
    if world == 1:  # a shell on a machine of the cluster
        return None
    meeting, job = tcp_address(environ), ""  # parts of a heterogeneous job have different IDs
    if meeting is None:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
        if not nodes:
            raise CannotRunError(
                "srun has started this process without SLURM_STEP_NODELIST, so rank 0's machine is "
                "not known; start it with `srun --export=ALL`, or set MASTER_ADDR and MASTER_PORT"
            )
        # All tasks must derive the same port without communicating, so hash the step name.
        job = f"{environ.get('SLURM_JOB_ID', '')}.{step}"
        meeting = f"tcp://{first_host(nodes)}:{_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS}"
    return Launch(
        launcher=NAME,
        rank=rank,
        world=world,
        ranks_here=(rank,),
        meeting=meeting,
        job=job,
        local_rank=optional_integer(environ, "SLURM_LOCALID", 0, launcher=NAME),
        local_world=_tasks_here(environ),
    )


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Return this machine's entry in Slurm's list of tasks per node: "2(x3),1" means 2, 2, 2, 1."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    place = optional_integer(environ, "SLURM_NODEID", 0, launcher=NAME)
    for tasks, times in re.findall(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?", listed):
        place -= int(times or 1)
        if place < 0:
            return int(tasks)
    return 1


def first_host(nodes: str) -> str:
    """Return the first host in Slurm's node list: "gpu03" for "gpu[03-05,9],login"."""
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if first is None:
        raise CannotRunError(
            f"srun's list of hosts {nodes!r} is malformed; expected a list such as "
            "'gpu[03-05],login'; set MASTER_ADDR and MASTER_PORT to rank 0's machine instead"
        )
    return first[1] + (first[2] or "")
