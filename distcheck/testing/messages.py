"""Reports of a rank about its part of a test: msgpack, sent through its events pipe."""

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
    """The result of the test on one rank.

    exception   its class ("module:qualified name"); `message` is the first line of the exception
    longrepr    pytest's report of the exception, as serialized for xdist
    where       "path:line" of the exception
    left        open resources; `left_stays`: True if they would affect a later test in this rank
    groups      number of process groups that a persistent rank has created
    preloads    modules that every rank must import
    properties  pytest's "user properties"
    body_s      duration of the test without its fixtures
    said        events and targets for Hypothesis
    rejected    True if the rank rejected the Hypothesis example
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
    """The result of a subtest on one rank, sent at its end: pytest's report, serialized. `failure`
    is the rank's report as if the whole test had failed like the subtest, without `longrepr`.
    """

    name: str
    report: dict[str, Any]
    failure: RankReport | None = None

    def as_failure(self) -> RankReport:
        assert self.failure is not None
        return msgspec.structs.replace(self.failure, longrepr=self.report)


# Advice if a value cannot be sent to a persistent world.
KEPT_ELSE = (
    "make that fixture depend on `world`, so that every rank sets it up, or remove reuse=True"
)


class RequestedTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test for a persistent rank; `final` is True if Hypothesis will show this run."""

    nodeid: str
    arguments: bytes
    options: bytes
    final: bool = False


RUN = Job("distcheck.testing.rank:run", Rendezvous, type(None), (STORE,))
SERVE = Job("distcheck.testing.reused_rank:serve", Rendezvous, type(None), (STORE, CHANNEL))


def encode_message(message: RankReport | Subtest) -> bytes:
    """Encode a message as msgpack, whatever its content. Text that is not UTF-8 is escaped. Values
    of other types and integers beyond 64 bits become text.
    """
    try:
        return msgspec.msgpack.encode(message, enc_hook=str)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, an integer beyond 64 bits
        return msgspec.msgpack.encode(_escape_value(msgspec.to_builtins(message, enc_hook=str)))


def _escape_value(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, dict):
        return {_escape_value(key): _escape_value(inner) for key, inner in value.items()}
    return [_escape_value(inner) for inner in value] if isinstance(value, list | tuple) else value
