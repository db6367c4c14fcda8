"""What is printed, compared to the letter with tests/snapshots/.

After a change that is meant, run with DISTCHECK_UPDATE_SNAPSHOTS=1 and read the difference.
"""

import os
from pathlib import Path

SNAPSHOTS = Path(__file__).parent / "snapshots"


def compare(name: str, text: str) -> None:
    """Holds a text against the stored one of that name; blanks at the ends of lines are nothing."""
    path = SNAPSHOTS / name
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("DISTCHECK_UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
