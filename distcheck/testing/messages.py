"""What a rank tells about its part of a test: msgpack, through its events pipe."""

from typing import Any, Literal

import msgspec

End = Literal["passed", "skipped", "xfailed", "exit", "failed"]


class Seen(msgspec.Struct, frozen=True):
    """A warning that a rank raised."""

    text: str
    category: str  # module:qualified name
    filename: str
    line: int


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the test ended on one rank.

    `exception` names its class ("module:qualified name"); `longrepr` is pytest's own report of
    it, as pytest serialises it for xdist; `where` is "path:line" of the crash, `message` its
    first line. `left` says what it left open, `left_stays` whether a next test in the same rank
    would meet that. `preloads` are modules that the rank had to import and that every rank will.
    """

    end: End
    reason: str = ""
    exception: str = ""
    message: str = ""
    where: str = ""
    longrepr: dict[str, Any] | None = None
    warnings: tuple[Seen, ...] = ()
    log: str = ""
    left: tuple[str, ...] = ()
    left_stays: bool = False
    preloads: tuple[str, ...] = ()


class KeptTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test for a kept rank: which, with which arguments (pickled), under which marker."""

    nodeid: str
    arguments: bytes
    options: bytes
