"""The language of pages, causes and docstrings, by rate: nouns instead of "what"-clauses,
imperative advice, no vague predicates, American spelling.

torch.distributed and pytest use "what" 0.2 to 0.3 times per 1,000 words of their docstrings.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from distcheck.records.causes import causes, shared_suggestions
from tests.sources import PACKAGE, ROOT, found, nodes, text_of

_MOST_WHAT = 3.0  # per 1,000 words
_MOST_OPENINGS = 0.02  # of docstrings
# docs/reference/ is generated from help texts and docstrings.
PAGES = [
    page
    for place in (ROOT, ROOT / "docs", ROOT / "docs" / "decisions")
    for page in sorted(place.glob("*.md"))
]
# Packages with docstrings in the language of this test; "." stands for the modules of distcheck/.
PACKAGES = [".", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))]
OPENS_A_DOCSTRING_VAGUELY = re.compile(r"(?:What|Whether|Which|Where|Of|Those|As|By)\b")
BANNED_IN_DOCSTRINGS = re.compile(
    r"\b(?:beside|alike|unlike|apart|mend(?:s|ed|ing)?|slip(?:s|ped)?|told|owed|whoever)\b",
    re.IGNORECASE,
)
VAGUE = re.compile(r"\b(?:beside|alike|unlike|apart|mend(?:s|ed|ing)?|slips?)\b", re.IGNORECASE)
OPENS_VAGUELY = re.compile(r"(?:What|Which|Whether|Where|Of|Those|That)\b", re.IGNORECASE)
VERBS = frozenset(
    re.findall(
        r"\S+",
        "add all-reduce average avoid broadcast build call change check clear clip communicate "
        "compare compute create declare divide do draw exclude fix gather give include keep leave "
        "let load look make match multiply name pack pass post promise put read recompute reduce "
        "remove run save scale seed select send shuffle skip sort start step store sum synchronize "
        "test use verify wait weight wrap zero",
    )
)
_CONDITIONS = ("if ", "or ", "or, ")  # they may come before the verb
_TITLES = re.compile(r"\[What (?:equal\s+means|is where)\]", re.IGNORECASE)  # of pages


def prose(text: str) -> str:
    """A page without code, titles of other pages, links' targets and HTML."""
    text = _TITLES.sub(" ", text)
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"^ {4,}\S.*$|`[^`]*`|\]\([^)]*\)|<[^>]+>", " ", text, flags=re.MULTILINE)


def what_rate(text: str) -> float:
    """How often "what" occurs per 1,000 words."""
    words = re.findall(r"[A-Za-z']+", text)
    return 1000 * sum(word.lower() == "what" for word in words) / max(1, len(words))


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yield every docstring of a package of distcheck, with its place; code is left out."""
    folder = ROOT / "distcheck" / package
    for path in sorted(folder.glob("*.py") if package == "." else folder.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None:
                    name = getattr(node, "name", "module")
                    yield f"{path.relative_to(ROOT)} {name}", prose(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_nouns_and_exact_predicates(page: Path) -> None:
    text = prose(text_of(page))
    words = len(re.findall(r"[A-Za-z']+", text))
    assert what_rate(text) <= max(_MOST_WHAT, 2000 / max(1, words)), "name the thing itself"
    assert VAGUE.findall(text) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_use_nouns_and_exact_predicates(package: str) -> None:
    found = list(docstrings(package))
    assert found
    opened = [one for one in found if OPENS_A_DOCSTRING_VAGUELY.match(one[1])]
    assert len(opened) <= _MOST_OPENINGS * len(found), opened
    assert what_rate(" ".join(text for _, text in found)) <= _MOST_WHAT, [
        one for one in found if re.search(r"\bwhat\b", one[1], re.IGNORECASE)
    ]
    assert [one for one in found if BANNED_IN_DOCSTRINGS.search(one[1])] == []


def entries() -> Iterator[tuple[str, str, str]]:
    """Every text of the causes: cause, field, text."""
    for name, cause in causes().items():
        yield name, "what", cause.what
        yield from ((name, "when", one) for one in cause.when)
        yield from ((name, "repair", one) for one in [cause.repair])
        yield from ((name, "confused", one) for one in [cause.confused] if one)
        yield from ((name, "suggestion", one) for one in cause.suggestions.values())
        if cause.in_jobs is not None:
            yield from ((name, "when", one) for one in cause.in_jobs.when)
            yield name, "repair", cause.in_jobs.repair
    yield from (("shared", "suggestion", one) for one in shared_suggestions().values())


def test_causes_use_nouns_and_exact_predicates() -> None:
    texts = list(entries())
    assert what_rate(" ".join(prose(text) for _, _, text in texts)) <= _MOST_WHAT
    assert [
        one for one in texts if VAGUE.search(prose(one[2])) or OPENS_VAGUELY.match(one[2])
    ] == []


def is_imperative(text: str) -> bool:
    """Return True if advice begins with a verb, possibly after a condition."""
    parts = (
        re.split(r"[,;:] ", text.removeprefix("or, ")) if text.startswith(_CONDITIONS) else [text]
    )
    words = (re.match(r"(?:or )?([A-Za-z-]+)", part.strip("`")) for part in parts)
    return any(word is not None and word[1].lower() in VERBS for word in words)


def test_advice_begins_with_a_verb() -> None:
    advice = [one for one in entries() if one[1] in ("repair", "suggestion") and one[2] != "{how}"]
    assert len(advice) > 200
    assert [one for one in advice if not is_imperative(one[2])] == []


def test_spelling_is_american() -> None:
    folder = ROOT / "distcheck" / "records" / "causes"
    files = [*PAGES, ROOT / "mkdocs.yml", *sorted(folder.glob("*.toml"))]
    ran = subprocess.run(
        [sys.executable, "-m", "codespell_lib", "--builtin", "en-GB_to_en-US", *map(str, files)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("what the exchange left, what a step is given", True),
        ("the reduced gradients, and the gradients passed to the optimizer", False),
    ],
)
def test_the_rate_is_counted(text: str, wrong: bool) -> None:
    assert (what_rate(text) > _MOST_WHAT) == wrong


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("divide by the world size once", True),
        ("if the rounding is intended, pass --accept low-precision", True),
        ("the index that picks a rank's buffer", False),
    ],
)
def test_imperatives_are_recognized(text: str, right: bool) -> None:
    assert is_imperative(text) == right


@pytest.mark.parametrize(("text", "wrong"), [("two runs part, unlike these", True), ("outside", 0)])
def test_vague_predicates_are_found(text: str, wrong: bool) -> None:
    assert bool(VAGUE.search(text)) == bool(wrong)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Whether a rank is stopped.", True),
        ("Return True if a rank is stopped.", False),
        ("Assert that ranks agree.", False),
    ],
)
def test_vague_openings_of_docstrings_are_found(text: str, wrong: bool) -> None:
    assert bool(OPENS_A_DOCSTRING_VAGUELY.match(text)) == wrong


def _literals(path: Path) -> Iterator[str]:
    """Strings of several words that may reach a screen; no docstrings."""
    docs = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            text = re.sub(r"--overlay", " ", node.value)
            if re.search(r"[a-z] [a-z]", text):
                yield text


def test_screens_and_help_use_exact_predicates() -> None:
    modules = sorted((ROOT / "distcheck").rglob("*.py"))
    assert not found(modules, lambda path: [t for t in _literals(path) if VAGUE.search(t)])


def test_help_of_options_is_a_phrase() -> None:
    """A capital and a full stop: "Maximum number of ranks."."""
    from distcheck.cli import root_command

    context = click.Context(root_command)
    names = root_command.list_commands(context)
    commands = [root_command.get_command(context, name) for name in names]
    options = [one for command in commands if command is not None for one in command.params]
    helps = {one.help for one in options if isinstance(one, click.Option) and one.help}
    assert len(helps) > 100
    shape = re.compile(r"[A-Z-].*[.\])]")
    assert [text for text in helps if not shape.fullmatch(text) or OPENS_VAGUELY.match(text)] == []
