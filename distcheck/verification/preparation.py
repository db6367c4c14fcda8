"""Prepares a run before ranks start: loads data into memory, inspects the code, calibrates."""

import contextlib
import os
import re
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import msgspec
import xxhash

from distcheck.backends import backend_names, name_of
from distcheck.contract import BackendAllReduce, BackendReduce, DDPBuckets, Order
from distcheck.errors import (
    CannotRunError,
    DistcheckError,
    LeftOutError,
    OtherBackendError,
    RankLostError,
    UsageError,
)
from distcheck.errors.defects import OWN_CODE
from distcheck.machine.sealed_memory import open_memory, seal_content
from distcheck.plan import case_remarks as remarks
from distcheck.plan import cases as plan
from distcheck.plan.cells_to_run import counts_only_if_finished
from distcheck.recordings.traces.header import lines_capacity
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.records import Adaptation, Case, TensorSpec
from distcheck.training.epoch_positions import shard_sizes
from distcheck.training.jobs import (
    CALIBRATE,
    INSPECT,
    WAYS,
    CalibrationRequest,
    CalibrationResult,
    CaseFacts,
    CodeFacts,
    InspectionRequest,
)
from distcheck.verification import limits
from distcheck.verification.case_run import CaseRun
from distcheck.workloads.datasets import FILE_DATASETS, PREPARE, ArrayDescription, PrepareRequest
from distcheck.worlds import root_cause
from distcheck.worlds.launch import (
    Ranks,
    internal_error,
    job_result,
    reported_error,
    run_job,
    run_until_over,
    start_job,
    start_world,
)
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.helper_process import child_environment
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous
from distcheck.worlds.world import World

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_BY_THE_KERNEL = "sent by the kernel's out-of-memory killer or by kill -9"


def error_without_result(world: World, *, deadline_s: float) -> DistcheckError | None:
    """Return the error for a process that ended without result or error, else None."""
    child = world.children[0]
    if child.done is not None or child.raised is not None or child.spawn_error or child.lost:
        return None
    loaded = child.progress.phase if child.progress is not None else "the strategy"
    killed = child.exit_signal == signal.SIGKILL
    if child.stopped:
        how = "was stopped (state T, SIGSTOP)"
    elif world.hung:
        how = f"hung: it made no progress for {deadline_s:g} s{_where_stopped(child)}"
    elif child.exit_signal is not None:
        how = f"was killed by {signal.Signals(child.exit_signal).name}{_where_stopped(child)}"
    else:
        how = f"exited with code {child.exit_code}{_where_stopped(child)}"
    said = f"the process that loads {loaded} {how}"
    if killed and not world.hung:
        return CannotRunError(f"{said}: {_BY_THE_KERNEL}")
    return UsageError(f"{said}; loading must return and must not change the process")


def _where_stopped(child: Child) -> str:
    """Return " at FILE:LINE" for the innermost known place of a process; "" if unknown."""
    text = child.stacks.text if child.stacks is not None else ""
    crashed = child.low_level_stacks.rpartition("Current thread")[2]
    low = [one for one in _PLACE.findall(crashed) if not one[0].startswith(OWN_CODE)]
    places = _PLACE.findall(text)[-1:] or low[:1]  # last in the one, first in the other
    return f" at {places[0][0]}:{places[0][1]}" if places else ""


_DEFAULT_DATA_DIR = "data"
_WITH_TORCH = ("gloo", "simulated")  # backends that exist with every torch and distcheck
_MOST_SIMULATED = 8  # Heuristic: ranks that try a simulated order
_LEAST_LOADING_S = 30.0  # Heuristic: idle seconds; a file may wait while it is imported
# Orders that are properties of a library; others are defined by the strategy.
TO_CONFIRM = (BackendAllReduce, BackendReduce, DDPBuckets)
# Confirmed calibrations of a pool's torch, by environment; only of gloo and simulated worlds: the
# library of another backend may change or break between runs.
_confirmed: WeakKeyDictionary[Pool, dict[str, CalibrationResult]] = WeakKeyDictionary()


@dataclass(frozen=True)
class SharedDataset:
    """A file data set in shared memory. `fd` is None if samples are computed."""

    fd: int | None = None
    description: bytes = b""
    note: str = ""

    @property
    def fds(self) -> dict[str, int]:
        """The file descriptors for a process that reads the data."""
        return {} if self.fd is None else {"data": self.fd}


@contextlib.contextmanager
def load_shared_dataset(
    pool: Pool, name: str, data_dir: str | None, *, download: bool
) -> Iterator[SharedDataset]:
    """Read a file data set once, in a separate process. Raises CannotRunError."""
    if name not in FILE_DATASETS:
        yield SharedDataset()
        return
    fd = open_memory(f"distcheck-{name}")
    try:
        folder = data_dir or _DEFAULT_DATA_DIR
        job = PrepareRequest(name=name, data_dir=folder, download=download)
        description = run_job(pool, PREPARE, job, {"data": fd})
        seal_content(fd)
        about = msgspec.msgpack.decode(description, type=ArrayDescription)
        for where, other in pool.share_data(name, folder, download=download).items():
            if msgspec.msgpack.decode(other, type=ArrayDescription).digest != about.digest:
                raise CannotRunError(
                    f"{where} has different files of {name} than rank 0; copy the same files to "
                    "every machine"
                )
        yield SharedDataset(fd, description, about.note)
    finally:
        os.close(fd)


def inspect(pool: Pool, cases: Sequence[Case], data: SharedDataset) -> CodeFacts:
    """Load every strategy and workload once. Raises UsageError, CannotRunError."""
    request = InspectionRequest(
        cases=tuple(cases),
        description=data.description,
        ranks_here=max(pool.ranks_here(case.world) for case in cases),
    )
    deadline_s = max(_LEAST_LOADING_S, *(case.deadline_s for case in cases))
    world = start_job(pool, INSPECT, request, data.fds, deadline_s=deadline_s)
    run_until_over(pool, world)
    try:
        if reason := error_without_result(world, deadline_s=deadline_s):
            raise reason
        return INSPECT.decode(job_result(world))
    finally:
        world.close()


def ways_to_call(pool: Pool, case: Case) -> tuple[tuple[Adaptation, ...], ...]:
    """Return the alternative ways to call a case's strategy, in tiers."""
    request = InspectionRequest(cases=(case,), description=b"")
    world = start_job(pool, WAYS, request, {}, deadline_s=max(_LEAST_LOADING_S, case.deadline_s))
    run_until_over(pool, world)
    try:
        return WAYS.decode(job_result(world)) if world.succeeded else ()
    finally:
        world.close()


def plan_runs(
    pool: Pool,
    cases: Sequence[Case],
    facts: Sequence[CaseFacts],
    data: SharedDataset,
    spare: Collection[int] = (),
) -> tuple[list[CaseRun], dict[str, str]]:
    """Return the layout and planned checks of every case, and the reason for each case left out.
    Calibrate, once per world, the orders that the bitwise layer relies on.

    A case is left out, with a note on its sibling cases, if its strategy's wire dtype cannot
    represent its numbers, or if it does not fit on this machine and its world is in `spare`. Raises
    CannotRunError for any other case that does not fit on this machine, or on its backend.
    """
    for case, about in zip(cases, facts, strict=True):
        if about.contract.backend not in (None, case.backend):
            raise OtherBackendError(
                f"strategy {case.strategy} works only on backend {about.contract.backend}, not "
                f"on {case.backend}; pass --backend {about.contract.backend}",
                about.contract.backend,
            )
        if about.contract.device not in (None, case.device):
            raise CannotRunError(
                f"strategy {case.strategy} works only on device {about.contract.device}, not on "
                f"{case.device}; pass --device {about.contract.device}"
            )
    left_out: list[tuple[Case, str]] = []
    calibrations: dict[tuple[str, int], CalibrationResult] = {}
    runs = []
    for case, about in zip(cases, facts, strict=True):
        sizes = samples_per_rank(case, about)
        if reason := remarks.why_left_out(case, about, sizes):
            left_out.append((case, reason))
            continue
        layout = TraceLayout(
            world=case.world,
            steps=case.steps,
            max_shard=max(map(max, sizes)),
            model=about.model,
            outputs=_outputs(about, max(map(max, sizes))),
            line_bytes=lines_capacity(len(about.model.parameters)),
        )
        try:
            limits.check_resources(case, about, layout, ranks_here=pool.ranks_here(case.world))
        except CannotRunError as error:
            if case.world not in spare:
                raise
            left_out.append((case, str(error)))
            continue
        key = (case.backend, case.world)
        if key not in calibrations:
            calibrations[key] = _calibrate_for(pool, case, cases, facts)
        plan_additional_runs = plan.plan_checks(
            case,
            about,
            sizes=sizes,
            calibration_failure=calibrations[key].failure(about.contract),
        )
        notes = tuple(_notes(case, about, sizes, data))
        runs.append(
            CaseRun(
                case=case,
                facts=about,
                planned=tuple(plan_additional_runs),
                layout=layout,
                notes=notes,
            )
        )
    for case, reason in left_out:
        _note_left_out(case, reason, runs, elsewhere=case.world in spare)
    return runs, {case.id: reason for case, reason in left_out}


def plan_additional_runs(pool: Pool, cases: Sequence[Case], data: SharedDataset) -> list[CaseRun]:
    """Return the planned runs of additional cases, without those that cannot run."""
    try:
        return plan_runs(pool, cases, inspect(pool, cases, data).cases, data)[0]
    except (UsageError, CannotRunError):
        if len(cases) == 1:
            return []
    return [run for case in cases for run in plan_additional_runs(pool, [case], data)]


def _outputs(about: CaseFacts, most: int) -> tuple[TensorSpec, ...]:
    """Return the specification of the model's outputs for up to `most` samples, in a layout."""
    if not about.contract.parallel or about.output is None:
        return ()
    return (msgspec.structs.replace(about.output, shape=(most, *about.output.shape)),)


def samples_per_rank(case: Case, about: CaseFacts) -> list[list[int]]:
    """Return the number of samples that each rank with data reads, per step: [steps][ranks]."""
    mesh = about.contract.mesh(case.world)
    world = len(case.with_data) if mesh is None else mesh.data
    sizes = shard_sizes(case.steps, size=about.train_size, batch=case.batch, world=world)
    return sizes if mesh is None else [mesh.spread(of_step) for of_step in sizes]


def _notes(
    case: Case, about: CaseFacts, sizes: Sequence[Sequence[int]], data: SharedDataset
) -> Iterator[str]:
    """Yield remarks that a reader needs before the verdict of a case."""
    if data.note and case.data in FILE_DATASETS:
        yield data.note
    if about.note:
        yield about.note
    yield from remarks.notes_on_case(case, sizes, about.contract, by_tokens=about.by_tokens)
    if why := remarks.why_no_full_batch(case, about, sizes):
        yield why
    if about.contract.parallel and about.model.buffers:
        yield remarks.BUFFERS
    if about.makes_groups and about.contract.one_group:
        yield remarks.ONE_GROUP
    if not about.updates_again:
        yield remarks.NOT_REPEATED


def _note_left_out(case: Case, reason: str, runs: Sequence[CaseRun], *, elsewhere: bool) -> None:
    """Note a case left out on cases of the same strategy and world or, if there are none and
    `elsewhere`, of other worlds. Raises LeftOutError if there are none at all.
    """
    siblings = [run for run in runs if run.case.sibling_key == case.sibling_key]
    if counts_only_if_finished(case) and siblings:
        return  # it was not requested; the limits of a pass name it
    if not siblings and elsewhere:
        reason = f"world {case.world}: {reason}"
        siblings = [run for run in runs if run.case.strategy == case.strategy]
    if not siblings:
        raise LeftOutError(
            f"workload {case.workload} cannot run with {case.strategy} at world size "
            f"{case.world}: {reason}; pass a different --workload or --batch"
        )
    for run in siblings:
        run.notes += (f"workload {case.workload} is skipped: {reason}",)


def _calibrate_for(
    pool: Pool, case: Case, cases: Sequence[Case], facts: Sequence[CaseFacts]
) -> CalibrationResult:
    """Try the orders that any case in this world relies on, in a world of this size."""
    orders: dict[Order, None] = {}
    dtypes: set[str] = set()
    for other, about in zip(cases, facts, strict=True):
        alike = (other.world, other.backend) == (case.world, case.backend)
        if alike and isinstance(about.contract.order, TO_CONFIRM):
            orders[about.contract.order] = None
            dtypes |= {about.contract.wire or dtype for dtype in _exchanged(other, about)}
    # A backend with its own library is tried in any case: it can fail in ways that
    # `backends.missing` does not detect.
    name = name_of(case.backend)
    if case.world == 1 or (not orders and name in _WITH_TORCH):
        return CalibrationResult()
    # The order of a simulated world and of DDP's buckets does not depend on the world size: a
    # thousand ranks need not fill memory with vectors.
    world = min(case.world, _MOST_SIMULATED) if name == "simulated" else case.world
    what = (case.backend, world, tuple(orders), sorted(dtypes), case.device, case.deadline_s)
    surroundings = child_environment()
    surroundings.pop("PYTEST_CURRENT_TEST", None)  # differs in every test
    key = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((what, sorted(surroundings.items()))))
    known = _confirmed.setdefault(pool, {})
    if key in known:
        return known[key]
    found = calibrate(
        pool,
        backend=case.backend,
        world=world,
        orders=tuple(orders),
        dtypes=tuple(sorted(dtypes)),
        device=case.device,
        deadline_s=case.deadline_s,
    )
    if name in _WITH_TORCH and not any(why for _, why in found.failures):
        known[key] = found
    return found


def _exchanged(case: Case, facts: CaseFacts) -> set[str]:
    """Return the dtypes in which gradients are summed; complex numbers are summed as pairs."""
    parts = {"complex64": "float32", "complex128": "float64"}
    found = {parts.get(spec.dtype, spec.dtype) for spec in facts.model.parameters}
    return found or {case.dtype}


def calibrate(
    pool: Pool,
    *,
    backend: str,
    world: int,
    orders: tuple[Order, ...],
    dtypes: tuple[str, ...],
    deadline_s: float,
    device: str = "cpu",
) -> CalibrationResult:
    """Run a calibrating world and return its result. Raises CannotRunError if it fails."""

    def request(rendezvous: Rendezvous) -> CalibrationRequest:
        return CalibrationRequest(
            rendezvous=rendezvous, orders=orders, dtypes=dtypes, device=device
        )

    wanted = Ranks(
        job=CALIBRATE, backend=backend, size=world, request=request, deadline_s=deadline_s
    )
    ranks = start_world(pool, wanted)
    run_until_over(pool, ranks)
    try:
        if not ranks.succeeded:
            lost = [child.lost for child in ranks.children if child.lost]
            if lost:
                raise RankLostError(lost[0])
            why = f"no progress for {deadline_s:g} s; raise --deadline, or use fewer ranks"
            if not ranks.hung:
                raised = root_cause.own_defect(ranks.children, hung=False)
                if raised is not None and name_of(backend) in backend_names():
                    raise internal_error(raised)
                why = str(reported_error(root_cause.first_cause(ranks.children, hung=False)))
            raise CannotRunError(
                f"a plain all_reduce over {world} ranks on {backend} failed: {why}"
            )
        answers = [CALIBRATE.decode(r) for r in ranks.results]
    finally:
        ranks.close()
    failures = dict.fromkeys(orders, "")
    for answer in answers:
        for order, failure in answer.failures:
            failures[order] = failures[order] or failure
    return CalibrationResult(failures=tuple(failures.items()))
