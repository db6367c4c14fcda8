"""Requests that the search sends to persistent ranks and to their judge, over one socket each.

ranks   receive a TrainCase, and answer b"" once the case is trained and recorded
judge   receives a JudgeCase, and answers with a `CaseReport`; meanwhile the ranks may train the
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
    """A case to train. Ranks record it into the first trace of a pair of traces; into the second if
    `again` is set (the rerun); and not at all if `bare` is set.
    """

    case: Case
    pair: int = 0
    again: bool = False
    bare: bool = False


class JudgeCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case to judge. The first trace of the pair holds the run, and the second holds the rerun,
    if any.
    """

    case: Case
    contract: Contract
    calibration_failure: str
    pair: int = 0


SERVE = Job(
    "distcheck.addons.explore.worker:serve_rank", Rendezvous, type(None), (STORE, CHANNEL, *TRACES)
)
JUDGE = Job("distcheck.addons.explore.worker:serve_judge", bytes, type(None), (CHANNEL, *TRACES))
