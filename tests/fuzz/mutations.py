"""Damage to files, drawn from a seed: to any bytes, and to JSON and TOML by what they mean."""

import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

_DEEP = 20_000  # far beyond what a recursive parser takes
_MOST_NESTED = 40
_CHARACTERS = "\x00\x1b\n\r\u202e\ud800é\U0001f600:/\\\"'%`<"


class Draw(Random):
    """A `Random` whose choices are relative to the length that they are made from: the same seed
    damages the same part of a file, however long a time or a path in it is on this machine.
    """

    def _randbelow(self, n: int) -> int:
        """An integer in [0, n), from exactly one number of the stream."""
        return int(self.random() * n)


class Raw(str):
    """A text that goes into a file as it is: what no Python value is written as."""


Damage = Callable[[bytes, Random], bytes]


def mutated(data: bytes, draw: Random, kind: str) -> bytes:
    """`data`, damaged once, or now and then up to three times. `kind` says what it is: "json",
    "toml", or anything else.
    """
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = draw.choice(_WAYS.get(kind, _BYTES))(data, draw)
    return data


def odd_value(draw: Random) -> Any:
    """A value that belongs nowhere, or almost."""
    return draw.choice(
        (
            None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0,
            1e308, math.nan, math.inf, -math.inf, Raw("1e400"), Raw("-0"), Raw("01"), Raw("0x1"),
            "", "x", "pass", "../x", "/etc/passwd", "nan", "é" * 300, "\x00", "\ud800", "a\nb",
            "::error::x", "\x1b[31m", [], {}, [None], [[]], {"": {}}, {"a": [1, {"b": None}]},
            Raw("[" * _DEEP), Raw("[" * _MOST_NESTED + "]" * _MOST_NESTED), Raw('{"a":' * _DEEP),
            Raw('"\\u00'), Raw('"\\ud800"'), Raw(""), Raw("tru"),
        )
    )  # fmt: skip


def _flip(data: bytes, draw: Random) -> bytes:
    """One to eight bits."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8) if data else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, draw: Random) -> bytes:
    return data[: draw.randint(0, len(data))]


def _cut_out(data: bytes, draw: Random) -> bytes:
    start = draw.randint(0, len(data))
    return data[:start] + data[start + draw.randint(1, 64) :]


def _repeat(data: bytes, draw: Random) -> bytes:
    start = draw.randint(0, len(data))
    piece = data[start : start + draw.randint(1, 256)]
    return data[:start] + piece + data[start:]


def _insert(data: bytes, draw: Random) -> bytes:
    at = draw.randint(0, len(data))
    piece = draw.choice((draw.randbytes(draw.randint(1, 16)), b"\xff\xfe", b"\x00", b"\xc3", b"{"))
    return data[:at] + piece + data[at:]


def _with_mark(data: bytes, draw: Random) -> bytes:
    return draw.choice((b"\xef\xbb\xbf" + data, data.decode("utf-8", "replace").encode("utf-16")))


def _nothing(data: bytes, draw: Random) -> bytes:
    return draw.choice((b"", b" ", b"\n" * 100, b"null", b"[]", b"{}", b'"text"', b"0"))


def _digits(data: bytes, draw: Random) -> bytes:
    """One number, as a text, by another."""
    places = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return _flip(data, draw)
    at = draw.choice(places)
    number = draw.choice((b"9" * 30, b"-1", b"0", b"1e999", b"NaN", b"1.5", b"1_0"))
    return data[:at] + number + data[at + 1 :]


def _in_tree(parse: Callable[[bytes], Any], write: Callable[[Any], str]) -> Damage:
    """Damage to a value, key or list somewhere in what a file says."""

    def damage(data: bytes, draw: Random) -> bytes:
        try:
            tree = parse(data)
        except (ValueError, RecursionError):
            return _flip(data, draw)
        places = list(_places(tree))
        if not places:
            return _flip(data, draw)
        holder, key = draw.choice(places)
        what = draw.choice((_set, _set, _set, _delete, _rename, _double, _text))
        what(holder, key, draw)
        return write(tree).encode("utf-8", "surrogatepass")

    return damage


def _set(holder: Any, key: Any, draw: Random) -> None:
    holder[key] = odd_value(draw)


def _delete(holder: Any, key: Any, draw: Random) -> None:
    del holder[key]


def _rename(holder: Any, key: Any, draw: Random) -> None:
    if isinstance(holder, dict):
        holder[str(key) + draw.choice(("", "x", "\x00"))] = holder.pop(key)
    else:
        holder.reverse()


def _double(holder: Any, key: Any, draw: Random) -> None:
    """A key that is there twice, with another value the second time; an element twice."""
    if isinstance(holder, dict):
        holder[_Again(key)] = odd_value(draw)
    else:
        holder.append(holder[key])


def _text(holder: Any, key: Any, draw: Random) -> None:
    """A text with another character, a number with another sign or size."""
    value = holder[key]
    if isinstance(value, str) and not isinstance(value, Raw):
        at = draw.randint(0, len(value))
        holder[key] = value[:at] + draw.choice(_CHARACTERS) + value[at + draw.randint(0, 1) :]
    elif isinstance(value, int | float):
        holder[key] = draw.choice((-value, value + 1, value * 10**9, str(value), float(value)))
    else:
        holder[key] = odd_value(draw)


class _Again(str):
    """A key that equals no other, so that a dictionary holds the same text twice."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict):
        items: Any = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    else:
        return
    for key, value in items:
        yield tree, key
        yield from _places(value)


def as_json(value: Any) -> str:
    """JSON, with the keys that are there twice, NaN, and what is `Raw`."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        said = (f"{json.dumps(str(key))}: {as_json(each)}" for key, each in value.items())
        return "{" + ", ".join(said) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    return json.dumps(value)


def as_toml(tree: Any) -> str:
    """TOML: the outer tables as lines, everything else inline."""
    if not isinstance(tree, dict):
        return _inline(tree)
    return "".join(f"{_toml_key(key)} = {_inline(value)}\n" for key, value in tree.items())


def _inline(value: Any) -> str:
    if isinstance(value, Raw) or value is None:
        return str(value)
    if isinstance(value, dict):
        said = ", ".join(f"{_toml_key(key)} = {_inline(each)}" for key, each in value.items())
        return "{ " + said + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value)


def _toml_key(key: str) -> str:
    return json.dumps(str(key))


def _parse_toml(data: bytes) -> Any:
    import tomllib

    return tomllib.loads(data.decode())


_BYTES: tuple[Damage, ...] = (
    _flip, _flip, _truncate, _cut_out, _repeat, _insert, _with_mark, _nothing, _digits,
)  # fmt: skip
_JSON = _in_tree(json.loads, as_json)
_TOML = _in_tree(_parse_toml, as_toml)
_WAYS = {"json": (_JSON,) * 20 + _BYTES, "toml": (_TOML,) * 20 + _BYTES}
