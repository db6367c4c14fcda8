"""What the search says to kept ranks and their judge, in frames over a socket of each one's own.

ranks   a Turn, answered by saying nothing (b"") when it is trained and recorded
judge   a Sitting, answered by a `CaseReport`; while it is at work the ranks may have the next turn
"""

import msgspec

from distcheck.contract import Contract
from distcheck.records import Case
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.worker_pool import CHANNEL

# More than any explored case needs; the file is sparse, and emptied before every case.
TRACE_BYTES = 1 << 32
PAIRS = 2  # of traces, a first run and its rerun: one is judged while the other is recorded
TRACES = tuple(f"{name} {pair}" for pair in range(PAIRS) for name in ("trace", "rerun"))


class TrainCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case to train: recorded into a pair's first trace, or `again` into its second; `bare` ones
    are only trained.
    """

    case: Case
    pair: int = 0
    again: bool = False
    bare: bool = False


class JudgeCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case to judge, by what the front knows of it; recorded in the pair's first trace, and in
    its second if it was run again.
    """

    case: Case
    contract: Contract
    calibration_failure: str
    pair: int = 0


SERVE = Job("distcheck.explore.worker:serve", Rendezvous, type(None), (STORE, CHANNEL, *TRACES))
JUDGE = Job("distcheck.explore.worker:judge", bytes, type(None), (CHANNEL, *TRACES))
