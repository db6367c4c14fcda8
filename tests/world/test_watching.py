"""`distcheck verify --watch`: a process that runs again whenever code is saved."""

import importlib.util
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from distcheck.cli.watching import watch_command
from distcheck.errors import CannotRunError
from tests.world.command import COMMAND, QUICK, Run, hear_interrupts
from tests.world.warm import distcheck as distcheck

SYNC = """
import torch.distributed as dist
from parts import divisor

def sync(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= divisor()
"""
PARTS = "import torch.distributed as dist\ndef divisor(): return dist.get_world_size()\n"


def test_every_save_is_judged_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SYNC)
    (tmp_path / "parts.py").write_text(PARTS)
    process = subprocess.Popen(
        [*COMMAND, "verify", "--strategy", "s.py:sync", *QUICK, "--watch"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "COLUMNS": "100"}, preexec_fn=hear_interrupts,
    )  # fmt: skip
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())

    threading.Thread(target=read, daemon=True).start()

    def until_it_waits() -> list[str]:
        found = [lines.get(timeout=200)]
        while not found[-1].startswith("distcheck: watching 3 files"):
            found.append(lines.get(timeout=200))
        return found

    try:
        assert any(line.startswith("PASS    s.py:sync") for line in until_it_waits())
        helpers = {child.pid for child in psutil.Process(process.pid).children()}
        for text, said in (
            (PARTS.replace("dist.get_world_size()", "1"), "FAIL    s.py:sync   2 ranks: missing-"),
            (PARTS.replace("def", "deff"), "distcheck: strategy file "),
            (PARTS, "PASS    s.py:sync"),
        ):
            (tmp_path / "parts.py").write_text(text)
            assert any(line.startswith(said) for line in until_it_waits()), said
        assert {child.pid for child in psutil.Process(process.pid).children()} == helpers
        left = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, "the last run passed"
        psutil.wait_procs(left, timeout=30)
        assert not [child for child in left if child.is_running()]
    finally:
        process.kill()
        process.wait()


def test_what_does_not_go_with_it_is_said(distcheck: Run) -> None:
    ran = distcheck("verify", "--strategy", "bad.py:good", *QUICK, "--watch", "--save", "there")
    assert ran.returncode == 2
    assert "--watch cannot be combined with --save: it reruns here on every change" in ran.stderr
    unknown = distcheck("verify", "--strategy", "no_such", *QUICK, "--watch")
    assert unknown.returncode == 2, "it does not wait for a file that it cannot know"


def test_without_its_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], object] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "watchfiles" else find(name)
    )
    with pytest.raises(CannotRunError, match=r"run pip install 'distcheck\[watch\]'"):
        watch_command(lambda: pytest.fail("nothing is planned"), None, download=False)  # type: ignore[arg-type]
