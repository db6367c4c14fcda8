"""What a process that lends its ranks runs: the code that its own command line named, no other.

The front says which case a rank trains. It may choose another built-in workload, batch or delay,
as follow-ups do; strategies, and whatever a case names by module or file, must be among those that
this process was started with.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from distcheck import backends
from distcheck.errors import CannotRunError
from distcheck.plan.provenance import named
from distcheck.records import Case
from distcheck.training import loading
from distcheck.training.jobs import CALIBRATE, RECORD, TRAIN
from distcheck.workloads.cells import place_of
from distcheck.workloads.datasets.description import PREPARE, PrepareRequest
from distcheck.worlds.jobs import Job

_TARGETS = (CALIBRATE.target, RECORD.target, TRAIN.target)  # what a front may have done here


class _Meeting(msgspec.Struct, frozen=True):
    backend: str


class _Calibration(msgspec.Struct, frozen=True):
    rendezvous: _Meeting


class _Training(msgspec.Struct, frozen=True):
    rendezvous: _Meeting
    case: Case


class Allowed:
    """The code of `cases`, and what is built in."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._named = {one for case in cases for one in named(case)}

    def prepare(
        self, name: str, data_dir: str, *, download: bool
    ) -> tuple[Job[Any, bytes], PrepareRequest]:
        """The job that reads a data set, and what it is asked."""
        return PREPARE, PrepareRequest(name=name, data_dir=data_dir, download=download)

    def check(self, target: str, payload: bytes) -> None:
        """Raises CannotRunError for a rank's job that would run other code."""
        if target not in _TARGETS:
            raise CannotRunError(f"rank 0 asks for {target}; that is not a job of a rank")
        try:
            if target == CALIBRATE.target:
                job = msgspec.msgpack.decode(payload, type=_Calibration)
                asked = {("backend", job.rendezvous.backend)}
            else:
                training = msgspec.msgpack.decode(payload, type=_Training)
                asked = {*named(training.case), ("backend", training.rendezvous.backend)}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CannotRunError(f"rank 0 asks for a job that is malformed: {error}") from None
        for what, spec in sorted(asked - self._named):
            if not is_built_in(what, spec):
                raise CannotRunError(
                    f"rank 0 asks for {what} {spec}; this process was started for other code; "
                    "start every process with the same options"
                )


def is_built_in(what: str, spec: str) -> bool:
    """Whether a case's workload or backend is distcheck's own; nothing else of it is."""
    place = (place_of(spec) if what == "workload" else spec).partition(":")[0]
    if what == "workload":
        return place in loading.workload_names() or spec != place_of(spec)
    return what == "backend" and backends.is_known(spec)
