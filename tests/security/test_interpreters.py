"""Files of the folder that a person works in run in no interpreter that distcheck starts, whatever
module of Python's or of a library's they are called after.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import distcheck
from distcheck.backends import missing
from tests.job.planted import FOLDER
from tests.optional import left_of
from tests.sources import MODULES, PACKAGE, calls, nodes
from tests.world.command import COMMAND, QUICK

ROOT = Path(distcheck.__file__).parent
# What a library imports only where it is there: such a file needs no module of Python's in its way.
OPTIONAL = ("dill", "opt_einsum", "pandas", "cupy", "triton", "mkl", "sitecustomize")
STARTS = ("Popen", "run", "call", "check_call", "check_output", "system", "popen", "Process")
MISSING = missing("mpi")
# Every place that starts a program: a new one has to say here which, and how it is kept apart.
PROGRAMS = {
    "addons/mpi/library.py": "mpirun, to ask for its version",
    "addons/engines/running.py": "Python, under -P",
    "job/inside/replay_tasks.py": "the person's own script again, as it was started",
    "job/running.py": "the person's own command, or torchrun under -P",
    "store/origin.py": "git",
    "worlds/local/helper_process.py": "Python, under -P",
    "worlds/keeper.py": "Python, under -I; and there mpirun, or the person's own script",
}


def starts_a_program(called: str) -> bool:
    of, _, name = called.rpartition(".")
    if of == "os":
        return name in STARTS or name.startswith(("exec", "spawn", "posix_spawn"))
    return of in ("subprocess", "multiprocessing") and name in STARTS


def test_every_program_that_is_started_is_known() -> None:
    found = {file for file, called, _ in calls() if starts_a_program(called)}
    assert found == left_of(PROGRAMS)


def test_every_interpreter_is_started_without_the_current_folder() -> None:
    """`python -c` and `python -m` put it first, before Python's own modules."""
    seen = []
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        for node in nodes(path):
            if not isinstance(node, ast.List | ast.Tuple):
                continue
            words = [ast.unparse(one) for one in node.elts]
            words += ["'-I'"] * ("*PYTHON" in words or "*keeper.PYTHON" in words)
            starts = {"sys.executable", "'-c'", "'-m'", "*PYTHON", "*keeper.PYTHON"}
            if (
                words[:1] in (["'git'"], ["'-c'"])
                or words == ["''", "'-c'"]
                or not starts & {*words}
            ):
                continue
            assert {"'-P'", "'-I'"} & {*words}, f"{name}:{node.lineno}"
            seen.append(name)
    assert {*seen} == left_of(
        ("addons/engines/running.py", "addons/mpi/started.py", "job/running.py", "worlds/keeper.py",
         "worlds/local/helper_process.py")
    )  # fmt: skip


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder with a file for every module of Python's, which leaves a mark when it is run."""
    folder = tmp_path / "trapped"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *OPTIONAL}:
        file = folder / f"{name}.py"
        file.write_text(f"open({str(tmp_path / 'ran-')!r} + {name!r}, 'w')\n")
    return folder


def ran(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.parent.glob("ran-*"))


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def test_nothing_of_the_folder_runs_in_ranks_and_separate_interpreters(trapped: Path) -> None:
    words = [word for word in QUICK if word != "--no-separate"]
    done = run(trapped, "verify", "--strategy", "allreduce", *words)
    assert done.returncode == 0, done.stderr
    assert ran(trapped) == []


@pytest.mark.sweep
def test_nothing_of_the_folder_runs_in_a_default_run(trapped: Path) -> None:
    done = run(trapped, "verify", "--strategy", "ddp", "--world", "2")
    assert done.returncode == 0, done.stderr
    assert ran(trapped) == []


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is an MPI")
def test_nothing_of_the_folder_runs_in_a_job_of_mpi(trapped: Path) -> None:
    words = ["verify", "--strategy", "mpi_allreduce", "--backend", "mpi", *QUICK]
    done = run(trapped, *words)
    assert done.returncode == 0, done.stderr
    assert ran(trapped) == []


def test_nothing_of_the_folder_runs_in_torchrun(trapped: Path, tmp_path: Path) -> None:
    """A script in another folder: in its own folder, Python runs what lies beside it."""
    script = tmp_path / "job" / "train.py"
    script.parent.mkdir()
    script.write_text((FOLDER / "plain_ddp.py").read_text())
    words = ["job", "--steps", "2", "--no-reference", "--nproc", "1", "--"]
    done = run(trapped, *words, sys.executable, str(script))
    assert done.returncode == 5, "one rank exchanges nothing" + done.stdout + done.stderr
    assert ran(trapped) == []


def test_python_m_distcheck_leaves_the_folder_as_soon_as_it_runs(tmp_path: Path) -> None:
    """What `python -m` itself imports before that, nothing can keep out but `-P`."""
    (tmp_path / "difflib.py").write_text("open('ran', 'w')\n")
    for options in ([], ["-P"]):
        words = [sys.executable, *options, "-m", "distcheck", "verify", "--strategy", "alreduce"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "did you mean allreduce" in done.stderr
        assert not (tmp_path / "ran").exists()


OWN = """
import sys
import beside_it
import torch.distributed as dist

def sync(model):
    assert sys.path[-1] == beside_it.HERE, sys.path
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
"""


def test_a_persons_code_still_imports_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/own.py").write_text(OWN)
    (tmp_path / "beside_it.py").write_text(f"HERE = {os.path.realpath(tmp_path)!r}\n")
    (tmp_path / "mine.py").write_text("from elsewhere.own import sync as sync\n")
    specs = ["--strategy", "elsewhere/own.py:sync", "--strategy", "mine:sync"]
    done = run(tmp_path, "verify", *specs, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
