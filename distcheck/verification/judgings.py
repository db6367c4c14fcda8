"""Processes that judge a case beside the ranks of another: what they are given and answer."""

from dataclasses import dataclass
from itertools import pairwise

from distcheck.errors import DistcheckError, InternalError
from distcheck.errors.masking import masked
from distcheck.judge import diagnosis
from distcheck.judge.diagnosis.facts import Facts
from distcheck.judge.jobs import JUDGE, OBSERVE, JudgeRequest, ObserveRequest
from distcheck.records import CheckResult
from distcheck.records.layers import FULL_BATCH_LAYERS
from distcheck.verification.case_run import CaseRun, WorldName
from distcheck.worlds.launch import job_result, start_job
from distcheck.worlds.pool import Pool
from distcheck.worlds.world import World

_LONG_WORLD_S = 2.0  # beyond this, another process to judge with costs nothing
_JUDGE_PER_RANK_S = 1.0  # of a core's time, which the world can have used
_JUDGE_DEADLINE_S = 600.0  # without any sign of work; a judge says what it begins


@dataclass(frozen=True)
class Judging:
    """`what` is judged: the first world; the rerun, in its place; a further world's bits. `of_run`
    is what is judged of the whole run beside some of its steps.
    """

    run: CaseRun
    steps: tuple[int, ...]
    planned: tuple[tuple[str, str], ...]
    whole_run: bool
    closer_look: bool = False
    what: WorldName = "world"
    of_run: tuple[tuple[str, str], ...] = ()


def steps_of_judges(run: CaseRun, steps: int, most: int, cores: int) -> list[tuple[int, ...]]:
    """The steps of each judge, of at most so many. The lattice trains on from its own beginning,
    and what must happen in a run may take several steps, so these are not shared; nor are those
    that a GPU judges, on which a step takes less than a process takes to begin. A short world is
    judged beside its rerun, in time, by fewer: to start one takes the cores from those ranks.
    """
    if steps == 0:
        return []
    is_whole = "lattice" in run.case.layers or run.facts.must_happen
    if is_whole or run.case.judged_on != "cpu":
        return [tuple(range(steps))]
    judges = min(steps, most)
    if "world" in run.timings_s:
        busy_s = run.timings_s["world"] * min(run.case.world, cores)
        judges = min(judges, 1 + int(busy_s / _JUDGE_PER_RANK_S))
    bounds = [steps * k // judges for k in range(judges + 1)]
    return [tuple(range(a, b)) for a, b in pairwise(bounds)]


def groups_of_checks(run: CaseRun) -> list[list[tuple[str, str]]]:
    """The checks of its steps that each judge makes. After a long world the two references, of like
    cost, are apart, the longer part (it also runs the batch without ghosts) first, so that the
    cores finish together.
    """
    planned = [(p.check, p.layer) for p in run.planned if p.scope == "step"]
    if run.timings_s.get("world", 0.0) <= _LONG_WORLD_S:
        return [planned]
    whole = [pair for pair in planned if pair[1] in FULL_BATCH_LAYERS]
    return [group for group in (whole, [p for p in planned if p not in whole]) if group]


def start_judging(pool: Pool, judging: Judging, description: bytes, data_fd: int | None) -> World:
    """Starts the process that judges; `description` and `data_fd` are of the data set."""
    run = judging.run
    if judging.closer_look:
        return _start_closer_look(pool, run, description, data_fd)
    other: WorldName = "further" if judging.what == "further" else "rerun"
    has_rerun = (judging.whole_run or judging.what == "rerun") and other in run.traces
    fds = {"trace": run.traces["world"]}
    fds |= {"data": data_fd} if data_fd is not None else {}
    fds |= {"rerun": run.traces[other]} if has_rerun else {}
    request = JudgeRequest(
        case=run.case,
        contract=run.contract,
        layout=run.layout,
        description=description,
        steps=judging.steps,
        planned=judging.planned,
        draws_random_numbers=run.facts.draws_random_numbers,
        of_rerun=judging.what == "rerun",
        of_run=judging.of_run,
    )
    return start_job(
        pool, JUDGE, request, fds, deadline_s=_JUDGE_DEADLINE_S, stopped_s=run.case.deadline_s
    )


def _start_closer_look(pool: Pool, run: CaseRun, description: bytes, data_fd: int | None) -> World:
    fds = {"trace": run.traces["world"]} | ({"data": data_fd} if data_fd is not None else {})
    request = ObserveRequest(
        case=run.case,
        contract=run.contract,
        layout=run.layout,
        description=description,
        steps=diagnosis.steps_to_look_at(run.results),
        failed=tuple((r.check, r.layer) for r in run.results if r.verdict == "fail"),
        draws_random_numbers=run.facts.draws_random_numbers,
        takes_loss=run.facts.takes_loss,
        update_step=diagnosis.step_of_update(run.results),
    )
    return start_job(
        pool, OBSERVE, request, fds, deadline_s=_JUDGE_DEADLINE_S, stopped_s=run.case.deadline_s
    )


def what_was_seen(world: World, run: CaseRun) -> Facts:
    """What a closer look has measured; why it could not, where it failed."""
    try:
        return OBSERVE.decode(job_result(world))
    except DistcheckError as error:
        return Facts(world=run.case.world, trouble=str(error))


def what_was_judged(world: World, judging: Judging) -> list[CheckResult]:
    """A judge's results; unknown, where it failed."""
    try:
        return JUDGE.decode(job_result(world))
    except DistcheckError as raised:
        error = raised
    reason = f"the check itself failed: {error}"
    defect = masked(error.traceback) if isinstance(error, InternalError) else ""
    return [
        CheckResult(check=check, layer=layer, verdict="unknown", reason=reason, defect=defect)
        for check, layer in (*judging.planned, *judging.of_run)
    ]
