"""The table of causes on a screen: all causes, or one with its example."""

import re
from collections.abc import Iterator
from textwrap import indent, wrap

from distcheck.records.causes import FAMILIES, Cause, causes

_HEADINGS = {
    "gradients": "In the gradients",
    "layouts": "In layouts",
    "updates": "In parameter updates, the loss and bit-identity",
    "state": "In state and data",
    "runs": "In runs and schedules",
    "jobs": "In whole jobs only",
}
_WIDTH = 80


def listed() -> Iterator[str]:
    """List every cause with its description, by family."""
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
    yield "distcheck explain CAUSE describes one, with a wrong and a right example."


def explained(cause: Cause) -> Iterator[str]:
    """Explain one cause: its description, symptoms, repair and example."""
    yield from wrap(f"{cause.name}: {_plain(cause.what)}", _WIDTH, subsequent_indent="  ")
    yield ""
    yield "symptoms:" if len(cause.when) > 1 else "symptom:"
    for symptom in cause.when:
        yield from wrap(_plain(symptom), _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    for heading, text in (
        ("repair", cause.repair),
        ("easily confused with", cause.confused),
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
