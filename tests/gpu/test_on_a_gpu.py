"""The program that is run where a GPU is, as far as it can be tried where none is."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from distcheck.machine import devices
from tests.gpu.prepare import thinned
from tests.optional import needs
from tests.waiting import wait_until
from tests.world.command import ROOT

HERE = Path(__file__).parent
PROGRAM = HERE / "on_a_gpu.py"
pytestmark = pytest.mark.skipif(devices.gpu_count() > 0, reason="this machine has a GPU")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program and its parts, which are imported as they are there: from their own folder."""
    monkeypatch.syspath_prepend(str(HERE))
    import on_a_gpu
    import parts

    return on_a_gpu, parts


def run(out: Path, *words: str) -> tuple[str, dict[str, Any]]:
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), *words], cwd=out, capture_output=True, text=True,
        timeout=400, env={**os.environ, "OUT": str(out)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, json.loads((out / "results.json").read_text())


def test_without_a_gpu_it_is_said_of_each_part(tmp_path: Path) -> None:
    names = ("about", "nccl, 2 ranks, ddp")
    table, document = run(tmp_path, *(word for name in names for word in ("--only", name)))
    states = {part["part"]: part["state"] for part in document["parts"]}
    assert states == dict.fromkeys(names, "no GPU")
    assert "nccl, 2 ranks, ddp " in table


@pytest.mark.sweep
def test_a_rehearsal_on_the_cpu_has_figures(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--small", "--only", "gloo, 4 ranks, ddp", "--only", "mutants, 1")
    table, document = run(tmp_path, *words)
    verified, planted = document["parts"]
    assert (verified["state"], planted["state"]) == ("as expected", "as expected"), table
    figures = verified["figures"]
    assert figures["passed"] == "2 of 2"
    assert 0 < figures["most of a bound"] < 1
    assert planted["figures"] == {
        "planted": 1, "caught": 1, "named_right": 1, "named_wrong": 0, "odd": {},
    }  # fmt: skip
    assert "gloo, 4 ranks, ddp/r" in json.loads((tmp_path / "reports.json").read_text())


HANGS = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))
print("{", flush=True)
time.sleep(600)
"""


def has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_hangs_and_what_cannot_be_read_stop_no_other(own: Any, tmp_path: Path) -> None:
    on_a_gpu, parts = own
    place = parts.Place(device="cpu", small=True, site=str(tmp_path), root=str(ROOT))
    began = [sys.executable, "-c"]
    planned = [
        parts.Part("hangs", [*began, HANGS], 5.0, parts.read_lines),
        parts.Part("prints no JSON", [*began, "print('{')"], 30.0, parts.read_printed),
        parts.Part("fails", [*began, "exit(7)"], 30.0, parts.read_lines),
        parts.Part("may end so", [*began, "exit(7)"], 30.0, parts.read_lines, code=None),
        parts.Part("is not there", ["/nowhere"], 30.0, parts.read_lines),
        parts.Part("is right", [*began, "print('{\"a\": 1}')"], 30.0, parts.read_printed),
    ]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    begun = time.monotonic()
    made = on_a_gpu.Run(tmp_path, place, begun + 600, scratch)
    made.phase(planned, 2)
    made.close()
    assert [result.state for result in made.results] == [
        "ended after 5 s", "as expected", "NOT as expected", "exit code 7", "not run",
        "as expected",
    ]  # fmt: skip
    assert made.results[1].figures["not read"].startswith("JSONDecodeError")
    assert made.results[-1].figures == {"a": 1}
    child = int((scratch / "hangs" / "child").read_text())
    wait_until(lambda: has_ended(child))  # a killed process ends some time after the signal


def test_the_time_that_is_left_is_shared(own: Any, tmp_path: Path) -> None:
    on_a_gpu, parts = own
    place = parts.Place(device="cpu", small=True, site="", root="")
    made = on_a_gpu.Run(tmp_path, place, time.monotonic() + 1, tmp_path)
    made.phase([parts.Part("late", ["true"], 30.0, parts.read_lines)], 1)
    made.close()
    assert made.results[0].state == "no time left"


def test_files_stand_for_an_installation(own: Any, tmp_path: Path) -> None:
    """Entry points and packages, without those that are installed for this Python."""
    on_a_gpu, _ = own
    on_a_gpu.make_site(tmp_path / "site")
    program = (
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "from importlib.metadata import entry_points, version\n"
        "points = entry_points(group='distcheck.strategies')\n"
        "print(version('distcheck'), points['ddp'].value)\n"
        "print('distcheck' in entry_points(group='pytest11').names)\n"
        "import importlib.util\n"
        "print(bool(importlib.util.find_spec('distcheck_mutants.small')))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"},
    )  # fmt: skip
    assert ran.stdout.split()[1:] == ["distcheck_strategies.ddp:DDP", "True", "True"], ran.stderr


@needs("selftest")
def test_the_mutants_are_there_and_one_pattern_is_one_mutant(own: Any) -> None:
    from distcheck.addons.selftest.command import installed_zoo, plan_selftest

    _, parts = own
    zoo = installed_zoo()
    plan = plan_selftest(zoo, patterns=parts.MUTANTS, device="cuda")
    assert len(plan.mutants) == len(parts.MUTANTS) == 40
    families = {mutant.file for mutant in zoo.mutants} - {mutant.file for mutant in plan.mutants}
    assert families == {
        "compressed", "exchanging", "pipelines", "process", "servers", "tokens", "subtle.process"
    }  # fmt: skip


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 257, 64, len(payload)) + bytes(12)
    return (head + struct.pack("<I", architecture)).ljust(64, b"\0") + payload


def test_a_library_keeps_the_code_of_one_architecture() -> None:
    code, other, ptx = b"\x01" * 24, b"\x02" * 32, b"\x03" * 16
    entries = entry(2, 90, code) + entry(2, 100, other) + entry(1, 90, ptx)
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    alike = struct.pack("<IHH", 0xBA55ED50, 7, 7)  # and no fat binary
    library = b"head" + alike + fat + b"tail"
    thin, kept = thinned(library, 90)
    assert kept == len(code)
    assert len(thin) == len(library)
    assert thin == library.replace(other, bytes(len(other))).replace(ptx, bytes(len(ptx)))
    unknown = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry(9, 90, code))) + entry(9, 90, code)
    with pytest.raises(ValueError, match="unknown kind 9"):
        thinned(unknown, 90)
