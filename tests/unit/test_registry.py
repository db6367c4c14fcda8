"""The core works without the add-ons, and names the one that a request needs."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

from distcheck import backends, registry
from distcheck.cli import root_command
from distcheck.cli.commands import COMMANDS
from distcheck.errors import DistcheckError
from distcheck.worlds.callers import PACKAGES
from tests.sources import ROOT


@pytest.mark.skipif(not (ROOT / "distcheck/addons").exists(), reason="all were removed")
def test_every_add_on_is_listed_and_installed() -> None:
    folders = {path.parent.name for path in (ROOT / "distcheck/addons").glob("*/__init__.py")}
    assert folders == {*registry.ADDONS}
    assert {*registry.BACKENDS} <= {*registry.ADDONS}
    assert {place.partition(".")[0] for place in registry.COMMANDS.values()} <= {*registry.ADDONS}
    assert {*registry.COMMANDS} <= {*COMMANDS}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the folder of every add-on had been removed."""
    monkeypatch.setattr(registry, "is_installed", lambda name: False)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("explore --strategy ddp", "explore"),
        ("scale --strategy ddp", "simulated"),
        ("verify --strategy ddp --backend simulated:tree", "simulated"),
        ("verify --strategy ddp --backend mpi", "mpi"),
        ("verify --strategy ddp --on ray", "engines"),
    ],
)
def test_a_request_for_one_that_was_removed_names_it(words: str, name: str) -> None:
    error = CliRunner().invoke(root_command, words.split(), standalone_mode=False).exception
    assert isinstance(error, DistcheckError)
    assert re.match(rf"the add-on '{name}' (\(.*\) )?is not installed; reinstall ", str(error))


@pytest.mark.usefixtures("without")
def test_what_was_removed_is_not_offered() -> None:
    shown = CliRunner().invoke(root_command, ["--help"]).output
    listed = re.findall(r"^  ([a-z]+)  ", shown.partition("Commands:")[2], re.M)
    assert {*listed} == {*COMMANDS} - {*registry.COMMANDS}
    assert backends.backend_names() == ["gloo", "nccl"]
    assert backends.missing("mpi") == "the add-on 'mpi' is not installed; reinstall distcheck"


def interpreter(folder: Path, *, root: Path) -> Path:
    """A Python with the packages of this one and distcheck from `root`. PYTHONPATH is not enough:
    ranks search the current folder last, after that of an editable installation.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    there = [entry for entry in sys.path if Path(entry).name in PACKAGES]
    (packages / "distcheck.pth").write_text("\n".join([str(root), *there]))
    python, scripts = folder / "bin" / "python", Path(sysconfig.get_path("scripts"))
    for script in scripts.iterdir():
        first, _, rest = (
            script.read_bytes().partition(b"\n") if script.is_file() else (b"", b"", b"")
        )
        if first.startswith(f"#!{scripts}/python".encode()):
            (python.parent / script.name).write_bytes(f"#!{python}\n".encode() + rest)
            (python.parent / script.name).chmod(0o755)
    return python


@pytest.mark.sweep
def test_the_rest_passes_without_them(tmp_path: Path) -> None:
    """The whole suite, in a copy without the add-ons and their tests: half an hour."""
    root = tmp_path / "copy"
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for file in listed:
        if not file.startswith(("distcheck/addons/", "tests/addons/")):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, root / file, follow_symlinks=False)
    for words in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(words, cwd=root, check=True)
    python = interpreter(tmp_path / "env", root=root)
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    ran = subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"],
        cwd=root, env={**os.environ, "PATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-5000:]
