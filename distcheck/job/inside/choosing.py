"""Which batches a script takes as one process, and what each rank counts for: by what copies of the
replay computed in the first step, one with each rank's batches and one with all of them together.

Nothing here looks at what the job's own gradients were.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distcheck.job.inside import state
from distcheck.job.inside.batch_source import ALL, BatchSource
from distcheck.job.inside.joining import can_join
from distcheck.job.inside.merged_batch import interacts
from distcheck.job.settings import BY_RANK, IN_TURN, TOGETHER, ReplayTask
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import CollectiveCall, StepRecord

SAME = 1e-3  # chosen: rounding leaves 1e-6, and a batch size that is written down half or more
SUMS = ("", "sum", "times")  # how a loss is a sum over samples: as in `terms.count_of`
Copies = dict[ReplayTask, state.Tensors | None]


@dataclass(frozen=True)
class ReferenceChoice:
    """How the ranks' batches are handed out; or `failure`, why they cannot be. A right job has the
    reference's gradients times one of `scales`: a sum over samples is often scaled by the world.
    """

    mode: str = ""
    why: str = ""
    failure: str = ""
    scales: tuple[float, ...] = (1.0,)
    joins: bool = False  # it fails, and may not with the micro-batches of a step as one pass
    interacts: bool = False  # one batch of all has another gradient than the mean of the ranks'


def tries(job: JobRecording, batch_source: BatchSource, apart: str) -> list[ReplayTask]:
    """The copies of the first step by which it is chosen; `apart`: why batches stay as they are."""
    first = job.steps[0]
    tasks = [ReplayTask(rank, first) for rank in range(job.world)]
    if not apart and not interacts(job.at(first)):
        tasks.append(ReplayTask(ALL, first))
        if batch_source.varies():
            batch_source.pads = True
            tasks.append(ReplayTask(0, first, longer=True))
    if _before_backward(job) is not None:
        tasks.append(ReplayTask(0, first, doubles=True))
    return tasks


def choose(
    job: JobRecording, batch_source: BatchSource, found: Copies, said: str, apart: str
) -> ReferenceChoice:
    """The choice, by what the copies of `tries` have computed; `said` is why the first failed."""
    first, record = job.steps[0], job.records[0, job.steps[0]]
    alone = [found.get(ReplayTask(rank, first)) for rank in range(job.world)]
    base = alone[0]
    if base is None:
        return ReferenceChoice(failure=f"as one process the script fails in its first step: {said}")
    if "more" in base:
        why = "the script makes more backward passes where there are fewer ranks"
        return ReferenceChoice(IN_TURN, why)
    if int(base["passes"]) != len(record.passes):
        return ReferenceChoice(
            joins=int(base["passes"]) == 1 and can_join(job),
            failure=f"as one process the script makes {int(base['passes'])} forward passes before "
            f"its first step, and {len(record.passes)} as {job.world} ranks",
        )
    exchanges = any(call.after_backward for call in record.calls)
    if exchanges and job.world > 1 and abs(float(base["own"]) * job.world - 1) <= 1e-6:
        return ReferenceChoice(
            failure=f"as one process the script's own exchange still divides by {job.world}, which "
            "it has from elsewhere than its process group; give the command that trains as one "
            "process, --reference COMMAND"
        )
    why = apart or interacts(job.at(first))
    together = found.get(ReplayTask(ALL, first))
    if not why and batch_source.pads:
        longer = found.get(ReplayTask(0, first, longer=True))
        batch_source.pads = longer is not None and state.distance(longer, base) <= SAME
        why = "" if batch_source.pads else "padding would change gradients"
    if not why and together is not None:
        choice = _of_together(job, alone, together)
        if choice.mode == TOGETHER:
            return choice
        why = choice.why
    batch_source.pads = False
    doubled = found.get(ReplayTask(0, first, doubles=True))
    # What ranks exchange before backward goes into no gradient, as where losses are logged.
    is_unused = doubled is not None and state.distance(doubled, base) == 0
    call = None if is_unused else _before_backward(job)
    why = why or "the ranks' batches do not fit into one"
    if call is not None:
        return ReferenceChoice(
            failure=f"ranks exchange tensors before backward ({call.name} at {call.place}), which "
            f"cannot be had where they are replayed one by one, as they are since {why}"
        )
    return ReferenceChoice(BY_RANK, why, scales=_scales(job, alone))


def _of_together(
    job: JobRecording, alone: Sequence[state.Tensors | None], together: state.Tensors
) -> ReferenceChoice:
    """All samples in one batch, where the script's loss means the same by that."""
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
            return ReferenceChoice(
                BY_RANK, "the loss is divided by a number of samples that is written down"
            )
        return ReferenceChoice(TOGETHER, scales=tuple(scale / job.world for scale in scales))
    if any(one.drew for record in job.at(job.steps[0]) for one in record.passes):
        return ReferenceChoice(
            BY_RANK, "the script draws random numbers between a batch and its loss"
        )
    # Samples interact, or ranks have unlike numbers of them.
    return ReferenceChoice(TOGETHER, interacts=len(set(map(_shape, job.at(job.steps[0])))) == 1)


def _scales(job: JobRecording, copies: Sequence[state.Tensors | None]) -> tuple[float, ...]:
    """What the mean of the ranks' gradients may be multiplied by, where a loss is a sum: by nothing
    if it is divided by what one rank has, by the world if by what all have; else by either.
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
    # A multiple of what one of several passes has may be a number of something else.
    if count in {number * job.world for number in (sum(rows), sum(targets)) if number}:
        return (float(job.world),)
    # The script counts something that each rank has another number of, and weights say the rest.
    if len({float(one["count"]) for one in copies if one is not None}) > 1:
        return (1.0,)
    return (1.0, float(job.world))


def _before_backward(job: JobRecording) -> CollectiveCall | None:
    """The first collective of several numbers that a rank called before a backward pass."""
    calls = (call for step in job.steps for one in job.at(step) for call in one.calls)
    return next((call for call in calls if call.elements > 1 and not call.after_backward), None)


def weights(
    job: JobRecording, step: int, parts: Sequence[state.Tensors | None], asked: str
) -> tuple[list[float], str]:
    """What the gradient of each rank counts for, by what its copy's loss was divided by, or as the
    person says; or why that is not known.
    """
    equal = [1 / job.world] * job.world
    records = job.at(step)
    if asked and asked != "equal":
        numbers = [float(_number(record, asked)) for record in records]
    else:
        numbers = [0.0 if part is None else float(part["count"]) for part in parts]
    if asked == "equal" or (not all(numbers) and len(set(map(_shape, records))) == 1):
        return equal, ""
    if all(numbers):
        return [number / sum(numbers) for number in numbers], ""
    several = ", ".join(str(_number(record, "targets")) for record in records)
    return equal, (
        f"the ranks' losses go over unlike numbers of samples or targets ({several}), and what "
        "each is divided by cannot be read; say what a rank counts for: --weights samples, "
        "targets or equal"
    )


def _number(record: StepRecord, of: str) -> int:
    targets = sum(call.counted for one in record.trained for call in one.losses)
    return (
        sum(len(one.rows) for one in record.trained) if of == "samples" or not targets else targets
    )


def _shape(record: StepRecord) -> tuple[tuple[int, ...], ...]:
    """What a rank's loss goes over: samples and targets, by pass."""
    return tuple((len(p.rows), *(call.counted for call in p.losses)) for p in record.trained)
