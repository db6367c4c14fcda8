"""Names of cases: each its own, and the same whatever the order in which they were asked for."""

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import xxhash

from distcheck.records import Case

_LONGEST_BYTES = 150  # of a file's name, 255 at most, to which others may add


def as_file_name(text: str) -> str:
    """A text as a name that files may have, and that no shell takes apart."""
    name = re.sub(r"[^\w.+-]+", "-", text).lstrip("-.")
    if len(name.encode()) <= _LONGEST_BYTES:
        return name
    begin = name.encode()[: _LONGEST_BYTES - 20].decode(errors="ignore")
    return f"{begin}-{xxhash.xxh3_64_hexdigest(name.encode())}"


def is_file_name(text: str) -> bool:
    """Whether `as_file_name`, and what may be added to it, could have made this."""
    fits = len(text.encode()) <= _LONGEST_BYTES + 50
    return fits and re.fullmatch(r"[\w+-][\w.+-]*", text) is not None


def name_apart(cases: Sequence[Case]) -> list[Case]:
    """The cases with ids of their own; one that is there twice is kept once."""
    alike: dict[str, list[Case]] = defaultdict(list)
    for case in dict.fromkeys(cases):
        alike[case.id].append(case)
    names = {case: name for same in alike.values() for case, name in _names(same).items()}
    return [msgspec.structs.replace(case, id=names[case]) for case in dict.fromkeys(cases)]


def _names(same: Sequence[Case]) -> dict[Case, str]:
    """Says what differs, in words where a word is enough, and with a digest otherwise."""
    if len(same) == 1:
        return {same[0]: same[0].id}
    names = {case: case.id for case in same}
    if len({case.backend for case in same}) > 1:
        names = {case: f"{name}-{case.backend}" for case, name in names.items()}
    if len({case.seed for case in same}) > 1:
        names = {case: f"{name}-seed{case.seed}" for case, name in names.items()}
    taken = list(names.values())
    return {
        case: name if taken.count(name) == 1 else f"{name}-{digest_of(case)[:8]}"
        for case, name in names.items()
    }


def digest_of(case: Case) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(case))


def digest_of_all(cases: Sequence[Case]) -> str:
    """A digest of cases in any order. Where files of data are, and how long is waited, may be each
    machine's own.
    """
    said = [msgspec.structs.replace(case, data_dir=None, deadline_s=1.0) for case in cases]
    return xxhash.xxh3_64_hexdigest(b"\n".join(sorted(map(msgspec.json.encode, said))))
