"""Values of the environment that look like secrets, masked in reports and bundles.

An exception may quote the environment, and so may what a strategy prints. A variable counts whose
name says so (`_NAMES`) and whose value has at least `_LEAST_CHARACTERS` characters; of a value of
several lines (a private key), every long line as well; of a value that is an address with a
password (`postgres://user:password@host`) or a token (`https://TOKEN@host`), that. A secret that
comes from elsewhere, or is spelled in another way, is not found.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from urllib.parse import quote

_NAMES = re.compile(
    r"TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|COOKIE|CONNECTION_?STRING|WEBHOOK|BEARER"
    r"|(^|_)(AUTH|PAT|PASS|JWT|DSN)(_|$)|_PWD$|(^|_)(API|ACCESS|PRIVATE)?KEYS?(_|$)",
    re.I,
)
_ADDRESS = re.compile(r"\w+://(?:[^/\s:@]*:([^/\s@]+)|([^/\s:@]{16,}))@")
_NOT_SECRET = re.compile(r"_(FILE|PATH|SOCK|DIR|ID)$", re.I)  # which say where one is
_LEAST_CHARACTERS = 6
_LEAST_OF_A_LINE = 16


def secrets_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Values that are masked, and the name of the variable of each; longer values first."""
    found = {
        value: name
        for name, value in environ.items()
        if _NAMES.search(name) and not _NOT_SECRET.search(name) and len(value) >= _LEAST_CHARACTERS
    }
    for value, name in list(found.items()):
        lines = [line.strip() for line in value.splitlines()[1:-1]]  # not BEGIN and END of a key
        found |= {line: name for line in lines if len(line) >= _LEAST_OF_A_LINE}
    for name, value in environ.items():
        for password, token in _ADDRESS.findall(value):
            if len(password or token) >= _LEAST_CHARACTERS:
                found.setdefault(password or token, name)
    return dict(sorted(found.items(), key=lambda one: -len(one[0])))


def masker(environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A function that puts `<$NAME>` in the place of every value, also as Python, JSON and
    addresses quote it."""
    names: dict[str, str] = {}
    for value, name in secrets_of(os.environ if environ is None else environ).items():
        for spelling in (value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe="")):
            names.setdefault(spelling, name)
    if not names:
        return str
    pattern = re.compile("|".join(map(re.escape, names)))
    return lambda text: pattern.sub(lambda found: f"<${names[found[0]]}>", text)


def masked(text: str) -> str:
    """The text without the values of this process's secrets."""
    return masker()(text)
