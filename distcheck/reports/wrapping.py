"""Wraps text for a screen. Numbers are not broken or separated from their units, and no line ends
in spaces.
"""

import re
import textwrap

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from distcheck.records import VerdictName
from distcheck.reports.wording import STYLE

VERDICT = 8  # columns of a verdict, with a space
CUT = "..."  # ends a text that is complete elsewhere
_GLUE = "\u00a0"  # a space without a line break in `textwrap`; printed as an ordinary one
_NAMED = re.compile(
    r"\b(steps?|ranks?|error|bound|got|expected|norm|world|batch|seed|of|over) (?=-?[\d.])"
)
_COUNTED = re.compile(r"(?<=\d) (?=(?:ULP|[MG]|m?s|%|[KMG]i?B|steps|ranks|cases|of)\b)")
# Possible breaks of a word longer than a line: after these, never within a number.
_BREAK = re.compile(r"[/\\_.,;:=|)\]}\[(](?!(?<=\d.)\d)|(?<=[^\W\d])-(?=[^\W\d])")
_LEAST = 20  # columns of text, however narrow the screen


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text. Each has at most `width` characters and no trailing spaces."""
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        glued = _COUNTED.sub(_GLUE, _NAMED.sub(rf"\1{_GLUE}", line))
        words = " ".join(_break_word(word, width) for word in glued.split(" "))
        wrapped = textwrap.wrap(
            words,
            width,
            break_long_words=True,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines += [part.replace(_GLUE, " ").rstrip() for part in wrapped or [""]]
    return lines


def _break_word(word: str, width: int) -> str:
    if len(word) <= width:
        return word
    if _GLUE in word:  # too long together
        return " ".join(_break_word(part, width) for part in word.split(_GLUE))
    parts = []
    while len(word) > width:
        ends = [found.end() for found in _BREAK.finditer(word) if found.end() <= width]
        end = ends[-1] if ends else width
        parts.append(word[:end])
        word = word[end:]
    return " ".join(filter(None, [*parts, word]))


def wrap_hanging(text: str, width: int, *, first: str, indent: int) -> list[str]:
    """Wrap a text with a hanging indent. The first line begins with `first`."""
    head, *rest = wrap(text, max(width - indent, _LEAST))
    lines = [f"{first:<{indent}}{head}", *(f"{'':<{indent}}{line}" for line in rest)]
    return [line.rstrip() for line in lines]


def wrap_limited(text: str, width: int, *, first: str, indent: int, most: int) -> list[str]:
    """Wrap a text in at most `most` lines. A text that does not fit loses its last clauses or is
    cut, and ends with `CUT`.
    """
    lines = wrap_hanging(text, width, first=first, indent=indent)
    clauses = text.split("; ")
    while len(lines) > most and len(clauses) > 1:
        clauses.pop()
        lines = wrap_hanging("; ".join([*clauses, CUT]), width, first=first, indent=indent)
    if len(lines) > most:
        lines = lines[:most]
        lines[-1] = f"{lines[-1][: width - 4].rpartition(' ')[0]} {CUT}"
    return lines


def print_hanging(
    text: str, console: Console, *, indent: int, first: str = "", style: str = ""
) -> None:
    for line in wrap_hanging(text, console.width, first=first, indent=indent):
        console.print(Text(line, style=style), soft_wrap=True)


def print_verdict(text: str, verdict: VerdictName, console: Console, *, bold: str) -> None:
    """Print a verdict and its subject. The subject begins with the `bold` part."""
    head, *rest = wrap_hanging(text, console.width, first=verdict.upper(), indent=VERDICT)
    first = Text(head)
    first.stylize(STYLE[verdict], 0, VERDICT)
    first.stylize("bold", VERDICT, VERDICT + len(bold))
    for line in (first, *map(Text, rest)):
        console.print(line, soft_wrap=True)


class LabeledLines:
    """Lines with labels; their texts are aligned when they are printed."""

    def __init__(self, console: Console, *, indent: int = 6) -> None:
        self._console, self._indent = console, indent
        self._found: list[tuple[str, str, int | None]] = []

    def add(self, label: str, text: str, *, most: int | None = 1) -> None:
        """Add a text, unless it is empty. It may have at most `most` lines; clauses that do not fit
        are omitted. None means no limit; 0 means one complete line that is not wrapped, so that it
        can be copied.
        """
        if text:
            self._found.append((label, text, most))

    def print(self) -> bool:
        """Print all lines. Return True if any text was cut."""
        cut = False
        width = max((len(label) for label, *_ in self._found), default=0)
        indent = self._indent + width + 2
        for label, text, most in self._found:
            first = f"{'':<{self._indent}}{label}"
            found = [f"{first:<{indent}}{text}"]
            if most is None:
                found = wrap_hanging(text, self._console.width, first=first, indent=indent)
            elif most:
                found = wrap_limited(
                    text, self._console.width, first=first, indent=indent, most=most
                )
            cut |= found[-1].endswith(CUT)
            for line in found:
                whole = Text(line)
                whole.stylize("bold", 0, self._indent + width)
                self._console.print(whole, soft_wrap=True)
        return cut


def print_trimmed(what: RenderableType, console: Console) -> None:
    """Print without the trailing spaces that fill lines up to the width of the console."""
    for line in console.render_lines(what, pad=False):
        while line and not line[-1].text.rstrip():
            line.pop()
        if line:
            line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
        console.print(Segments([*line, Segment.line()]), end="")
