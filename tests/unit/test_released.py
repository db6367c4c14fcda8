"""The manifest of `bench/released/` names scripts, objects and causes that exist."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from distcheck.records.causes import causes

FOLDER = Path(__file__).parents[2] / "bench" / "released"
MANIFEST = tomllib.loads((FOLDER / "manifest.toml").read_text())
FINDINGS, NEIGHBORS = MANIFEST["finding"], MANIFEST["neighbors"]
SAID = {"promise", "where", "figure", "reported", "sure"}


def test_findings_say_what_is_promised_and_name_known_causes() -> None:
    for finding in FINDINGS:
        assert set(finding) >= SAID, finding["name"]
        assert finding["cause"] in causes(), finding["name"]
        assert finding["reported"] or "after" not in finding, finding["name"]


def test_scripts_have_what_the_manifest_names() -> None:
    for entry in [*FINDINGS, *NEIGHBORS]:
        text = (FOLDER / entry["script"]).read_text()
        named = [entry[key] for key in ("object", "control") if key in entry]
        for name in [*named, *entry.get("objects", [])]:
            assert name.split()[0] in text or name.rpartition("_")[2] in text, name


def test_names_are_unique() -> None:
    names = [entry["name"] for entry in [*FINDINGS, *NEIGHBORS]]
    assert len(names) == len(set(names))


@pytest.mark.released
@pytest.mark.parametrize("name", ["vq-lfq", "lightly-barlow-twins", "pml-no-factor"])
def test_the_runner_finds_what_the_manifest_says(name: str) -> None:
    ran = subprocess.run([sys.executable, str(FOLDER / "run.py"), name], timeout=500)
    assert ran.returncode == 0
