"""Whoever forks often has its memory in large pages: the pytest process, and distcheck's helper."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from distcheck.worlds.pool import Pool
from tests.large_pages import large_bytes, skip_where_nothing_is_gathered
from tests.world.launching import run

ROOT = Path(__file__).parents[2]
ENOUGH = 64 << 20  # of 250 MB that importing torch has written

WORLDS = """
import os, pytest, torch
from tests.large_pages import large_bytes

@pytest.mark.world(1)
@pytest.mark.parametrize("number", range(4))
def test_world(world, number): pass

def test_after(): print("large pages", large_bytes(os.getpid()))
"""


@pytest.mark.sweep
def test_the_pytest_process_gathers_before_its_fourth_world(tmp_path: Path) -> None:
    skip_where_nothing_is_gathered()
    (tmp_path / "test_worlds.py").write_text(WORLDS)
    found = {}
    for last in ("2", "3"):
        chosen = [f"test_worlds.py::test_world[{n}]" for n in range(int(last) + 1)]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *chosen,
             "test_worlds.py::test_after"],
            cwd=tmp_path, capture_output=True, text=True, timeout=400,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert "passed" in ran.stdout, ran.stdout + ran.stderr
        found[last] = int(ran.stdout.partition("large pages ")[2].split()[0])
    assert found["2"] < ENOUGH <= found["3"]


def test_the_helper_gathers_in_a_long_run(pool: Pool) -> None:
    skip_where_nothing_is_gathered()
    helpers = set()
    for _ in range(8):
        _, results = run(pool, "everything_fine", 8)
        helpers |= {msgspec.msgpack.decode(result)["parent"] for result in results}
    (helper,) = helpers
    assert large_bytes(helper) >= ENOUGH
