"""Which MPI is taken, without starting one."""

import sys
from pathlib import Path

import pytest

from distcheck import backends
from distcheck.addons.mpi import library
from distcheck.errors import CannotRunError
from distcheck.plan.cases import check_request
from distcheck.plan.settings import Request


def launcher(folder: Path, says: str, *, name: str = "mpirun") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher beside this Python, in a wheel, or on PATH; and no outer one."""
    (tmp_path / "python").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python3"))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "python"))
    monkeypatch.setattr(library, "_WHEELS", ())
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for name in ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    library.find_launcher.cache_clear()
    yield
    library.find_launcher.cache_clear()


def test_the_one_beside_python_comes_first(tmp_path: Path) -> None:
    launcher(tmp_path / "path", "mpirun (Open MPI) 4.1.6")
    beside = launcher(tmp_path / "python", "HYDRA build details:", name="mpiexec")
    found = library.find_launcher()
    assert found == library.Launcher(str(beside), "MPICH", "")


def test_one_on_path_and_its_library(tmp_path: Path) -> None:
    path = launcher(tmp_path / "bin", "mpirun (Open MPI) 5.0.11")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so").touch()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    (tmp_path / "path").symlink_to(tmp_path / "bin")
    found = library.find_launcher()
    assert found is not None
    assert (found.path, found.kind) == (str(tmp_path / "path" / path.name), "Open MPI")
    assert found.library == str(tmp_path / "lib" / "libmpi.so.40")


def test_something_else_of_that_name_is_passed_over(tmp_path: Path) -> None:
    launcher(tmp_path / "python", "my private runner 1.0")
    assert library.find_launcher() is None


def test_no_launcher_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    assert "needs mpirun or mpiexec" in backends.missing("mpi")
    with pytest.raises(CannotRunError, match=r"pip install 'distcheck\[mpi\]', or pip install mpi"):
        check_request(Request(strategies=("ddp",), backend="mpi"))
    monkeypatch.setenv("PMI_RANK", "0")
    assert backends.missing("mpi") == ""


def test_no_mpi4py_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "needs mpi4py, which is not installed" in backends.missing("mpi")


def test_gloo_misses_nothing_and_keeps_its_name() -> None:
    assert backends.missing("gloo") == ""
    assert backends.register("gloo") == "gloo"
    assert backends.all_reduce_sum("mpi") is None
    assert backends.backend_names() == ["gloo", "mpi", "nccl", "simulated"]


def test_an_outer_job_is_scrubbed_and_wishes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMI_FD", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_coll", "^han")
    kept = library.clean_environment()
    assert kept["OMPI_MCA_coll"] == "^han"
    assert not {"OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMI_FD", "SLURM_NTASKS"} & set(kept)
