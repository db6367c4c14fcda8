"""Decides how the ranks' batches are fed to the single-process script, and determines the weights
of ranks.

The decision is based on copies of the replay at the first step: one for each rank's batches, and
one with all batches concatenated. It does not use the gradients of the job.
"""

import math
from collections.abc import Sequence

from distcheck.job.inside import state
from distcheck.job.inside.batch_source import ALL, BatchSource
from distcheck.job.inside.joining import can_join_passes
from distcheck.job.inside.merged_batch import why_not_merged
from distcheck.job.settings import BY_RANK, IN_TURN, TOGETHER, ReferenceChoice, ReplayTask
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import CollectiveCall, StepRecord

SAME = 1e-3  # Heuristic: rounding leaves 1e-6, a hard-coded batch size half or more
SUMS = ("", "sum", "times")  # kinds of sums over samples, as in `terms.divisor_of_loss`
Copies = dict[ReplayTask, state.Tensors | None]


def trial_tasks(job: JobRecording, batch_source: BatchSource, apart: str) -> list[ReplayTask]:
    """Return the copies of the first step on which the decision is based. `apart` is the reason why
    batches cannot be concatenated.
    """
    first = job.steps[0]
    tasks = [ReplayTask(rank, first) for rank in range(job.world)]
    if not apart and not why_not_merged(job.at(first)):
        tasks.append(ReplayTask(ALL, first))
        if batch_source.varies():
            batch_source.pads = True
            tasks.append(ReplayTask(0, first, longer=True))
    if collective_before_backward(job) is not None:
        tasks.append(ReplayTask(0, first, doubles=True))
    return tasks


def choose(
    job: JobRecording, batch_source: BatchSource, found: Copies, said: str, apart: str,
    *, owns: bool = False,
) -> ReferenceChoice:  # fmt: skip
    """Decide by the results of the copies from `trial_tasks`. `said` is the reason why the first
    copy failed. `owns` is True if the script keeps its own inputs.
    """
    first, record = job.steps[0], job.records[0, job.steps[0]]
    alone = [found.get(ReplayTask(rank, first)) for rank in range(job.world)]
    base = alone[0]
    if base is None:
        failure = f"in a single process, given the inputs of rank 0, the script fails: {said}"
        return ReferenceChoice(failure=failure, retry="own inputs")
    if not owns and batch_source.is_divided(first):
        divided = "ranks give their models different parts of the same batch"
        return ReferenceChoice(failure=divided, retry="own inputs")
    if "more" in base:
        why = "the script makes more backward passes if there are fewer ranks"
        return ReferenceChoice(IN_TURN, why)
    if int(base["passes"]) != len(record.passes):
        return ReferenceChoice(
            retry="joined" if int(base["passes"]) == 1 and can_join_passes(job) else "",
            failure=f"in a single process the script makes {int(base['passes'])} forward passes "
            f"before its first step, but {len(record.passes)} as {job.world} ranks",
        )
    exchanges = any(call.after_backward for call in record.calls)
    if exchanges and job.world > 1 and abs(float(base["own"]) * job.world - 1) <= 1e-6:
        return ReferenceChoice(
            failure=f"in a single process the script still divides by {job.world}, which it does "
            "not read from its process group; pass the command that trains in a single "
            "process, --reference COMMAND"
        )
    why = apart or why_not_merged(job.at(first))
    together = found.get(ReplayTask(ALL, first))
    if not why and batch_source.pads:
        longer = found.get(ReplayTask(0, first, longer=True))
        batch_source.pads = longer is not None and state.distance(longer, base) <= SAME
        why = "" if batch_source.pads else "padding would change gradients"
    if not why and together is not None:
        choice = _choice_for_joint_batch(job, alone, together)
        if choice.mode == TOGETHER:
            return choice
        why = choice.why
    batch_source.pads = False
    doubled = found.get(ReplayTask(0, first, doubles=True))
    # Tensors exchanged before backward affect no gradient, such as logged losses. If a single
    # process exchanges fewer, as with SyncBatchNorm, the losses decide.
    is_unused = doubled is not None and state.distance(doubled, base) == 0
    recorded = sum(one.elements > 1 and not one.after_backward for one in record.calls)
    pairs = zip(job.at(first), alone, strict=True)
    # Heuristic: the same kernels ran on the same batch.
    same = all(one and math.isclose(one["loss"], rank.loss, rel_tol=1e-5) for rank, one in pairs)
    is_unused = is_unused and (int(base["exchanges"]) >= recorded or same)
    call = None if is_unused else collective_before_backward(job)
    why = why or "the ranks' batches cannot be concatenated"
    if call is not None:
        advice = "; set dropout to 0 for this check" * any(one.draws for one in record.passes)
        return ReferenceChoice(
            failure=f"ranks communicate before backward ({call.name} at {call.place}), which is "
            f"impossible if they are replayed one by one, as is necessary since {why}{advice}"
        )
    return ReferenceChoice(BY_RANK, why, scales=_scales(job, alone))


def _choice_for_joint_batch(
    job: JobRecording, alone: Sequence[state.Tensors | None], together: state.Tensors
) -> ReferenceChoice:
    """Return the choice for the concatenated batch. It is usable if the loss has the same meaning
    for that batch.
    """
    mean = state.mean(alone, [1 / job.world] * job.world)
    if mean is None:
        return ReferenceChoice(TOGETHER)
    factor = state.factor_of(together, mean)
    is_multiple = bool(factor) and state.distance(together, mean, factor) <= SAME
    if is_multiple and abs(factor - 1) <= SAME:
        return ReferenceChoice(TOGETHER)
    if is_multiple and abs(factor / job.world - 1) <= SAME:
        scales = _scales(job, alone)
        if scales == (1.0,):
            return ReferenceChoice(BY_RANK, "the loss is divided by a hard-coded number of samples")
        return ReferenceChoice(TOGETHER, scales=tuple(scale / job.world for scale in scales))
    records = job.at(job.steps[0])
    if any(one.drew for record in records for one in record.passes):
        return ReferenceChoice(
            BY_RANK, "the script draws random numbers between a batch and its loss"
        )
    # Samples interact, or ranks have different numbers of them.
    interacts = len(set(map(_shape, records))) == 1
    first = alone[0]
    has_negatives = first is not None and int(first["classes"]) < int(together["classes"])
    if interacts and has_negatives and collective_before_backward(job) is None:
        why = "the classes of a loss are the samples of a batch: all ranks' would be more negatives"
        return ReferenceChoice(BY_RANK, why, scales=_scales(job, alone))
    return ReferenceChoice(TOGETHER, interacts=interacts)


def _scales(job: JobRecording, copies: Sequence[state.Tensors | None]) -> tuple[float, ...]:
    """Return the admissible factors of the mean gradient for a loss that is a sum over samples: 1
    if it is divided by the number of samples of a rank, the world size if divided by the total
    number; otherwise both.
    """
    alone = copies[0]
    if alone is None or not int(alone["sums"]):
        return (1.0,)
    if SUMS[int(alone["sums"])] == "times":
        return (1.0, float(job.world))
    record, count = job.records[0, job.steps[0]], float(alone["count"])
    rows = [len(one.rows) for one in record.trained]
    targets = [call.counted for one in record.trained for call in one.losses]
    if count in {number for number in (*rows, *targets, sum(rows), sum(targets)) if number}:
        return (1.0,)
    # A multiple of one pass's count may be a number of something else.
    if count in {number * job.world for number in (sum(rows), sum(targets)) if number}:
        return (float(job.world),)
    # The script counts something that differs across ranks; weights account for it.
    if len({float(one["count"]) for one in copies if one is not None}) > 1:
        return (1.0,)
    return (1.0, float(job.world))


def collective_before_backward(job: JobRecording) -> CollectiveCall | None:
    """Return the first collective of more than one element that a rank called before backward."""
    calls = (call for step in job.steps for one in job.at(step) for call in one.calls)
    return next((call for call in calls if call.elements > 1 and not call.after_backward), None)


def weights(
    job: JobRecording, step: int, parts: Sequence[state.Tensors | None], asked: str
) -> tuple[list[float], str]:
    """Return the weight of each rank, from its copy's loss divisor or the user's choice, and the
    reason if it is unknown.
    """
    equal = [1 / job.world] * job.world
    records = job.at(step)
    if asked and asked != "equal":
        numbers = [float(_weight_of(record, asked)) for record in records]
    else:
        numbers = [0.0 if part is None else float(part["count"]) for part in parts]
    if asked == "equal" or (not all(numbers) and len(set(map(_shape, records))) == 1):
        return equal, ""
    if all(numbers):
        return [number / sum(numbers) for number in numbers], ""
    several = ", ".join(str(_weight_of(record, "targets")) for record in records)
    return equal, (
        f"the ranks' losses cover different numbers of samples or targets ({several}), and their "
        "denominators cannot be determined; pass the rank weights: --weights samples, targets or "
        "equal"
    )


def _weight_of(record: StepRecord, of: str) -> int:
    targets = sum(call.counted for one in record.trained for call in one.losses)
    return (
        sum(len(one.rows) for one in record.trained) if of == "samples" or not targets else targets
    )


def _shape(record: StepRecord) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of samples and targets of a rank's loss, by pass."""
    return tuple((len(p.rows), *(call.counted for call in p.losses)) for p in record.trained)
