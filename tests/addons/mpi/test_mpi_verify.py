"""`distcheck verify --backend mpi`: what is required, what is refused, and what is left behind."""

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from distcheck import backends
from distcheck.addons.mpi import library
from distcheck.addons.mpi import started as mpirun
from distcheck.errors import CannotRunError
from tests.correct import LAYOUTS
from tests.waiting import wait_until
from tests.world.command import BAD, COMMAND, QUICK, Run, complaints, hear_interrupts
from tests.world.command import distcheck as console
from tests.world.warm import distcheck

__all__ = ["console", "distcheck"]

MISSING = backends.missing("mpi")
needs_mpi = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is an MPI")
STRATEGIES = sorted(
    {
        point.name
        for point in entry_points(group="distcheck.strategies")
        if point.dist is not None
        and point.dist.name == "distcheck"
        and point.name != "data_parallel"  # of one process and its GPUs
        and point.name not in LAYOUTS
    }
)
# Their ranks add up what they received, in an order that is the strategy's own, not MPI's.
OWN_ORDER = {"gather_scatter", "parameter_server", "ring"}
# One of each kind: what the others do besides is not MPI's.
KINDS = ["ddp", "gather_scatter", "mpi_allreduce"]
MPI = ("--backend", "mpi")


@needs_mpi
@pytest.mark.parametrize(
    ("world", "strategies"),
    [(3, KINDS), *(pytest.param(n, STRATEGIES, marks=pytest.mark.sweep) for n in (2, 3, 4))],
    ids=lambda value: value if isinstance(value, int) else f"{len(value)} strategies",
)
def test_strategies_pass(distcheck: Run, tmp_path: Path, world: int, strategies: list[str]) -> None:
    assert len(STRATEGIES) >= 17
    words = [word for name in strategies for word in ("--strategy", name)]
    ran = distcheck(
        "verify", *words, "--world", str(world), *MPI, "--workload", "mlp:small",
        "--dtype", "float32", "--no-separate", "--steps", "2", "--json", "report.json",
    )  # fmt: skip
    assert (ran.returncode, complaints(ran.stderr)) == (0, [])
    assert " ranks on mpi, " in ran.stdout
    document = json.loads((tmp_path / "report.json").read_text())
    assert [case["case"]["strategy"] for case in document["cases"]] == strategies
    for case in document["cases"]:
        assert (case["verdict"], case["case"]["backend"]) == ("pass", "mpi")
        layers = {c["layer"] for c in case["checks"] if c["check"] == "gradients"}
        own_order = case["case"]["strategy"] in OWN_ORDER
        assert layers == (
            {"bitwise", "rounding", "full batch float32"}
            if own_order
            else {"rounding", "full batch float32"}
        ), case["case"]["strategy"]
        falls_back = (
            "bitwise falls back to rounding: the reduction order of all_reduce on mpi is not known"
        )
        notes = [c.get("reason", "") for c in case["checks"] if c["check"] == "gradients"]
        if case["case"]["strategy"] in ("allreduce", "ddp"):
            assert falls_back in notes
        elif own_order:
            assert falls_back not in notes


@needs_mpi
def test_a_missing_sync_is_found(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:no_sync", *QUICK, *MPI)
    assert ran.returncode == 1
    assert "2 ranks on mpi: missing-sync" in ran.stdout


@needs_mpi
def test_a_rank_that_raises_ends_the_world(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:crash", *QUICK, *MPI)
    assert ran.returncode == 4
    assert "RuntimeError: the reason" in ran.stdout


def test_what_is_not_there_is_said(console: Run, tmp_path: Path) -> None:
    """mpi4py that cannot be found, as far as this process can tell."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; f = u.find_spec\n"
        "u.find_spec = lambda n, p=None: None if n == 'mpi4py' else f(n, p)\n"
    )
    ran = console("verify", "--strategy", "ddp", *QUICK, *MPI, env={"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 3
    assert ran.stderr.strip() == (
        "distcheck: backend mpi needs mpi4py, which is not installed; pip install 'distcheck[mpi]'"
    )


def test_mpi_allreduce_on_another_backend(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "mpi_allreduce", *QUICK, "--backend", "gloo")
    assert ran.returncode == 3
    assert ran.stderr.strip() == (
        "distcheck: strategy mpi_allreduce works only on backend mpi, not on gloo; pass "
        "--backend mpi"
    )


@needs_mpi
def test_a_launcher_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "mpirun"
    bad.write_text("#!/bin/sh\necho 'HYDRA, no slots today'\n")
    bad.chmod(0o755)
    launcher = library.Launcher(str(bad), "MPICH", "")
    monkeypatch.setattr(library, "find_launcher", lambda: launcher)
    with pytest.raises(CannotRunError, match="could not start 2 processes: HYDRA, no slots"):
        mpirun.MPIJob(2)


def marked(mark: str) -> Iterator[psutil.Process]:
    """Processes that have the mark in their environment, or inherited what has."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("DISTCHECK_MARK") == mark and process.status() != "zombie":
                yield process


@needs_mpi
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.sweep), signal.SIGKILL],
    ids=["ctrl-c", "kill"],
)
def test_nothing_is_left_of_a_front_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    mark = uuid.uuid4().hex
    front = subprocess.Popen(
        [*COMMAND, "verify", "--strategy", "bad.py:hang", *QUICK, *MPI], cwd=tmp_path,
        env={**os.environ, "DISTCHECK_MARK": mark}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, preexec_fn=hear_interrupts,
    )  # fmt: skip
    wait_until((tmp_path / "asleep").exists)
    family = list(marked(mark))
    told = [" ".join(p.cmdline()) for p in family]
    assert sum("stand_in.py" in words for words in told) >= 2
    (keeper,) = [p for p, words in zip(family, told, strict=True) if "keeper.py" in words]
    folder = Path(keeper.environ()["TMPDIR"])
    assert folder.is_dir()
    shared = {line.path for p in family for line in p.memory_maps() if "/dev/shm/" in line.path}

    front.send_signal(number)
    front.wait()
    wait_until(lambda: not any(marked(mark)))
    assert not folder.exists()
    assert not [name for name in shared if Path(name).exists()]


IMPORTS_MPI = """
from mpi4py import MPI
import torch.distributed as dist

def sync(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
"""


def test_mpi4py_with_gloo_leaves_no_shared_memory(distcheck: Run, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (the extra `mpi`)")
    (tmp_path / "sync.py").write_text(IMPORTS_MPI)
    before = segments()
    ran = distcheck(
        "verify", "--strategy", f"{tmp_path}/sync.py:sync", "--world", "2", "--workload",
        "mlp:small", "--dtype", "float32",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    assert not segments() - before


def segments() -> set[str]:
    """What Open MPI keeps in shared memory for processes of this user."""
    with os.scandir("/dev/shm") as entries:
        own = [one for one in entries if one.stat().st_uid == os.geteuid()]
    return {one.name for one in own if one.name.startswith("sm_segment.")}
