"""Plain English: words that make a sentence hard to read are in no message, docstring or page."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT, found, nodes, text_of

CODE = sorted(
    p for room in ("distcheck", "strategies", "examples") for p in (ROOT / room).rglob("*.py")
)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

# Each with the word to use in its place: see docs/glossary.md.
HARD = re.compile(
    r"\b(?:told|owe|owed|owes|nobody(?:'s)?|somebody(?:'s)?|anybody(?:'s)?|whoever)\b"
    r"|(?<!there )\bis no (?!longer|more\b)"  # "is not a", or say what it is
    r"|\bis none (?:that|of)\b"
    r"|\bof (?:its|theirs|hers)\."
    r"|\bis nothing (?:that|to be)\b"  # "is not supported", or say what is accepted
    r"|\bneed not work\b"
    r"|\bleave [\w-]+ away\b"  # "remove"
    r"|\bmakes no sense\b"  # "is malformed", or say what is expected
    r"|\bspeaks of\b"
    r"|\bhad left the right ones\b"
    r"|\bheld against\b"  # "compared with"
    r"|\bwanted is\b"  # "expected is", or "it takes"
    r"|\bto the bit where\b",
    re.IGNORECASE,
)


def hard_words(text: str) -> list[str]:
    """The words, with what is around them; a line break counts as a blank."""
    text = re.sub(r"\s+(?:# )?", " ", text)
    return [text[max(0, m.start() - 40) : m.end() + 30] for m in HARD.finditer(text)]


def texts_of(path: Path) -> Iterator[str]:
    """Messages, docstrings and comments of a module."""
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "X" for part in node.values
            )  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text_of(path)).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from comments


def test_code() -> None:
    assert not found(CODE, lambda path: [w for text in texts_of(path) for w in hard_words(text)])


def test_pages() -> None:
    assert not found(PAGES, lambda path: hard_words(text_of(path)))


@pytest.mark.parametrize(
    ("text", "hard"),
    [
        ("--world 0 is no world", True),
        ("a value for a parameter of its.", True),
        ("which is none that a world can have", True),
        ("what nobody\n    # reads", True),
        ("it is nothing that can be judged; leave --save away", True),
        ("results are held against one machine; wanted is a list", True),
        ("results are compared with one process; expected a list", False),
        ("where there is no rank, it is no longer needed, and is not a world", False),
    ],
)
def test_it_finds_them(text: str, hard: bool) -> None:
    assert bool(hard_words(text)) == hard
