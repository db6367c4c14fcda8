"""Writes what pages say of causes from the table of causes: every part between two markers.

python docs/make_causes.py
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from distcheck.records.causes import Cause, causes

FOLDER = Path(__file__).parent
PAGES = ("diagnosis.md", "jobs.md")
PART = re.compile(
    r"(<!-- causes: ([a-z ]+); made by docs/make_causes.py -->\n).*?(<!-- end -->)", re.S
)
HEAD = "| cause | named when | try | easily confused with |\n|---|---|---|---|\n"


def of_families(*families: str) -> str:
    """A table of the causes of families."""
    found = [cause for cause in causes().values() if cause.family in families]
    return HEAD + "".join(_row(c.name, c.when, c.repair, c.confused) for c in found)


def of_jobs() -> str:
    """A table of what jobs alone name, and of what shows otherwise there."""
    rows = [
        _row(cause.name, said.when, said.repair, said.confused)
        for cause, said in _of_jobs(causes().values())
    ]
    return HEAD + "".join(rows)


def _of_jobs(found: Iterable[Cause]) -> Iterator[tuple[Cause, Cause | object]]:
    for cause in found:
        if cause.family == "jobs":
            yield cause, cause
        elif cause.in_jobs is not None:
            yield cause, cause.in_jobs


def _row(name: str, when: str, repair: str, confused: str) -> str:
    return f"| `{name}` | {when} | {repair} | {confused} |\n".replace(" |  |", " | |")


def named_by(command: str) -> str:
    """The names of the causes that a command names, in a sentence's order."""
    names = [f"`{name}`" for name, cause in causes().items() if command in cause.by]
    lines, line = [], ""
    for name in (*(f"{name}," for name in names[:-1]), f"{names[-1]}."):
        if len(line) + len(name) > 100:
            lines, line = [*lines, line], ""
        line = f"{line} {name}".strip()
    return "\n".join([*lines, line]) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "gradients": lambda: of_families("gradients"),
    "layouts": lambda: of_families("layouts"),
    "beside": lambda: of_families("updates", "state", "runs"),
    "jobs": of_jobs,
    "named by job": lambda: named_by("job"),
    "named by guard": lambda: named_by("guard"),
}


def made(page: str) -> str:
    """The page with every such part made anew."""
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[3]}", page)


def main() -> None:
    """Writes the pages, to another folder where one is given."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name in PAGES:
        (folder / name).write_text(made((FOLDER / name).read_text()))


if __name__ == "__main__":
    main()
