"""Every example of docs/launchers.md, run as it stands."""

import re
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.launchers.namespaces import hosts
from tests.launchers.processes import finish, left_over, mpirun, start
from tests.world.command import ROOT

TEXT = (ROOT / "docs" / "launchers.md").read_text()
EXAMPLES = re.findall(r"```sh\n(.+?)\n```", TEXT, re.DOTALL)

# What stands for srun where there is no cluster: its variables, and nothing else of it.
SRUN = """#!{python}
import os, subprocess, sys
count = int(sys.argv[2])
step = {{"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(count),
        "SLURM_STEP_NODELIST": "localhost"}}
tasks = [
    subprocess.Popen(sys.argv[3:], env={{**os.environ, **step, "SLURM_PROCID": str(n),
                                       "SLURM_LOCALID": str(n)}})
    for n in range(count)
]
sys.exit(max(task.wait() for task in tasks))
"""


def test_there_are_examples() -> None:
    assert [e.split()[0] for e in EXAMPLES] == [
        "torchrun", "torchrun", "mpirun", "mpirun", "srun", "distcheck", "RANK=$NODE",
    ]  # fmt: skip


WORLDS = (2, 4, 2, 2, 2, 4, 2)


@pytest.mark.sweep  # the other modules here, and test_mpi_verify.py, start processes in these ways
@pytest.mark.parametrize(
    ("example", "world"),
    [pytest.param(e, world, id=e[:60]) for e, world in zip(EXAMPLES, WORLDS, strict=True)],
)
def test_example(tmp_path: Path, example: str, world: int) -> None:
    scripts = sysconfig.get_path("scripts")
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    more = {
        "PATH": f"{scripts}:{tmp_path / 'bin'}:/usr/sbin:/usr/bin:/bin:/sbin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if example.startswith("mpirun"):
        mpirun()
    command = ["bash", "-c", f"exec {example}" if "=$NODE" not in example else example]
    if "$NODE" not in example:
        ends = finish([start(command, tmp_path, **more)], timeout_s=400)
    else:
        with hosts(2) as network:
            ends = finish(
                [
                    start(
                        network.on(n, *command),
                        tmp_path,
                        NODE=str(n),
                        MASTER=network.address(0),
                        **more,
                    )
                    for n in range(2)
                ],
                timeout_s=400,
            )
    assert {code for code, _, _ in ends} == {0}, ends
    assert left_over(tmp_path) == []
    first = ends[0][1].partition("\n")[0].split("  ")
    assert (first[0], f" {world} ranks" in f" {first[-1]}") == ("PASS", True), ends
    assert {out for _, out, _ in ends[1:]} <= {""}, "rank 0 alone prints"
