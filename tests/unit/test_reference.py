"""docs/reference is what the code says."""

import subprocess
import sys
from pathlib import Path

from tests.optional import needs_all

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"


@needs_all
def test_the_reference_is_up_to_date(tmp_path: Path) -> None:
    """In a process of its own: click remembers how a command was asked for help before."""
    made = [sys.executable, str(ROOT / "docs" / "make_reference.py"), str(tmp_path)]
    subprocess.run(made, check=True, cwd=ROOT)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in PAGES.iterdir())
    for name in names:
        # Versions of click break lines differently.
        written, wanted = ((folder / name).read_text().split() for folder in (PAGES, tmp_path))
        assert written == wanted, "run: python docs/make_reference.py"


@needs_all
def test_the_drawing_of_the_layers_is_up_to_date(tmp_path: Path) -> None:
    made = [sys.executable, str(ROOT / "docs" / "make_layers.py"), str(tmp_path / "layers.svg")]
    subprocess.run(made, check=True, cwd=ROOT)
    wanted = (tmp_path / "layers.svg").read_text()
    assert (ROOT / "docs" / "layers.svg").read_text() == wanted, "run: python docs/make_layers.py"


@needs_all
def test_every_command_and_every_promise_is_in_it() -> None:
    from distcheck.cli.commands import COMMANDS
    from distcheck.contract import Contract

    commands = (PAGES / "commands.md").read_text()
    assert all(f"## distcheck {name}\n" in commands for name in COMMANDS)
    python = (PAGES / "python.md").read_text()
    assert all(f"    {field}: " in python for field in Contract.__struct_fields__)
