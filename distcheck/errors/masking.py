"""Masks secrets in every text that is shown, stored, sent or packed.

Exceptions and the output of a strategy may contain environment variables. Two kinds of secrets are
recognized:

- Values of this process's environment variables whose names indicate a secret (`_NAMES`), if they
  have at least `_LEAST_CHARACTERS` characters. For a value of several lines (a private key), every
  long line is masked as well; for a URL, its password or token. They become `<$NAME>`.
- Texts in the format of a secret (`_FORMS`), from any source: keys and tokens with known prefixes,
  passwords in URLs, credentials in headers, and values after names such as `password=`. They become
  `[masked]`.

Other secrets are not recognized.
"""

import base64
import binascii
import functools
import html
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote, quote_plus

_NAMES = re.compile(
    r"TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|COOKIE|CONNECTION_?STRING|WEBHOOK|BEARER"
    r"|AUTHORIZATION|(^|_)(AUTH|PAT|PASS|PW|JWT|DSN|SAS)(_|$)|_PWD$"
    r"|(^|_)(API|ACCESS|ACCOUNT|AUTH|ENCRYPTION|PRIVATE|SECRET|SIGNING|SSH)?KEYS?(_|$)",
    re.I,
)
_PLACES = re.compile(r"_(FILE|PATH|SOCK|DIR)$", re.I)  # names of places where a secret is
_NUMBERED = re.compile(r"_ID$", re.I)
_SECRET_THOUGH_NUMBERED = re.compile(r"SECRET|KEY|(^|_)(PW|PASS)|PASSW", re.I)
_LEAST_CHARACTERS = 6
_LEAST_OF_A_LINE = 16
MASK = "[masked]"

# (substrings of which a match contains one, the pattern): its group `secret`, or all of it, is
# masked.
_FORMS: tuple[tuple[tuple[str, ...], "re.Pattern[str]"], ...] = tuple(
    (tuple(hints.split()), re.compile(pattern))
    for hints, pattern in (
        ("PRIVATE", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
         r"(?:(?s:.{0,20000}?)-----END [A-Z0-9 ]+-----|[A-Za-z0-9+/=\s\\:,\"'|>#*.()\[\]-]*)"),
        ("Private-Lines", r"Private-Lines: \d+\s+(?P<secret>(?:[A-Za-z0-9+/=]{1,64}\s*\n?)+)"),
        ("eyJ", r"\beyJ[\w-]{8,}(?:\.[\w-]*){1,4}"),
        ("ghp_ gho_ ghs_ ghu_ ghr_", r"\bgh[opsur]_[A-Za-z0-9]{16,}"),
        ("github_pat_", r"\bgithub_pat_\w{16,}"),
        ("hf_", r"\bhf_(?=[A-Za-z0-9]{0,99}[0-9A-Z])[A-Za-z0-9]{16,}"),
        ("AKIA ASIA ABIA ACCA", r"\bA(?:KIA|SIA|BIA|CCA)[A-Z0-9]{12,}\b"),
        ("AIza", r"\bAIza[\w-]{30,}"),
        ("ya29.", r"\bya29\.[\w-]{16,}"),
        ("GOCSPX-", r"\bGOCSPX-[\w-]{16,}"),
        ("xox xapp-", r"\bx(?:ox[a-z]|app)-(?=[\w-]{0,99}\d)[\w-]{10,}"),
        ("hvs. gsk_ nvapi- xai- r8_ shpat_ dop_v1_ tskey- ATATT3 AGE-SECRET-KEY-1 figd_ sntrys_ "
         "PMAK- wandb_v1_", r"\b(?:hvs\.|gsk_|nvapi-|xai-|r8_|shpat_|dop_v1_|tskey-|ATATT3|figd_"
         r"|sntrys_|AGE-SECRET-KEY-1|PMAK-|wandb_v1_)(?=[\w+/=.-]{0,99}\d)[\w+/=.-]{16,}"),
        ("sk-", r"\bsk-(?=[\w-]{0,99}\d)(?=[\w-]{0,99}[A-Z])[\w-]{20,}"),
        ("_live_ _test_", r"\b[rsp]k_(?:live|test)_\w{10,}"),
        ("whsec_", r"\bwhsec_[\w+/=]{16,}"),
        ("glpat- gldt- glrt- glcbt- glptt- glft- glimt- glsoat- glagent-",
         r"\bgl[a-z]+-[\w-]{16,}"),
        ("npm_", r"\bnpm_[A-Za-z0-9]{30,}"),
        ("pypi-", r"\bpypi-[\w-]{30,}"),
        ("dckr_", r"\bdckr_(?:pat|oat)_[\w-]{16,}"),
        ("SG.", r"\bSG\.[\w-]{16,}\.[\w-]{16,}"),
        ("SK", r"\bSK[0-9a-f]{32}\b"),
        ("dapi", r"\bdapi[0-9a-f]{32}\b"),
        ("://", r"(?<=://)[^\s/:@\"'<>?#]{0,200}:(?P<secret>[^\s/\"'<>?#]{1,500})@"),
        ("://", r"(?<=://)(?P<secret>[^\s/:@\"'<>?#]{16,500})@"),
        ("Bearer bearer BEARER", r"\b(?i:Bearer) (?P<secret>(?=[\w.~+/=-]{0,99}\d)[\w.~+/=-]{8,})"),
        ("response=", r"\bDigest\b[^\r\n]{0,500}?\bresponse=\"?(?P<secret>\w{16,})"),
        ("uthorization UTHORIZATION", r"\b(?i:authorization)[\"']?\s*[:=,]\s*\[?b?[\"']?"
         r"(?!None\b)(?:[A-Za-z]+\s+)?"
         r"(?P<secret>[^\s\"'<>][^\"'\r\n<>]{3,})"),
        ("ookie OOKIE", r"\b(?i:cookie)[\"']?\s*[:,]\s*b?[\"']?"
         r"(?P<secret>[^\"'\r\n<>]*=\"?[^\"'\r\n<>]+)"),
        ("oken: ey: OKEN: EY:", r"\b(?i:(?:x-[\w-]{0,40}|private-|api-|auth-|access-)(?:key|token))"
         r":[ \t]*(?P<secret>[^\s\"'<>]{4,})"),
        ("password", r"\b(?:machine\s+\S+|default|login\s+\S+)\s+(?:login\s+\S+\s+)?(?:account\s+"
         r"\S+\s+)?password\s+(?P<secret>[^\s\"'<>]+)"),
        ("token=", r"[?&]token=(?P<secret>[^&\s\"'<>]{6,})"),
        ("oken", r"(?<![A-Za-z0-9-])(?i:token)(?:[\"']?\s*[:=]\s*[\"']|=)"
         r"(?P<secret>(?=[^\s\"']{0,99}\d)(?=[^\s\"']{0,99}[A-Za-z])[\w.~+/=-]{16,})"),
        ("pass=", r"(?<![\w.-])pass=(?P<secret>(?=[^\s&]{0,99}\d)(?=[^\s&]{0,99}[A-Za-z])"
         r"[^\s\"'&;,<>()]{6,})"),
        ("curl", r"\bcurl\b[^\r\n]{0,500}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']{1,100}:"
         r"(?P<secret>[^\s\"'<>]+)"),
        ("sig=", r"[?&;]sig=(?P<secret>[^&\s\"'<>]{8,})"),
        ("ignature=", r"[?&][\w-]{0,40}[Ss]ignature=(?P<secret>[^&\s\"'<>]{8,})"),
        ("Security-Token=", r"Security-Token=(?P<secret>[^&\s\"'<>]{8,})"),
        ("hook HOOK Hook", r"(?i:https://(?:[\w.-]{0,99}\.)?(?:discord(?:app)?\.com/api/(?:v\d+/)?webhooks"
         r"|hooks\.slack\.com(?::\d+)?"
         r"|webhook\.office\.com|outlook\.office\.com/webhook|hooks\.zapier\.com))"
         r"/(?P<secret>[^\s\"'<>]+)"),
        ("chat.googleapis.com/ CHAT.", r"(?i:chat\.googleapis\.com)/(?P<secret>[^\s\"'<>]+)"),
    )
)  # fmt: skip
# A value after a name, from the start of the name. `key` and `token` alone are names of tensors.
_WORDS = tuple(map(re.compile, (
    "passw", "passphrase", "pwd", "secret", "credential", r"(?<=[\w-])key", r"(?<=[\w-])token",
    r"(?<=--)pass\b", r"(?<=[\w-][_-])pw\b",
)))  # fmt: skip
_NAME = (
    r"(?:--)?[\w.-]{0,40}?(?:passw(?:or)?d|passphrase|pwd|secret|credentials?|(?:api|access|account"
    r"|auth|encryption|private|secret|signing|subscription|wandb)[_-]?key|(?:access|api|app|auth"
    r"|bearer|bot|deploy|github|gitlab|hf|hub|id|private|refresh|session|slack|user|wandb)[_-]?token"
    r"|(?<=\w)[_-]pw\b)(?:_?\d+)?"
)
_NO_VALUE = (
    r"(?!\[masked|(?:args|self|os|getpass|config|cfg)\.\w"
    r"|(?:none|null|true|false|str|bytes|value|[-+]?(?:\d{1,6}|\d*\.\d+(?:e[-+]?\d+)?))"
    r"(?![^\s\"'&;,)\]}<>]))"
)
_NUMBER = re.compile(r"[-+]?(?:\d+|\d*\.\d+(?:e[-+]?\d+)?)|true|false|none|null", re.I)
_EVEN_A_NUMBER = re.compile(r"PASSW|SECRET|TOKEN")
_ASSIGNED = re.compile(
    rf"{_NAME}(?:"
    r"(?:\\?[\"']?\]?"
    r"(?:\s*:\s*[A-Za-z][\w.|\[\]]{0,60}(?: \| [\w.]{1,40}){0,4})?"
    r"\s*(?::=|=>|[:=])|\\?[\"'],)\s*[bru]?(?P<q>\"{3}|'{3}|\\?[\"'])"
    rf"{_NO_VALUE}(?P<a>(?:(?!(?P=q))(?:\\[^\r\n]|[^\\\r\n<>])){{4,}})"
    r"|>(?P<h>[^<>\s]{4,})(?=</)|:[ \t]+[|>][-+]?\s*\n\s+(?P<i>\S{4,})"
    rf"|={_NO_VALUE}(?P<b>[^\s\"'&;,<>]+)"
    r"| = (?=[^\s\"']{0,99}\d)(?=[^\s\"']{0,99}[A-Za-z])(?P<e>(?:[^\s\"'<>(),]|,(?=\S)){8,})"
    r"|(?:(?<=password)|(?<=passphrase))[ \t]*:\s*(?P<j>[^\s\"'<>(),]{5,})"
    r"|:\s+(?P<f>(?:[^\s\"'<>(),]|,(?=\S)){6,})(?=\s*$)"
    rf"|\s+[\"']{_NO_VALUE}(?P<g>[^\"'\r\n<>]{{4,}})[\"']"
    r"|:\s+(?=[^\s\"']{0,99}\d)(?=[^\s\"']{0,99}[a-z])(?P<c>(?:[^\s\"'<>(),]|,(?=\S)){8,}))"
    rf"|--(?:[\w-]{{1,40}}-)?(?:token|pw|pass|{_NAME})(?:\s+|=|[\"'],\s*b?)(?:(?P<p>[\"'])"
    rf"(?P<k>(?:(?!(?P=p))[^\r\n<>]){{4,}})|{_NO_VALUE}"
    r"(?P<d>(?:(?<==)-|[^\s\"'<>-])[^\s\"'<>]{3,}))",
    re.I | re.M,
)
# Variables as in a shell or a file of settings; `is_secret` decides by the name.
_VARIABLE = re.compile(
    r"(?<![A-Za-z0-9])(?P<name>_{0,2}[A-Z][A-Z0-9_]{1,60})"
    r"(?:(?:=|[\"']\]?\s*(?:=>?|[:,])\s*b?)(?P<q>[\"'])"
    r"(?P<quoted>(?:(?!(?P=q))[^\\\r\n<>]){4,})|=(?P<plain>[^\s\"'&;,<>]{4,}))"
)
_NAMES_OF_NO_SECRET = re.compile(
    r"(?:PAD|BOS|EOS|UNK|CLS|SEP|MASK|NUM|MAX|MIN|SPECIAL)_TOKENS?"
    r"|(?:UNEXPECTED|MISSING|PRIMARY|FOREIGN|PUBLIC|CACHE|SORT)_KEYS?|KEY_PADDING_MASK"
)
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_BEFORE = re.compile(r"[\w.-]{0,40}\Z")
_BASIC = re.compile(r"\bBasic ([A-Za-z0-9+/]{6,}={0,2})(?![A-Za-z0-9+/=])")


def secrets_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values to mask, each with the name of its variable; longer values come first."""
    found = {
        value: name
        for name, value in environ.items()
        if len(value) >= _LEAST_CHARACTERS and is_secret(name)
    }
    for value, name in list(found.items()):
        lines = [line.strip() for line in value.splitlines()[1:-1]]  # without BEGIN and END
        found |= {line: name for line in lines if len(line) >= _LEAST_OF_A_LINE}
    for name, value in environ.items():
        for pattern in (p for hints, p in _FORMS if hints == ("://",) and "://" in value):
            for part in pattern.findall(value):
                if len(part) >= _LEAST_CHARACTERS:
                    found.setdefault(part, name)
    return dict(sorted(found.items(), key=lambda one: -len(one[0])))


def is_secret(name: str) -> bool:
    """Return True if the name of a variable indicates that its value is a secret."""
    if not _NAMES.search(name) or _PLACES.search(name):
        return False
    return not _NUMBERED.search(name) or bool(_SECRET_THOUGH_NUMBERED.search(name))


def masker() -> Callable[[str], str]:
    """Return a function that masks both kinds of secrets in a text. Values of variables are also
    masked in the form in which Python, JSON and URLs quote them.
    """
    return _masker(tuple(os.environ.items()))


@functools.lru_cache(maxsize=4)
def _masker(environ: tuple[tuple[str, str], ...]) -> Callable[[str], str]:
    names: dict[str, str] = {}
    for value, name in secrets_of(dict(environ)).items():
        spellings = (
            value, repr(value)[1:-1], ascii(value)[1:-1], json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1], html.escape(value), quote(value),
            quote(value, safe=""), quote_plus(value),
        )  # fmt: skip
        for spelling in spellings:
            names.setdefault(spelling, name)
    if not names:
        return functools.lru_cache(maxsize=1 << 12)(mask_secret_patterns)
    pattern = re.compile("|".join(map(re.escape, names)))
    return functools.lru_cache(maxsize=1 << 12)(
        lambda text: mask_secret_patterns(pattern.sub(lambda found: f"<${names[found[0]]}>", text))
    )


def mask_secret_patterns(text: str) -> str:
    """Return the text with everything in the format of a secret masked."""
    for hints, pattern in _FORMS:
        if any(hint in text for hint in hints):
            text = pattern.sub(_mask_match, text)
    if "Basic " in text:
        text = _BASIC.sub(_masked_basic, text)
    if "=" in text or "'" in text or '"' in text:
        text = _VARIABLE.sub(lambda it: _mask_match(it) if _is_assigned(it) else it[0], text)
    return _mask_assigned_values(text)


def masked_json(text: str) -> str:
    """Mask each string of a JSON document separately, so that the result is valid JSON."""
    return _JSON_TEXT.sub(lambda found: _masked_literal(found[0]), text)


@functools.lru_cache(maxsize=1 << 12)
def _masked_literal(literal: str) -> str:
    plain = json.loads(literal, strict=False)
    masked = mask_secret_patterns(plain)
    return literal if masked == plain else json.dumps(masked)


def _is_assigned(found: "re.Match[str]") -> bool:
    """Return True if the name of a variable indicates a secret and its value can be one."""
    name, value = found["name"], found["quoted"] or found["plain"]
    if not is_secret(name) or _NAMES_OF_NO_SECRET.search(name) or value.startswith("[masked"):
        return False
    return not _NUMBER.fullmatch(value) or bool(_EVEN_A_NUMBER.search(name))


def _mask_match(found: "re.Match[str]") -> str:
    start, end = (place - found.start() for place in found.span(found.lastindex or 0))
    return f"{found[0][:start]}{MASK}{found[0][end:]}"


def _mask_assigned_values(text: str) -> str:
    """Mask values after names such as `password=`. Texts are long and such names are rare, so a
    search for the words in these names comes first.
    """
    low, parts, done = text.lower(), [], 0
    if len(low) != len(text):  # some letters are longer in lower case
        low = text
    places = sorted(found.start() for word in _WORDS for found in word.finditer(low))
    for place in places:
        value = text[place : place + 24]
        if place < done or not ({*value} & {*"=:>'\""} or "--" in text[max(0, place - 24) : place]):
            continue
        before = _BEFORE.search(text, max(done, place - 40), place)
        start = place if before is None else before.start()
        found = _ASSIGNED.match(text, start) or _ASSIGNED.match(text, place)
        if found is not None:
            first, last = found.span(found.lastgroup or 0)
            parts += [text[done:first], MASK]
            done = last
    return "".join([*parts, text[done:]])


def _masked_basic(found: "re.Match[str]") -> str:
    """Mask Basic credentials. Other words after "Basic" are kept, because they do not decode to
    `user:password`.
    """
    try:
        is_one = b":" in base64.b64decode(found[1] + "=" * (-len(found[1]) % 4))
    except binascii.Error:
        is_one = False
    return f"Basic {MASK}" if is_one else found[0]


def masked(text: str) -> str:
    """Return the text with the secrets masked that this process recognizes."""
    return masker()(text)


def masked_words(words: Iterable[str], mask: Callable[[str], str] = masked) -> list[str]:
    """Return the words of a command with secrets masked, including a secret that follows the name
    of its option.
    """
    found = [mask(word) for word in words]
    for place, word in enumerate(found[:-1]):
        pair = f"{word} {found[place + 1]}"
        if word.startswith("--") and "=" not in word and mask(pair) != pair:
            found[place + 1] = MASK
    return found


def masked_command(text: str, mask: Callable[[str], str] = masked) -> str:
    """Return a command with secrets masked and quoted, so that it remains a valid command. A value
    is found in quoted and in unquoted form.
    """
    plain = mask(text)
    try:
        words = shlex.split(plain)
    except ValueError:
        return plain
    changed = masked_words(words, mask)
    return text if plain == text and changed == words else shlex.join(changed)
