"""What the front asks of processes that judge a case, or look closer at one. No torch."""

import msgspec

from distcheck.contract import Contract
from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, CheckResult
from distcheck.worlds.jobs import Job


class _OfCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case, and its `steps` that are meant."""

    case: Case
    contract: Contract
    layout: TraceLayout
    description: bytes
    steps: tuple[int, ...]
    draws_random_numbers: bool = False


class JudgeRequest(_OfCase, frozen=True, kw_only=True):
    """What to judge: `planned` lists (check, layer).

    With `of_rerun` the rerun is judged in the first run's place. `of_run` lists what is judged of
    the run as a whole, beside the steps.
    """

    planned: tuple[tuple[str, str], ...]
    of_rerun: bool = False
    of_run: tuple[tuple[str, str], ...] = ()


class ObserveRequest(_OfCase, frozen=True, kw_only=True):
    """Steps of a failed case to look at more closely, the gradients' first; `failed` lists the
    (check, layer) that failed.
    """

    failed: tuple[tuple[str, str], ...]
    takes_loss: bool = True
    update_step: int = -1  # at which parameters failed first


JUDGE = Job(
    "distcheck.judge.job:judge", JudgeRequest, list[CheckResult], ("trace", "data", "rerun")
)
OBSERVE = Job(
    "distcheck.judge.diagnosis.observation:observe_job",
    ObserveRequest,
    Measurements,
    ("trace", "data"),
)
