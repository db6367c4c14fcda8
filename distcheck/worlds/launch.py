"""Starts a world of ranks, or a single-process job."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic

from distcheck import backends, registry
from distcheck.errors import (
    CannotRunError,
    DistcheckError,
    ExitCode,
    HelperError,
    InternalError,
    NotSimulatedError,
    UsageError,
)
from distcheck.errors.defects import innermost_own_place
from distcheck.worlds import messages
from distcheck.worlds.jobs import STORE, Answer, Asked, Descriptors, Job
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.forking import LocalShare
from distcheck.worlds.messages import LOADING
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous, environment_of, rendezvous_endpoint
from distcheck.worlds.shares import LauncherJob, RankStart, Share, Shared, descriptors_of
from distcheck.worlds.surroundings import TOGETHER, Surroundings
from distcheck.worlds.world import World

_END_DEADLINE_S = 5.0  # for killed processes to exit
_JOB_DEADLINE_S = 600.0  # idle seconds; reading and downloading files takes time

NO_FDS: Mapping[str, Shared] = MappingProxyType({})
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
OnProgress = Callable[[int, messages.Progress], None]


@dataclass(frozen=True, kw_only=True)
class Ranks(Generic[Asked]):
    """`size` ranks that form a world. Each runs `job`, with the request that `request` builds from
    its rendezvous.

    This module applies the interpreters, the machines and the order of environment variables from
    `surroundings`; the job applies the rest.
    """

    job: Job[Asked, Any]
    backend: str
    size: int
    request: Callable[[Rendezvous], Asked]
    deadline_s: float
    surroundings: Surroundings = TOGETHER


def start_world(
    pool: Pool,
    ranks: Ranks[Asked],
    *,
    fds: Mapping[str, Shared] = NO_FDS,
    own_fds: Sequence[Descriptors] = (),
    on_progress: OnProgress | None = None,
) -> World:
    """Start a world of ranks. Each rank receives three kinds of descriptors: the store's, all of
    `fds`, and its own entry of `own_fds`.
    """
    pool.wait_ready()  # before there is a job: a helper forked from here would keep it alive
    job, backend, size = ranks.job, ranks.backend, ranks.size
    mpi: LauncherJob | None = registry.load("mpi").start_job(size) if backend == "mpi" else None
    try:
        in_memory = pool.forks_all
        with rendezvous_endpoint(pool.address, in_memory=in_memory) as (host, port, store):
            starts = rank_starts(
                ranks,
                host,
                port,
                in_memory=in_memory,
                variables=backends.variables(backend, pool.ranks_here(size)),
            )
            if own_fds:
                starts = [replace(start, fds=fd) for start, fd in zip(starts, own_fds, strict=True)]
            if mpi is not None:
                starts = [mpi.enlist(rank, start) for rank, start in enumerate(starts)]
            given = {STORE: Shared(fd=store), **fds}
            for start in starts:
                job.accept({**given, **start.fds})
            if backends.name_of(backend) == "simulated":
                shares: list[Share] = [
                    registry.load("simulated").start_share(
                        pool,
                        backend=backend,
                        deadline_s=ranks.deadline_s,
                        target=job.target,
                        starts=starts,
                        fds=descriptors_of(given),
                        schedule=ranks.surroundings.schedule,
                    )
                ]
            else:
                shares = pool.start_ranks(job.target, starts, given, together=mpi is not None)
    except BaseException:
        if mpi is not None:
            mpi.close()
        raise
    if mpi is not None:
        mpi.let_go_of_connections()
    return World(shares, deadline_s=ranks.deadline_s, on_progress=on_progress, job=mpi)


def rank_starts(
    ranks: Ranks[Any],
    host: str,
    port: int,
    *,
    in_memory: bool = False,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> list[RankStart]:
    """Return the start of each rank, for a rendezvous at an address or in memory."""
    size, surroundings = ranks.size, ranks.surroundings
    starts = []
    for rank in range(size):
        meeting = Rendezvous(
            backend=ranks.backend,
            rank=rank,
            world=size,
            host=host,
            port=port,
            deadline_s=ranks.deadline_s,
            in_memory=in_memory,
        )
        named = environment_of(meeting, nodes=surroundings.nodes_of(size))
        starts.append(
            RankStart(
                payload=ranks.job.encode(ranks.request(meeting)),
                environment={**named, **variables},
                interpreter=surroundings.interpreter_of(rank),
                order_seed=surroundings.order_seed(rank),
            )
        )
    return starts


def start_job(
    pool: Pool,
    job: Job[Asked, Any],
    request: Asked,
    fds: Descriptors | None = None,
    *,
    deadline_s: float,
    stopped_s: float | None = None,
) -> World:
    """Start a single-process job on this machine. `stopped_s` is the deadline for a stopped
    process.
    """
    start = RankStart(payload=job.encode(request), environment={}, fds=fds or {})
    job.accept(start.fds)
    share = LocalShare(pool, target=job.target, starts={0: start}, fds={})
    return World([share], deadline_s=deadline_s, stopped_s=stopped_s)


def run_until_over(pool: Pool, world: World, *, look: Callable[[], None] = lambda: None) -> None:
    """Block until the world is over. If this process is interrupted, end the world."""
    try:
        while not world.over:
            look()
            pool.pump(0.05)
            world.tick()
    except BaseException:
        kill_worlds(pool, world)
        raise


def kill_worlds(pool: Pool, *worlds: World) -> None:
    """Kill worlds, wait until their processes have exited, and close the worlds."""
    for world in worlds:
        world.kill()
    deadline = time.monotonic() + _END_DEADLINE_S
    try:
        while not all(world.over for world in worlds) and time.monotonic() < deadline:
            pool.pump(0.05)
            for world in worlds:
                world.tick()
    except HelperError:
        pass  # the helper has exited, and so have its children
    for world in worlds:
        world.close()


def run_job(
    pool: Pool, job: Job[Asked, Answer], request: Asked, fds: Descriptors | None = None
) -> Answer:
    """Run a single-process job to its end; return its result. Raises the errors of `job_result`."""
    world = start_job(pool, job, request, fds, deadline_s=_JOB_DEADLINE_S)
    run_until_over(pool, world)
    try:
        return job.decode(job_result(world))
    finally:
        world.close()


def job_result(world: World) -> bytes:
    """Return the encoded result of a finished single-process job.

    Raises the error that the job reported for the user (`DistcheckError`). Raises CannotRunError if
    the job ended in any other way.
    """
    child = world.children[0]
    if child.done is not None and world.succeeded:
        return child.done.payload
    raise reported_error(child)


def reported_error(child: Child) -> DistcheckError:
    raised = child.raised
    if raised is None:
        how = f"signal {child.exit_signal}" if child.exit_signal else f"code {child.exit_code}"
        if child.spawn_error:
            how = child.spawn_error
        said = child.output.strip().splitlines()[-1:] or ["no error message"]
        return CannotRunError(f"a process of distcheck ended with {how}: {said[0]}")
    if raised.exit_code == ExitCode.USAGE:
        return UsageError(raised.message)
    if raised.exit_code is not None:
        return CannotRunError(raised.message)
    if raised.defect:
        return internal_error(raised)
    lines = [line.strip() for line in raised.traceback.splitlines() if line.strip()]
    where = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return UsageError(f"{raised.kind}: {raised.message} ({where})" if where else raised.message)


def internal_error(raised: messages.Raised) -> InternalError:
    """Return the exception that reports a defect of distcheck itself."""
    where = innermost_own_place(raised.defect)
    return InternalError(f"{raised.kind}: {raised.message} (at {where})", raised.defect)


def refusal_of(world: World) -> DistcheckError | None:
    """Return the error for the user, if ranks of a finished world reported that the request cannot
    be run. If only some ranks failed to load the code, return None: then these ranks failed.
    """
    if (refused := not_simulated(world)) is not None:
        return refused
    reasons = (ExitCode.USAGE, ExitCode.CANNOT_RUN)
    refusing = [c for c in world.children if c.raised and c.raised.exit_code in reasons]
    if not refusing:
        return None
    loading = all(c.progress is not None and c.progress.phase == LOADING for c in refusing)
    if loading and len(refusing) < len(world.children):
        return None
    return reported_error(refusing[0])


def not_simulated(world: World) -> NotSimulatedError | None:
    """Return the error of a rank whose code cannot run in a simulated world, or None."""
    for child in world.children:
        if child.raised is not None and child.raised.kind == NotSimulatedError.__name__:
            return NotSimulatedError(child.raised.message)
    return None
