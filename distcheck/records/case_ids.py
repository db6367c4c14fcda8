"""Names of cases: unique, and independent of the order of requests."""

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import xxhash

from distcheck.records import Case

_LONGEST_BYTES = 150  # of a file name, 255 at most, to which others may append


def as_file_name(text: str) -> str:
    """Convert a text to a valid file name without shell metacharacters."""
    name = re.sub(r"[^\w.+-]+", "-", text).lstrip("-.")
    if len(name.encode()) <= _LONGEST_BYTES:
        return name
    begin = name.encode()[: _LONGEST_BYTES - 20].decode(errors="ignore")
    return f"{begin}-{xxhash.xxh3_64_hexdigest(name.encode())}"


def is_file_name(text: str) -> bool:
    """Return True if `as_file_name`, plus a suffix, could have made this."""
    fits = len(text.encode()) <= _LONGEST_BYTES + 50
    return fits and re.fullmatch(r"[\w+-][\w.+-]*", text) is not None


def name_apart(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with unique ids; duplicates are removed."""
    alike: dict[str, list[Case]] = defaultdict(list)
    for case in dict.fromkeys(cases):
        alike[case.id].append(case)
    names = {case: name for same in alike.values() for case, name in _names(same).items()}
    return [msgspec.structs.replace(case, id=names[case]) for case in dict.fromkeys(cases)]


def _names(same: Sequence[Case]) -> dict[Case, str]:
    """Name the difference of cases, in words if possible, else by a digest."""
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
    """Return a digest of cases in any order. Data folders and deadlines may differ by machine."""
    said = [msgspec.structs.replace(case, data_dir=None, deadline_s=1.0) for case in cases]
    return xxhash.xxh3_64_hexdigest(b"\n".join(sorted(map(msgspec.json.encode, said))))
