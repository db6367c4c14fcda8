"""What the workload is for happened in this run.

A workload declares what must happen in its run (`records/expected_events.py`): a cell for a short
last batch shows nothing in a run that has none. Each event is looked for in what the ranks
recorded. Where one is missing the verdict is unknown, with what was expected and what was seen.
This check never fails: whether the ranks did right is for the others.
"""

import re
from collections.abc import Callable
from typing import Any

from distcheck.judge.checks import happened
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.happened import RunOfEvents
from distcheck.judge.checks.tally import Tally
from distcheck.records.expected_events import Happening

OVER_STEPS = True  # looks at all steps together


def look_for(event: type[Happening]) -> Callable[[Any, RunOfEvents], str]:
    """The function in `happened` that has an event's name."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", event.__name__).lower()
    look: Callable[[Any, RunOfEvents], str] = getattr(happened, name)
    return look


def compare(evidence: Evidence, tally: Tally) -> None:
    recording = RunOfEvents(evidence)
    for expectation in evidence.expectations:
        for rank, header in zip(evidence.with_data, expectation.headers, strict=True):
            read = len(header.ids)
            tally.count(parameter="", rank=rank, step=expectation.step, elements=read)
    for event in evidence.must_happen:
        seen = look_for(type(event))(event, recording) if recording.steps else "seen: no step"
        if seen:
            tally.missing(f"expected {event.says}; {seen}")
