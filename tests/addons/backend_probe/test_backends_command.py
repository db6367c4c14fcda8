"""The command `distcheck backends`: gloo as it is, and the ends of the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distcheck.addons.backend_probe.command import check_availability
from distcheck.addons.backend_probe.table import read_sweeps, render_text
from distcheck.errors import UsageError
from distcheck.machine import devices
from distcheck.worlds.pool import Pool
from tests.world import warm
from tests.world.command import ROOT

Finished = subprocess.CompletedProcess[str]
QUICK = ("--op", "broadcast", "--dtype", "float32", "--form", "plain")


LOOKED_AT = [
    word
    for option, values in (
        ("--op", ("all_reduce", "broadcast", "all_gather", "send_recv", "all_to_all_single",
                  "barrier")),
        ("--dtype", ("float32", "float64", "int64")),
        ("--form", ("plain", "empty", "one", "large", "sub-group", "strided")),
    )
    for value in values
    for word in (option, value)
]  # fmt: skip


def run(*words: str, cwd: Path = ROOT) -> Finished:
    words = words if "--deadline" in words else (*words, "--deadline", "30")
    return warm.run("backends", *words, cwd=cwd, timeout=550)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """Gloo, of what the tests below look at, once."""
    file = tmp_path_factory.mktemp("gloo") / "gloo.json"
    return run("--backend", "gloo", *LOOKED_AT, "--json", str(file)), file


@pytest.fixture(scope="module")
def cells(gloo: tuple[Finished, Path]) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    document = json.loads(gloo[1].read_text())
    assert document["schema"] == "distcheck.backends/1"
    (backend,) = document["backends"]
    assert (backend["backend"], backend["device"], backend["world"]) == ("gloo", "cpu", 3)
    assert backend["environment"]["torch"] == torch.__version__
    assert not backend["missing"]
    assert not backend["failure"]
    return {(c["operation"], c["reduction"], c["form"], c["dtype"]): c for c in backend["cells"]}


def test_gloo_is_right_on_plain_tensors(cells: dict) -> None:
    probed = [("all_reduce", "SUM"), ("all_reduce", "MAX"), ("broadcast", ""), ("all_gather", ""),
              ("send_recv", ""), ("all_to_all_single", "")]  # fmt: skip
    for operation, reduction in probed:
        for form in ("plain", "empty", "one", "large", "sub-group"):
            cell = cells[operation, reduction, form, "float32"]
            assert cell["verdict"] == "right", cell
            assert cell["elements"] >= 3 * 128 or form == "sub-group"
    assert [cells["barrier", "", form, ""]["verdict"] for form in ("plain", "sub-group")] == [
        "right", "right"
    ]  # fmt: skip


def test_gloo_leaves_strided_tensors_half_reduced(cells: dict) -> None:
    """It takes the view's first element for the beginning of as many contiguous ones."""
    for dtype in ("float32", "float64", "int64"):
        cell = cells["all_reduce", "SUM", "strided", dtype]
        assert cell["verdict"] == "wrong"
        assert "12 of 24 elements differ" in cell["detail"]
        assert "12 elements outside it were written" in cell["detail"]
    assert cells["all_gather", "", "strided", "float32"]["verdict"] == "right"


def test_gloo_refuses_in_words(cells: dict) -> None:
    cell = cells["send_recv", "", "strided", "float32"]
    assert (cell["verdict"], cell["detail"]) == (
        "refused",
        "RuntimeError: input tensor has to be contiguous",
    )


def test_known_wrongs_fail_a_run_unless_a_baseline_has_them(gloo: tuple[Finished, Path]) -> None:
    finished, file = gloo
    assert finished.returncode == 1, finished.stderr
    few = ("--backend", "gloo", "--op", "all_reduce", "--form", "strided", "--dtype", "float32")
    again = run(*few, "--baseline", str(file))
    assert again.returncode == 0, again.stdout
    assert "BAD" in again.stdout, "it is still shown"
    assert "Each of them ended as in the baseline." in again.stdout


def table_of(text: str) -> list[str]:
    """The headline without torch's version, and the table; what is below it is prose."""
    lines = [line.rstrip() for line in text.splitlines()]
    end = next(n for n, line in enumerate(lines) if line.startswith("ok: "))
    return [re.sub(r"torch [^:]+", "torch", line) for line in lines[:end]]


@pytest.mark.sweep
def test_the_table_in_the_docs_is_the_one_that_is_printed(tmp_path: Path) -> None:
    """The whole of gloo; unit/test_probe_patterns.py has how tables are printed."""
    file = tmp_path / "gloo.json"
    finished = run("--backend", "gloo", "--json", str(file))
    docs = (ROOT / "docs" / "capabilities.md").read_text()
    written = re.search(r"```text\n(gloo on cpu.*?)```", docs, re.DOTALL)
    assert written is not None
    release = re.search(r"torch (\d+\.\d+)\.", written[1])
    assert release is not None
    if not torch.__version__.startswith(f"{release[1]}."):
        pytest.skip(f"the table is of torch {release[1]}")
    (sweep,) = read_sweeps(file)
    assert table_of(written[1]) == table_of(render_text(sweep, width=80))
    narrow = [line for line in table_of(finished.stdout) if line]
    assert narrow == [line for line in table_of(written[1]) if line]


BACKENDS = """
import os
import torch.distributed as dist

class Odd(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.place = rank

    def broadcast(self, tensors, opts):
        if self.place == 1 and self.mood == "dies":
            os.abort()
        raise RuntimeError("no")

def _register(mood):
    kind = type(mood, (Odd,), {"mood": mood, "getBackendName": lambda self: mood})
    dist.Backend.register_backend(mood, lambda *about: kind(*about), devices=["cpu"])
    return mood

def dies(): return _register("dies")
def refuses(): return _register("refuses")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own")
    (path / "mine.py").write_text(BACKENDS)
    return path


@pytest.mark.parametrize(
    ("backend", "code", "said"),
    [
        ("mine.py:dies", 4, "broadcast float32: rank 1, killed by SIGABRT"),
        ("mine:refuses", 5, "broadcast float32: RuntimeError: no"),
        ("mine.py", 2, "names a file but no object in it"),
        ("glue", 2, "unknown backend 'glue'"),
    ],
)
def test_ends_of_the_command(folder: Path, backend: str, code: int, said: str) -> None:
    finished = run("--backend", backend, *QUICK, cwd=folder)
    assert finished.returncode == code, finished.stdout + finished.stderr
    assert said in finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("returns_no_name", "returned 3; expected a function without arguments"),
        ("raises", "raised RuntimeError: no license"),
        ("WORLD", "is a int; expected a function"),
        ("other", "has no object 'other'"),
    ],
)
def test_backends_that_cannot_be_loaded(pool: Pool, backend: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        check_availability(pool, backend=f"tests.world.bad_backends:{backend}", device="", world=3)


def test_a_missing_backend_that_was_requested_exits_3(pool: Pool) -> None:
    if devices.gpu_count() >= 3:
        pytest.skip("here it can run")
    asked = run("--backend", "nccl", *QUICK)
    assert asked.returncode == 3
    assert "not available here: " in asked.stdout
    everything = run(*QUICK, "--json", "-")
    assert everything.returncode == 0, "gloo is right, and nobody asked for nccl"
    found = {one["backend"]: one for one in json.loads(everything.stdout)["backends"]}
    assert [cell["verdict"] for cell in found["gloo"]["cells"]] == ["right"]
    assert found["nccl"]["missing"]
    assert not found["nccl"]["cells"]
    if not devices.gpu_count():
        look = check_availability(pool, backend="gloo", device="cuda", world=3)
        assert look.missing == "torch detects no CUDA device"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "1"], "probed with 2 to 8 ranks"),
        (["--op", "allreduce"], "unknown --op 'allreduce'"),
        (["--device", "tpu"], "unknown --device 'tpu'"),
        (["--deadline", "0"], "--deadline 0 is out of range; it takes a number of"),
        (["--baseline", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_bad_words(words: list[str], said: str) -> None:
    finished = run(*words)
    assert finished.returncode == 2
    assert said in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


def test_help_imports_no_torch() -> None:
    program = (
        "import sys, distcheck.addons.backend_probe.command; from distcheck.cli import main\n"
        "sys.argv = ['distcheck', 'backends', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
