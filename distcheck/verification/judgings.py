"""Processes that judge a case beside the ranks of another: what they are given and answer."""

from dataclasses import dataclass

import msgspec

from distcheck.errors import InternalError
from distcheck.errors.masking import masked
from distcheck.judge import diagnosis
from distcheck.judge.diagnosis.facts import Facts
from distcheck.records import CheckResult
from distcheck.training.jobs import JUDGE, OBSERVE, JudgeJob, ObserveJob
from distcheck.verification.case_runs import CaseRun, WorldName
from distcheck.worlds.launch import error_of, start_job
from distcheck.worlds.pool import Pool
from distcheck.worlds.world import World

_JUDGE_DEADLINE_S = 600.0  # without any sign of work; a judge says what it begins


@dataclass(frozen=True)
class Judging:
    """`what` is judged: the first world; the rerun, in its place; a further world's bits."""

    run: CaseRun
    steps: tuple[int, ...]
    planned: tuple[tuple[str, str], ...]
    whole_run: bool
    closer_look: bool = False
    what: WorldName = "world"


def start_judging(pool: Pool, judging: Judging, description: bytes, data_fd: int | None) -> World:
    """Starts the process that judges; `description` and `data_fd` are of the data set."""
    run = judging.run
    if judging.closer_look:
        return _start_closer_look(pool, run, description, data_fd)
    other_fd = run.further_fd if judging.what == "further" else run.rerun_fd
    has_rerun = (judging.whole_run or judging.what == "rerun") and other_fd >= 0
    fds = [run.trace_fd]
    fds += [data_fd] if data_fd is not None else []
    fds += [other_fd] if has_rerun else []
    job = JudgeJob(
        case=run.case,
        contract=run.contract,
        layout=run.layout,
        description=description,
        steps=judging.steps,
        planned=judging.planned,
        has_data=data_fd is not None,
        has_rerun=has_rerun,
        of_rerun=judging.what == "rerun",
    )
    payload = msgspec.msgpack.encode(job)
    return start_job(pool, target=JUDGE, payload=payload, fds=fds, deadline_s=_JUDGE_DEADLINE_S)


def _start_closer_look(pool: Pool, run: CaseRun, description: bytes, data_fd: int | None) -> World:
    fds = [run.trace_fd] + ([data_fd] if data_fd is not None else [])
    job = ObserveJob(
        case=run.case,
        contract=run.contract,
        layout=run.layout,
        description=description,
        steps=diagnosis.steps_to_look_at(run.results),
        failed=tuple((r.check, r.layer) for r in run.results if r.verdict == "fail"),
        has_data=data_fd is not None,
        draws_random_numbers=run.facts.draws_random_numbers,
        takes_loss=run.facts.takes_loss,
        update_step=diagnosis.step_of_update(run.results),
    )
    payload = msgspec.msgpack.encode(job)
    return start_job(pool, target=OBSERVE, payload=payload, fds=fds, deadline_s=_JUDGE_DEADLINE_S)


def what_was_seen(world: World, run: CaseRun) -> Facts:
    """What a closer look has measured; why it could not, where it failed."""
    if world.succeeded:
        return msgspec.msgpack.decode(world.results[0], type=Facts)
    return Facts(world=run.case.world, trouble=str(error_of(world.children[0])))


def what_was_judged(world: World, judging: Judging) -> list[CheckResult]:
    """A judge's results; unknown, where it failed."""
    if world.succeeded:
        return msgspec.msgpack.decode(world.results[0], type=list[CheckResult])
    error = error_of(world.children[0])
    reason = f"the check itself failed: {error}"
    defect = masked(error.traceback) if isinstance(error, InternalError) else ""
    return [
        CheckResult(check=check, layer=layer, verdict="unknown", reason=reason, defect=defect)
        for check, layer in judging.planned
    ]
