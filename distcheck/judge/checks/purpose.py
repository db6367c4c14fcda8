"""Reports if the events that a workload exists for happened in this run.

A workload declares events that must happen (`records/expected_events.py`). For example, a cell for
a short last batch tests nothing in a run without a short batch. Each event is searched for in the
ranks' recording. If one is missing, the verdict is unknown, with the expectation and the recording.
This check never fails: other checks judge the ranks.
"""

import re
from collections.abc import Callable
from typing import Any

from distcheck.judge.checks import happened
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.happened import RunOfEvents
from distcheck.judge.checks.tally import Tally
from distcheck.records.expected_events import Happening

OVER_STEPS = True  # judges all steps together


def detector_of_event(event: type[Happening]) -> Callable[[Any, RunOfEvents], str]:
    """Return the function in `happened` that detects an event."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", event.__name__).lower()
    look: Callable[[Any, RunOfEvents], str] = getattr(happened, name)
    return look


def compare(evidence: Evidence, tally: Tally) -> None:
    recording = RunOfEvents(evidence)
    for expectation in evidence.expectations:
        for rank, header in zip(evidence.with_data, expectation.headers, strict=True):
            read = len(header.ids)
            tally.count(parameter="", rank=rank, step=expectation.step, elements=read)
    for event in evidence.facts.must_happen:
        seen = (
            detector_of_event(type(event))(event, recording) if recording.steps else "seen: no step"
        )
        if seen:
            tally.missing(f"expected {event.says}; {seen}")
