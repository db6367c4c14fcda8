"""The table of causes on a screen: all of them, or one with its example."""

import re
from collections.abc import Iterator
from textwrap import indent, wrap

from distcheck.records.causes import FAMILIES, Cause, causes

_HEADINGS = {
    "gradients": "In the gradients",
    "layouts": "In layouts",
    "updates": "In the update, the loss and its last bits",
    "state": "In state and data",
    "runs": "In how ranks run",
    "jobs": "In whole jobs alone",
}
_WIDTH = 80


def listed() -> Iterator[str]:
    """Every cause with what it is, a line each, by family."""
    table = causes()
    longest = max(map(len, table))
    for family in FAMILIES:
        yield f"{_HEADINGS[family]}:"
        for name, cause in table.items():
            if cause.family == family:
                first, *rest = wrap(_plain(cause.what), _WIDTH - longest - 4)
                yield f"  {name:{longest}}  {first}"
                yield from (f"  {'':{longest}}  {line}" for line in rest)
        yield ""
    yield "distcheck explain CAUSE shows one, with a wrong and a right example."


def explained(cause: Cause) -> Iterator[str]:
    """One cause: what it is, how it shows, an example, and what to do."""
    yield from wrap(f"{cause.name}: {_plain(cause.what)}", _WIDTH, subsequent_indent="  ")
    yield ""
    for heading, text in (
        ("seen as", cause.when),
        ("repair, or look at", cause.repair),
        ("not to be confused with", cause.confused),
        ("needs", cause.needs),
        ("named by", ", ".join(f"distcheck {name}" for name in cause.by)),
        ("reported in", ", ".join(cause.seen)),
    ):
        if text:
            yield from wrap(f"{heading}: {_plain(text)}", _WIDTH, subsequent_indent="  ")
    for heading, code in (("wrong", cause.wrong), ("right", cause.right)):
        yield ""
        yield f"{heading}:"
        yield indent(code.strip("\n"), "    ")


def _plain(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.split())).replace("`", "")
