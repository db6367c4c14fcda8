"""Write the cause tables of the documentation: every section between two markers.

python docs/make_causes.py
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from distcheck.records.causes import Cause, CauseInJobs, causes
from distcheck.records.symptoms import symptoms

FOLDER = Path(__file__).parent
PAGES = ("diagnosis.md", "jobs.md", "guard.md", "symptoms.md")
PART = re.compile(
    r"(<!-- causes: ([a-z ]+); made by docs/make_causes.py -->\n).*?(<!-- end -->)", re.S
)
HEAD = "| cause | symptoms | fix | easily confused with |\n|---|---|---|---|\n"


def of_families(*families: str) -> str:
    """Return a table of the causes of some families."""
    found = [cause for cause in causes().values() if cause.family in families]
    return HEAD + "".join(_row(c.name, c.when, c.repair, c.confused) for c in found)


def of_jobs() -> str:
    """Return a table of the causes that only jobs name, or that have other symptoms there."""
    rows = [
        _row(cause.name, entry.when, entry.repair, entry.confused)
        for cause, entry in _of_jobs(causes().values())
    ]
    return HEAD + "".join(rows)


def _of_jobs(found: Iterable[Cause]) -> Iterator[tuple[Cause, Cause | CauseInJobs]]:
    for cause in found:
        if cause.family == "jobs":
            yield cause, cause
        elif cause.in_jobs is not None:
            yield cause, cause.in_jobs


def _row(name: str, when: Iterable[str], repair: str, confused: str) -> str:
    symptoms = "<br>".join(when)
    return f"| `{name}` | {symptoms} | {repair} | {confused} |\n".replace(" |  |", " | |")


def named_by(command: str) -> str:
    """Return the names of the causes that a command names, as the end of a sentence."""
    names = [f"`{name}`" for name, cause in causes().items() if command in cause.by]
    lines, line = [], ""
    for name in (*(f"{name}," for name in names[:-1]), f"{names[-1]}."):
        if len(line) + len(name) > 100:
            lines, line = [*lines, line], ""
        line = f"{line} {name}".strip()
    return "\n".join([*lines, line]) + "\n"


def of_symptoms() -> str:
    """Return the table of symptoms with their commands and causes."""
    rows = ["| symptom | command | causes it can report |\n|---|---|---|\n"]
    for one in symptoms().values():
        commands = "<br>".join(f"`{command}`" for command in one.commands)
        names = ", ".join(f"`{name}`" for name in one.causes)
        rows.append(f"| [{one.text}]({one.page}) | {commands} | {names} |\n")
    return "".join(rows)


PARTS: dict[str, Callable[[], str]] = {
    "gradients": lambda: of_families("gradients"),
    "layouts": lambda: of_families("layouts"),
    "updates and runs": lambda: of_families("updates", "state", "runs"),
    "scores": lambda: of_families("scores"),
    "jobs": of_jobs,
    "symptoms": of_symptoms,
    "named by job": lambda: named_by("job"),
    "named by guard": lambda: named_by("guard"),
}


def made(page: str) -> str:
    """Return a page with all of these sections regenerated."""
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[3]}", page)


def main() -> None:
    """Write the pages, optionally to another folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name in PAGES:
        (folder / name).write_text(made((FOLDER / name).read_text()))


if __name__ == "__main__":
    main()
