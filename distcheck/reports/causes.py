"""Prints causes on a screen: the table of all causes, or one cause with its example."""

import re
from collections.abc import Iterator, Sequence
from textwrap import indent, wrap

from distcheck.records.causes import FAMILIES, Cause, causes
from distcheck.records.symptoms import Symptom

_HEADINGS = {
    "gradients": "In the gradients",
    "layouts": "In layouts",
    "updates": "In parameter updates, the loss and bit-identity",
    "state": "In state and data",
    "runs": "In runs and schedules",
    "jobs": "In whole jobs only",
    "scores": "In log-probabilities of two engines",
}
_WIDTH = 80
_MORE = "Run distcheck explain CAUSE for its symptoms, its fix, and an example."


def cause_list() -> Iterator[str]:
    """Yield lines that list every cause with its description, grouped by family."""
    table = causes()
    longest = max(map(len, table))
    for family in FAMILIES:
        yield f"{_HEADINGS[family]}:"
        for name, cause in table.items():
            if cause.family == family:
                yield from _format_labeled(name, _text(cause.what), longest)
        yield ""
    yield _MORE


def _format_labeled(label: str, text: str, width: int) -> Iterator[str]:
    first, *rest = wrap(text, _WIDTH - width - 4, break_on_hyphens=False)
    yield f"  {label:{width}}  {first}"
    yield from (f"  {'':{width}}  {line}" for line in rest)


def search_results(symptoms: Sequence[Symptom], found: Sequence[Cause]) -> Iterator[str]:
    """Yield the lines of a search result: symptoms with their commands, then causes."""
    for one in symptoms:
        yield one.text
        for number, line in enumerate(one.commands):
            yield f"  {'' if number else 'run':6}  {line}"
        yield from _format_labeled("causes", ", ".join(one.causes), 6)
        yield from _format_labeled("page", f"docs/{one.page}", 6)
        yield ""
    if found:
        yield "causes that match your words:"
        longest = max(len(cause.name) for cause in found)
        for cause in found:
            yield from _format_labeled(cause.name, _text(cause.what), longest)
        yield ""
    if any("COMMAND" in line for one in symptoms for line in one.commands):
        of_resume = any("--resume" in line.split() for one in symptoms for line in one.commands)
        yield "COMMAND is the command that starts your training."
        if of_resume:
            yield "--resume stands for your script's own option."
    yield _MORE


def cause_explanation(cause: Cause) -> Iterator[str]:
    """Yield lines that explain one cause: its description, symptoms, repair and example."""
    yield from wrap(f"{cause.name}: {_text(cause.what)}", _WIDTH, subsequent_indent="  ")
    yield ""
    yield "symptoms:" if len(cause.when) > 1 else "symptom:"
    for symptom in cause.when:
        yield from _item(symptom)
    if any(re.search(r"\bW\b", text) for text in cause.when):
        yield "  (W is the world size.)"
    for heading, text in (
        ("fix", cause.repair),
        ("easily confused with", cause.confused),
        ("needs", cause.needs),
        ("reported by", ", ".join(f"distcheck {name}" for name in cause.by)),
        ("known cases", ", ".join(cause.seen)),
    ):
        if "; " in text and heading != "needs":
            yield f"{heading}:"
            for part in text.split("; "):
                yield from _item(part)
        elif text:
            yield from wrap(f"{heading}: {_text(text)}", _WIDTH, subsequent_indent="  ")
    for heading, code in (("wrong", cause.wrong), ("right", cause.right)):
        yield ""
        yield f"{heading}:"
        yield indent(code.strip("\n"), "    ")


def _item(text: str) -> list[str]:
    return wrap(_text(text), _WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _text(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.split())).replace("`", "")
