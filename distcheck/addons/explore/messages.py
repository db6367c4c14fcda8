"""Requests from the search to persistent ranks and their judge, in frames over one socket each.

ranks   receive a TrainCase, and answer b"" when the case is trained and recorded
judge   receives a JudgeCase, and answers with a `CaseReport`; meanwhile the ranks may receive the
        next case
"""

import msgspec

from distcheck.contract import Contract
from distcheck.records import Case
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.worker_pool import CHANNEL

# More than any explored case needs; the file is sparse, and truncated before every case.
TRACE_BYTES = 1 << 32
PAIRS = 2  # pairs of traces, a first run and its rerun: one is judged while the other is recorded
TRACES = tuple(f"{name} {pair}" for pair in range(PAIRS) for name in ("trace", "rerun"))


class TrainCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case to train. It is recorded into a pair's first trace, into the second if `again`, and
    not at all if `bare`.
    """

    case: Case
    pair: int = 0
    again: bool = False
    bare: bool = False


class JudgeCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case to judge: the pair's first trace holds the run, and the second its rerun, if any."""

    case: Case
    contract: Contract
    calibration_failure: str
    pair: int = 0


SERVE = Job(
    "distcheck.addons.explore.worker:serve_rank", Rendezvous, type(None), (STORE, CHANNEL, *TRACES)
)
JUDGE = Job("distcheck.addons.explore.worker:serve_judge", bytes, type(None), (CHANNEL, *TRACES))
