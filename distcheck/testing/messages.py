"""What a rank tells about its part of a test: msgpack, through its events pipe."""

from typing import Any, Literal

import msgspec

from distcheck.testing.examples import PassedToHypothesis
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.messages import printable
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.worker_pool import CHANNEL

End = Literal["passed", "skipped", "rejected", "xfailed", "exit", "failed"]


class RankWarning(msgspec.Struct, frozen=True):
    """A warning that a rank raised."""

    text: str
    category: str  # module:qualified name
    filename: str
    line: int


class RankReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How the test ended on one rank.

    `exception` names its class ("module:qualified name"); `longrepr` is pytest's own report of
    it, as pytest serializes it for xdist; `where` is "path:line" of the crash, `message` its
    first line. `left` says what it left open, `left_stays` whether a next test in the same rank
    would meet that, `groups` how many process groups a kept rank has made so far. `preloads` are
    modules that the rank had to import and that every rank will; `properties` are pytest's "user
    properties"; `body_s` is how long the test itself took, without its fixtures; `said` is for
    hypothesis, whose example a rank may have `rejected`.
    """

    end: End
    reason: str = ""
    exception: str = ""
    message: str = ""
    where: str = ""
    longrepr: dict[str, Any] | None = None
    warnings: tuple[RankWarning, ...] = ()
    log: str = ""
    left: tuple[str, ...] = ()
    left_stays: bool = False
    groups: int = 0
    preloads: tuple[str, ...] = ()
    properties: tuple[tuple[str, Any], ...] = ()
    body_s: float = 0.0
    said: PassedToHypothesis = PassedToHypothesis()


class Subtest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a subtest ended on one rank, sent when it has: pytest's own report of it, serialized.
    `failure` is what its rank would have reported had the test failed as the subtest did, less the
    report itself.
    """

    name: str
    report: dict[str, Any]
    failure: RankReport | None = None

    def as_failure(self) -> RankReport:
        assert self.failure is not None
        return msgspec.structs.replace(self.failure, longrepr=self.report)


# What to do where something cannot be sent to a kept world.
KEPT_ELSE = (
    "have that fixture depend on `world`, so that every rank sets it up, or leave reuse=True away"
)


class RequestedTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test for a kept rank: which, with which arguments (pickled), under which marker;
    whether hypothesis will show this run of it.
    """

    nodeid: str
    arguments: bytes
    options: bytes
    final: bool = False


RUN = Job("distcheck.testing.rank:run", Rendezvous, type(None), (STORE,))
SERVE = Job("distcheck.testing.reused_rank:serve", Rendezvous, type(None), (STORE, CHANNEL))


def encoded(message: RankReport | Subtest) -> bytes:
    """As msgpack, whatever a test has put into it: text that is not UTF-8 is escaped, values of
    other types and integers beyond 64 bits become text.
    """
    try:
        return msgspec.msgpack.encode(message, enc_hook=str)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, an integer beyond 64 bits
        return msgspec.msgpack.encode(_escaped(msgspec.to_builtins(message, enc_hook=str)))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, dict):
        return {_escaped(key): _escaped(inner) for key, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, list | tuple) else value
