"""The code that a process was started for, and distcheck's own.

A process that lends its ranks runs the code that its own command line named, no other. The front
says which case a rank trains. It may choose another built-in workload, batch or delay, as
follow-ups do; strategies, and whatever a case names by module or file, must be among those that
this process was started with.

A traceback alone does not say that what ended a rank is a defect of distcheck's own: a strategy,
workload or value of others may leave behind what distcheck falls over, in frames of distcheck
alone. So an exception is called a defect where it is one by its traceback and its class
(`blame.own_defect`), and no code or data of others had been loaded: the rank had not come so far,
or the case names none. Otherwise the rank has crashed, and its outcome says where.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from distcheck import backends
from distcheck.errors import CannotRunError, InternalError
from distcheck.plan.provenance import named
from distcheck.records import Adaptation, Case
from distcheck.training import loading
from distcheck.training.jobs import CALIBRATE, RECORD, TRAIN
from distcheck.workloads.cells import place_of
from distcheck.workloads.datasets import FILE_DATASETS
from distcheck.workloads.datasets.description import PREPARE, PrepareRequest
from distcheck.worlds import root_cause
from distcheck.worlds.jobs import Job
from distcheck.worlds.launch import internal_error
from distcheck.worlds.local.children import Child

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


_STRATEGIES = "distcheck_strategies"  # other installed strategies are a user's
_BEFORE = "rendezvous"  # the phase in which ranks meet; what they train is loaded after it


def defect_in_rank(case: Case, children: Sequence[Child], *, hung: bool) -> InternalError | None:
    raised = root_cause.own_defect(children, hung=hung)
    if raised is None:
        return None
    at = root_cause.first_cause(children, hung=hung).progress
    loaded = at is not None and at.phase != _BEFORE
    return None if loaded and not is_own_alone(case) else internal_error(raised)


def is_own_alone(case: Case) -> bool:
    """Whether a case runs distcheck's own code on data that distcheck makes, and no other."""
    if case.data in FILE_DATASETS or case.adaptation != Adaptation():
        return False
    return all(_is_own(what, spec) for what, spec in named(case))


def _is_own(what: str, spec: str) -> bool:
    if what != "strategy":
        return is_built_in(what, spec)
    point = loading.strategy_names().get(spec)
    return not spec or (point is not None and point.module.partition(".")[0] == _STRATEGIES)
