"""How many cores there are to fill, in a container with a quota as well."""

import os
from pathlib import Path

import pytest

from distcheck.machine import resources


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 8),
        ("0::/\n", {}, 8),
        ("", {}, 8),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 8),
        # the limit of a slice above holds as well
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "500000 100000\n"}, 5),
        # within a container the path may be the host's, and the folder the container's own
        ("0::/docker/1234\n", {"cpu.max": "400000 100000\n"}, 4),
        # version 1: a file for each
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n2:cpuset:/\n",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
                "cpuset/cpu.max": "100000 100000\n",
            },
            3,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_quota_bounds_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, files: dict[str, str], found: int
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(groups)
    monkeypatch.setattr(resources, "_MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(resources, "_OF_THIS_PROCESS", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert resources.cores() == found
