"""The examples of whole jobs, and the bugs that are planted in them."""

import tomllib
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "examples" / "jobs"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))


class Bug(NamedTuple):
    name: str
    script: str
    find: str
    put: str
    cause: str
    where: str = ""  # the line that must be named; not looked at where it is left out
    options: tuple[str, ...] = ()  # without --strict a remark, where that is the cause


BUGS = [Bug(**bug) for bug in tomllib.loads((FOLDER / "planted.toml").read_text())["bug"]]


def plant(bug: Bug, folder: Path) -> Path:
    """The wrong script, in a folder of its own."""
    right = (FOLDER / bug.script).read_text()
    assert right.count(bug.find) == 1, f"{bug.name}: the edit fits {right.count(bug.find)} places"
    wrong = folder / bug.script
    wrong.write_text(right.replace(bug.find, bug.put))
    return wrong
