"""Makes texts of user code safe to display, in every format except JSON, which has its own escapes
and contains every text in full.

User code chooses names, exceptions and output. Non-printing characters (controls, terminal escapes,
direction marks, zero-width characters) are shown as Python escapes, so that a text can neither move
the cursor nor hide its contents. The middle of a text longer than `MOST_CHARACTERS` is removed
before wrapping.
"""

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import IO, Any, TypeVar

import msgspec

from distcheck.errors.masking import masked_command, masked_words, masker

T = TypeVar("T")

MOST_CHARACTERS = 20_000  # of one text; the time of wrapping grows with its square
# Keys and fields whose texts are names, numbers and verdicts; a variable may have the same value.
_KEPT = frozenset((
    "schema", "id", "verdict", "strategy", "workload", "backend", "device", "dtype", "data",
    "check", "checks", "layer", "layers", "scope", "outcome", "cause", "kind", "kinds", "name",
    "parameter", "parameters", "form", "loss", "order", "unit", "digest", "digests", "commit",
    "date", "op", "bits", "actual_bits", "expected_bits", "proven", "reduction", "operation",
    "features", "accept",
))  # fmt: skip
_FREE = ("environment", "arguments", "variables")  # they contain names chosen by users
_COMMANDS = ("replay", "command")
_SHORTEST_SECRET = 6
_MOST_SECRET = 1 << 16  # characters
MOST_REPORTED = 4 << 20  # characters of one text that a rank sends and JSON contains
# Workflow commands: "::" at the start of a line after blanks, and "##[" anywhere in GitHub Actions;
# "##vso[" in Azure Pipelines, "##teamcity[" in TeamCity.
_COMMAND = re.compile(r"^([^\S\n]*(?:\x1b\[[0-9;]*m)*)::", re.MULTILINE)
_OLD_COMMAND = re.compile(r"##((?:vso|teamcity)?)\[", re.I)


class _Escapes(dict[int, str]):
    """Displayed form of each character, for `str.translate`."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if not character.isprintable() and character not in "\n\t":
            character = character.encode("unicode_escape").decode()
        self[code] = character
        return character


_ESCAPES = _Escapes()


def displayable(value: T) -> T:
    """Return the value with every text in it safe to display and secrets masked. The value is a
    text, or consists of lists, dictionaries and records.
    """
    mask = masker()
    return _map_texts(value, lambda key, text: _safe_text(_mask_text(key, text, mask)))  # type: ignore[no-any-return]


def encodable(value: T) -> T:
    """Return the value with characters that UTF-8 cannot encode escaped in every text."""
    return _map_texts(value, lambda _, text: text.encode(errors="backslashreplace").decode())  # type: ignore[no-any-return]


def without_secrets(document: T) -> T:
    """Return a document, or a part of one, with secrets masked. Names and verdicts are
    not changed.
    """
    mask = masker()
    return _map_texts(document, lambda key, text: _mask_text(key, text, mask))  # type: ignore[no-any-return]


def _mask_text(key: str, text: str, mask: Callable[[str], str]) -> str:
    if key in _KEPT or len(text) < _SHORTEST_SECRET:
        return text
    return masked_command(text, mask) if key in _COMMANDS else mask(text)


def _map_texts(value: Any, of_text: Callable[[str, str], str], key: str = "") -> Any:
    """Return the value with each text replaced by `of_text(key, text)`. Elements of a list have the
    key of the list. Everything within a value whose key is in `_FREE` has that key.
    """
    if isinstance(value, str):
        return of_text(key, value)

    def inner(name: Any, one: Any) -> Any:
        return _map_texts(one, of_text, key if key in _FREE or not isinstance(name, str) else name)

    if isinstance(value, dict):
        return {_map_texts(k, of_text, "name"): inner(k, one) for k, one in value.items()}
    if isinstance(value, list | tuple):
        if key == "job":
            value = type(value)(masked_words(map(str, value)))
        return type(value)(_map_texts(one, of_text, key) for one in value)
    if isinstance(value, msgspec.Struct):
        names = list(value.__struct_fields__)
        return msgspec.structs.replace(value, **{n: inner(n, getattr(value, n)) for n in names})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{n: inner(n, getattr(value, n)) for n in names})
    return value


def _safe_text(text: str) -> str:
    return escaped(shortened(text))


def escaped(text: str) -> str:
    """Return the text with non-printing characters escaped. Secrets are not masked."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def shortened(
    text: str, most: int = MOST_CHARACTERS, *, why: str = "; the JSON report has them"
) -> str:
    """Return the beginning and the end of a text of more than `most` characters."""
    if len(text) <= most:
        return text
    head = most // 4
    left_out = len(text) - most
    said = f"\n... {left_out:,} characters are omitted here{why} ...\n"
    return text[:head] + said + text[len(text) - (most - head) :]


def text_to_report(text: str) -> str:
    """Return a text with secrets masked, in the form in which its rank sends it. In a long text,
    the beginning and the end are masked separately; text next to the cut is dropped, because it may
    be part of a secret.
    """
    why, mask = f"; a rank reports {MOST_REPORTED:,} of a text", masker()
    if len(text) > 2 * MOST_REPORTED:
        head, tail = mask(text[:MOST_REPORTED]), mask(text[-MOST_REPORTED:])
        text = f"{head[:-_MOST_SECRET]}{' ' * (len(text) - 2 * MOST_REPORTED)}{tail[_MOST_SECRET:]}"
        return shortened(text, MOST_REPORTED, why=why)
    return shortened(mask(text), MOST_REPORTED, why=why)


def without_workflow_commands(text: str, *, form: str = "") -> str:
    """Return a text without GitHub Actions workflow commands, for a stream that GitHub Actions
    reads.

    `form` is "json", or "xml" for XML and HTML; in these formats, the meaning of the text does not
    change. Other texts get a backslash.
    """
    if form == "json":
        return _OLD_COMMAND.sub(r"##\1\\u005b", text)
    colon, bracket = ("&#58;", "&#91;") if form == "xml" else ("\\:", "\\[")
    text = _COMMAND.sub(lambda found: f"{found[1]}{colon}:", text)
    return _OLD_COMMAND.sub(lambda found: f"##{found[1]}{bracket}", text)


class FilteredStream:
    """Text stream that removes workflow commands, and otherwise behaves like the given stream."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = sys.stdout if stream is None else stream

    def write(self, text: str) -> int:
        """Write whole lines."""
        return self._stream.write(without_workflow_commands(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def one_line(text: str) -> str:
    """Return the text with line breaks and tabs escaped, for output on one line."""
    return text.replace("\n", "\\n").replace("\t", "\\t")


def print_displayable(text: str, *, err: bool = False) -> None:
    """Print a line that may quote text of user code."""
    import click  # ranks, which shorten texts by this module, do not import it

    click.echo(without_workflow_commands(displayable(text)), err=err)
