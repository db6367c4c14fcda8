"""What real ranks leave in a report for its pictures: a green run, then one that hangs."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.world.command import QUICK, Run
from tests.world.command import distcheck as console
from tests.world.warm import distcheck

__all__ = ["console", "distcheck"]

TURNS_BAD = """
import pathlib, time
import torch.distributed as dist

def sync(model, step):
    broken = pathlib.Path("broken").exists() and step.rank == 1 and step.index == 1
    for at, p in enumerate(model.parameters()):
        if broken and at == 2:
            time.sleep(1000)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
"""


@pytest.mark.sweep
def test_a_green_run_and_then_a_hang(distcheck: Run, console: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TURNS_BAD)
    verify = ("verify", "--strategy", "mine.py:sync", *QUICK)
    green = distcheck(*verify, "--json", "green.json", "--html", "green.html")
    assert green.returncode == 0, green.stderr
    document = json.loads((tmp_path / "green.json").read_text())
    assert document["since_green"] is None
    assert "The one case passed." in (tmp_path / "green.html").read_text("utf-8")
    found = {(c["check"], c["layer"]): c for c in document["cases"][0]["checks"]}
    rows = found["gradients", "rounding"]["map"]["rows"]
    assert len(rows) == 6
    assert all(0 <= float(share) < 1 for row in rows for share in row.split())
    assert set("".join(found["agreement", "-"]["map"]["rows"])) == {"="}

    (tmp_path / "broken").touch()
    (tmp_path / "mine.py").write_text(TURNS_BAD + "# edited since\n")
    hung = console(  # whose OpenMP reads the variable
        *verify, "--deadline", "5", "--json", "hung.json", env={"OMP_PROC_BIND": "true"}
    )
    assert hung.returncode == 4, hung.stdout
    document = json.loads((tmp_path / "hung.json").read_text())
    earlier = re.search(r"saved +\S+/(\S+)", green.stdout)
    assert earlier is not None
    assert document["since_green"]["run"] == earlier[1]
    change, *others = document["since_green"]["changes"]
    if len(os.sched_getaffinity(0)) > 1:
        assert "cores" in {other["name"] for other in others}, "what OMP_PROC_BIND did"
    assert (change["kind"], change["name"]) == ("code", "strategy mine.py:sync")
    assert change["then"] != change["now"]
    calls = {o["rank"]: o["collectives"] for o in document["cases"][0]["outcomes"]}
    assert len(calls[0]) == len(calls[1]) + 1
    last = calls[0][-1]
    assert (last["name"], last["finished"], last["shapes"]) == ("all_reduce", False, "64x128")
    assert [c["shapes"] for c in calls[1]] == [c["shapes"] for c in calls[0][:-1]]
    rendered = distcheck("report", "hung.json", "--html", "hung.html")
    assert rendered.returncode == 0, rendered.stderr
    text = (tmp_path / "hung.html").read_text("utf-8")
    assert f"Call {last['number']} is missing on rank 1." in text
    again = distcheck("report", document["cases"][0]["replay"].split()[2], "--html", "no.html")
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
