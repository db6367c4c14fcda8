"""What a job prints into a pipe arrives in order, and a reader that leaves ends no rank."""

import subprocess
import sys
from pathlib import Path

import pytest

# The printing process stands for a rank; its exit code is what `distcheck job` would see.
PROGRAM = """
import subprocess, sys
from distcheck.job.running import relay_output
rank = "import sys\\nfor n in range(20000):\\n"
rank += "    print(n, file=(sys.stdout, sys.stderr)[n % 2], flush=True)"
with relay_output() as streams:
    ran = subprocess.run([sys.executable, "-c", rank], **streams)
open("code", "w").write(str(ran.returncode))
"""


@pytest.mark.parametrize(
    ("behind", "lines"),
    [
        ("2>&1 | cat", 20_000),
        ("2>/dev/null | cat", 10_000),
        ("2>&1 | head -3", 3),
        ("2>&1 | true", 0),
    ],
)
def test_unread_messages_are_dropped(behind: str, lines: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} program.py {behind}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (tmp_path / "code").read_text() == "0"
    step = 1 if "&1" in behind else 2
    assert ran.stdout.split() == [str(n) for n in range(0, lines * step, step)]
