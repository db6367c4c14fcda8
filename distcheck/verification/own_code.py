"""Limits the code for which a process provides ranks, and distinguishes defects of distcheck from
those of the code under test.

A process that provides ranks runs only code from its command line. The front-end process selects
the case of a rank. It may change the built-in workload, the batch or the delays, as follow-ups do.
Strategies, and modules or files that a case names, must be among those that this process was
started with.

A traceback alone does not prove a defect of distcheck: objects of a strategy or workload may make
code of distcheck fail, with only its frames in the traceback. An exception is a defect if its
traceback and class indicate one (`root_cause.own_defect`), and the rank had not loaded any foreign
code or data, or the case names none. Otherwise the rank has crashed, and its outcome names the
place.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from distcheck import backends
from distcheck.errors import CannotRunError, InternalError
from distcheck.plan.provenance import named_code
from distcheck.records import Adaptation, Case
from distcheck.training import loading
from distcheck.training.jobs import CALIBRATE, RECORD, TRAIN
from distcheck.workloads.cells import class_of_cell
from distcheck.workloads.datasets import FILE_DATASETS, PREPARE, PrepareRequest
from distcheck.worlds import root_cause
from distcheck.worlds.jobs import Job
from distcheck.worlds.launch import internal_error
from distcheck.worlds.local.children import Child

_TARGETS = (CALIBRATE.target, RECORD.target, TRAIN.target)  # functions that rank 0 may start here


class _Meeting(msgspec.Struct, frozen=True):
    backend: str


class _Calibration(msgspec.Struct, frozen=True):
    rendezvous: _Meeting


class _Training(msgspec.Struct, frozen=True):
    rendezvous: _Meeting
    case: Case


class AllowedCode:
    """The code that this process may run: the code of `cases`, and built-in code."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._named = {one for case in cases for one in named_code(case)}

    def prepare(
        self, name: str, data_dir: str, *, download: bool
    ) -> tuple[Job[Any, bytes], PrepareRequest]:
        return PREPARE, PrepareRequest(name=name, data_dir=data_dir, download=download)

    def check(self, target: str, payload: bytes) -> None:
        """Raise CannotRunError if a rank's job would run code that is not allowed."""
        if target not in _TARGETS:
            raise CannotRunError(f"rank 0 requested {target}, which is not a rank job")
        try:
            if target == CALIBRATE.target:
                job = msgspec.msgpack.decode(payload, type=_Calibration)
                asked = {("backend", job.rendezvous.backend)}
            else:
                training = msgspec.msgpack.decode(payload, type=_Training)
                asked = {*named_code(training.case), ("backend", training.rendezvous.backend)}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CannotRunError(f"rank 0 requested a malformed job: {error}") from None
        for what, spec in sorted(asked - self._named):
            if not is_built_in(what, spec):
                raise CannotRunError(
                    f"rank 0 requested {what} {spec}, but this process was started for different "
                    "code; start every process with the same options"
                )


def is_built_in(what: str, spec: str) -> bool:
    """Return True if a case's workload or backend belongs to distcheck; else False."""
    place = (class_of_cell(spec) if what == "workload" else spec).partition(":")[0]
    if what == "workload":
        return place in loading.workload_names() or spec != class_of_cell(spec)
    return what == "backend" and backends.is_known(spec)


_STRATEGIES = "distcheck_strategies"  # other installed strategies are a user's
_BEFORE = "rendezvous"  # the phase in which ranks meet; the code under test is loaded after it


def defect_in_rank(case: Case, children: Sequence[Child], *, hung: bool) -> InternalError | None:
    raised = root_cause.own_defect(children, hung=hung)
    if raised is None:
        return None
    at = root_cause.first_cause(children, hung=hung).progress
    loaded = at is not None and at.phase != _BEFORE
    return None if loaded and not runs_only_distcheck_code(case) else internal_error(raised)


def runs_only_distcheck_code(case: Case) -> bool:
    if case.data in FILE_DATASETS or case.adaptation != Adaptation():
        return False
    return all(_is_own(what, spec) for what, spec in named_code(case))


def _is_own(what: str, spec: str) -> bool:
    if what != "strategy":
        return is_built_in(what, spec)
    point = loading.strategy_names().get(spec)
    return not spec or (point is not None and point.module.partition(".")[0] == _STRATEGIES)
