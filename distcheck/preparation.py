"""What happens before ranks start: data into memory, a look at everything, calibration."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from distcheck import limits, plan
from distcheck.contract import BackendAllReduce, DDPBuckets, Order
from distcheck.datasets import FILE_DATASETS, ArrayDescription
from distcheck.errors import CannotRunError
from distcheck.jobs import (
    CALIBRATE,
    INSPECT,
    PREPARE,
    Calibration,
    CalibrationJob,
    CaseFacts,
    Facts,
    InspectionJob,
    PrepareJob,
)
from distcheck.positions import shard_sizes
from distcheck.records import Case
from distcheck.session import CaseRun
from distcheck.traces.layout import TraceLayout
from distcheck.worlds.launch import error_of, run_job, run_until_over, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous

_DEFAULT_DATA_DIR = "data"


@dataclass(frozen=True)
class Data:
    """A file data set in shared memory; `fd` is None where samples are computed."""

    fd: int | None = None
    description: bytes = b""
    note: str = ""


@contextlib.contextmanager
def prepared_data(pool: Pool, name: str, data_dir: str | None, *, download: bool) -> Iterator[Data]:
    """Reads a data set of files once, in a process of its own. Raises CannotRunError."""
    if name not in FILE_DATASETS:
        yield Data()
        return
    fd = os.memfd_create(f"distcheck-{name}")
    try:
        job = PrepareJob(name=name, data_dir=data_dir or _DEFAULT_DATA_DIR, download=download)
        description = run_job(pool, PREPARE, msgspec.msgpack.encode(job), [fd])
        about = msgspec.msgpack.decode(description, type=ArrayDescription)
        yield Data(fd, description, about.note)
    finally:
        os.close(fd)


def inspect(pool: Pool, cases: Sequence[Case], data: Data) -> Facts:
    """Loads every strategy and workload once. Raises UsageError or CannotRunError."""
    job = InspectionJob(
        cases=tuple(cases), description=data.description, has_data=data.fd is not None
    )
    fds = [data.fd] if data.fd is not None else []
    answer = run_job(pool, INSPECT, msgspec.msgpack.encode(job), fds)
    return msgspec.msgpack.decode(answer, type=Facts)


def plan_runs(
    pool: Pool, cases: Sequence[Case], facts: Sequence[CaseFacts], data: Data
) -> list[CaseRun]:
    """Layouts and planned checks of every case; calibrates what X relies on, once per world.

    Raises CannotRunError for a case that does not fit on this machine.
    """
    calibrations: dict[tuple[str, int], Calibration] = {}
    runs = []
    for case, about in zip(cases, facts, strict=True):
        sizes = shard_sizes(case.steps, size=about.train_size, batch=case.batch, world=case.world)
        layout = TraceLayout(
            world=case.world,
            steps=case.steps,
            max_shard=max(map(max, sizes)),
            model=about.model,
        )
        limits.check_room(case, about, layout)
        key = (case.backend, case.world)
        if key not in calibrations:
            calibrations[key] = _calibrate_for(pool, case, cases, facts)
        planned = plan.plan_checks(
            case,
            about,
            sizes=sizes,
            calibration_failure=calibrations[key].failure(about.contract),
        )
        run = CaseRun(case, about, about.contract, planned, layout)
        run.notes += [data.note] if data.note and case.data in FILE_DATASETS else []
        run.notes += plan.notes_on(case, sizes)
        runs.append(run)
    return runs


def _calibrate_for(
    pool: Pool, case: Case, cases: Sequence[Case], facts: Sequence[CaseFacts]
) -> Calibration:
    """Tries the orders that any case on this world relies on, in a world of this size."""
    orders: set[type[Order]] = set()
    dtypes: set[str] = set()
    for other, about in zip(cases, facts, strict=True):
        if other.world == case.world and about.contract.order is not None:
            orders.add(type(about.contract.order))
            dtypes.add(other.dtype)
    tags = {BackendAllReduce: "all-reduce", DDPBuckets: "ddp-buckets"}
    wanted = tuple(tag for order, tag in tags.items() if order in orders)
    if not wanted or case.world == 1:
        return Calibration(failures={})
    return calibrate(
        pool,
        backend=case.backend,
        world=case.world,
        orders=wanted,
        dtypes=tuple(sorted(dtypes)),
        deadline_s=case.deadline_s,
    )


def calibrate(
    pool: Pool,
    *,
    backend: str,
    world: int,
    orders: tuple[str, ...],
    dtypes: tuple[str, ...],
    deadline_s: float,
) -> Calibration:
    """Runs a calibrating world. Raises CannotRunError where not even that works."""

    def payload(rendezvous: Rendezvous) -> bytes:
        job = CalibrationJob(rendezvous=rendezvous, orders=orders, dtypes=dtypes)
        return msgspec.msgpack.encode(job)

    ranks = start_world(
        pool,
        target=CALIBRATE,
        backend=backend,
        size=world,
        payload=payload,
        fds=[],
        deadline_s=deadline_s,
    )
    run_until_over(pool, ranks)
    try:
        if not ranks.succeeded:
            why = f"nothing moved for {deadline_s:g} s; give more with --deadline-s, or fewer ranks"
            if not ranks.hung:
                unfinished = [c for c in ranks.children if c.done is None]
                why = str(error_of((unfinished or ranks.children)[0]))
            raise CannotRunError(
                f"a plain all_reduce over {world} ranks on {backend} failed: {why}"
            )
        answers = [msgspec.msgpack.decode(r, type=Calibration) for r in ranks.results]
    finally:
        ranks.close()
    failures: dict[str, str] = {}
    for answer in answers:
        for tag, failure in answer.failures.items():
            failures[tag] = failures.get(tag) or failure
    return Calibration(failures=failures)
