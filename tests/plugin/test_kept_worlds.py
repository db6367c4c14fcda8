"""Kept worlds: the same processes, nothing carried over, a new world after a failure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent / "examples" / "test_kept.py"


def test_kept_worlds(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES, tmp_path)
    pids = tmp_path / "pids"
    pids.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "--tb=short"],
        cwd=tmp_path,
        env={**os.environ, "KEPT_PIDS": str(pids), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    text = done.stdout
    assert "2 failed, 24 passed, 1 skipped" in text, text
    assert "test_fails - rank 1 of 3: assert 1 != 1" in text
    assert "what the test is given cannot be sent to a kept world (cannot_be_sent: Can't" in text
    assert "test_first left on rank 0, 1: 1 process group not destroyed" in text
    for rank in range(3):
        *kept, last = (pids / str(rank)).read_text().split()
        assert len(kept) == 22
        assert len(set(kept)) == 1, "one process for all tests"
        assert last != kept[0], "another one after a failure"
