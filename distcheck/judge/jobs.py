"""Requests to processes that judge or measure a case. Does not import torch."""

import msgspec

from distcheck.contract import Contract
from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Case, CheckResult, PlannedCheck
from distcheck.training.jobs import CaseFacts
from distcheck.worlds.jobs import Job


class _OfCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case, and the requested `steps`."""

    case: Case
    facts: CaseFacts
    layout: TraceLayout
    description: bytes
    steps: tuple[int, ...]

    @property
    def contract(self) -> Contract:
        return self.facts.contract


class JudgeRequest(_OfCase, frozen=True, kw_only=True):
    """A request to make the `planned` checks.

    With `of_rerun`, the rerun is judged instead of the first run. `of_run` lists checks of the
    whole run, to be made in addition to those of the steps.
    """

    planned: tuple[PlannedCheck, ...]
    of_rerun: bool = False
    of_run: tuple[PlannedCheck, ...] = ()


class ObserveRequest(_OfCase, frozen=True, kw_only=True):
    """A request to measure steps of a failed case, first those whose gradients failed. `failed`
    lists the failed (check, layer).
    """

    failed: tuple[tuple[str, str], ...]
    update_step: int = -1  # first step with failed parameters


JUDGE = Job(
    "distcheck.judge.job:judge", JudgeRequest, list[CheckResult], ("trace", "data", "rerun")
)
OBSERVE = Job(
    "distcheck.judge.diagnosis.observation:observe_job",
    ObserveRequest,
    Measurements,
    ("trace", "data"),
)
