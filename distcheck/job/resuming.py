"""Judges a resumed job by the recording of the uninterrupted job.

The step at which the job resumed is the step of the earlier job that starts with the same
parameters. All state at that step is compared bitwise. Then both jobs are compared in execution
order (`judge/divergence/job_recordings.py`). Each item that a checkpoint must restore has its own
cause. Results that were computed from different state are consequences and are not judged.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from distcheck.errors import UsageError
from distcheck.job.accepting import is_rate
from distcheck.judge.checks.tally import Tally
from distcheck.judge.divergence import noise_floor
from distcheck.judge.divergence.job_recordings import (
    JobComparison,
    comparable_recordings,
    compare_recordings,
    name_in_only_one,
    why_not_comparable,
)
from distcheck.judge.divergence.noise_floor import NoiseFloor, distance_between, norm_of
from distcheck.recordings.jobs.reading import JobRecording, read_saved_recording
from distcheck.recordings.jobs.records import digest
from distcheck.records import CaseReport, CheckResult, Diagnosis, Difference, merge_verdicts
from distcheck.records.causes import name_cause
from distcheck.records.layers import NO_LAYER

STATE, DATA, TRAINING = "resumed state", "resumed data", "resumed training"
_CASTS = (torch.float16, torch.bfloat16)
Digests = Mapping[str, str]


@dataclasses.dataclass
class ResumedJob:
    """Both jobs, and the findings. `at` is the index of the earlier job's step at which this job
    resumed.
    """

    then: JobRecording
    now: JobRecording
    floor: NoiseFloor
    at: int = 0
    found: list[Diagnosis] = dataclasses.field(default_factory=list)
    state: Tally = dataclasses.field(default_factory=lambda: Tally(STATE, NO_LAYER))
    data: Tally = dataclasses.field(default_factory=lambda: Tally(DATA, NO_LAYER))

    @property
    def step(self) -> int:
        """The step of the earlier job at which this job resumed."""
        return self.then.steps[self.at]

    @property
    def first(self) -> int:
        return self.now.steps[0]

    def rounded_to(self, step: int, names: Sequence[str]) -> str:
        """Return the dtype to which all recorded values since a step were rounded, or ""."""
        then, now = self.then.tensors(0, step), self.now.tensors(0, self.first)
        pairs = [(then[name], now[name]) for name in names if name in then and name in now]
        for dtype in _CASTS if pairs else ():
            if all(_is_rounded(one, two, dtype) for one, two in pairs):
                return str(dtype).removeprefix("torch.")
        return ""

    def differs(self, tally: Tally, cause: str, evidence: str, *variants: str) -> None:
        """Report a difference; each cause is named once."""
        tally.fail(evidence, parameter=cause, step=self.first)
        if all(one.cause != cause for one in self.found):
            self.found.append(name_cause(cause, evidence, *variants))


def digests(job: JobRecording, step: int, stem: str) -> Digests:
    """Return the digests of all ranks at a step, by name. Different ranks may hold different
    shards.
    """
    return {
        name.removeprefix(stem): one
        for rank in reversed(range(job.world))
        for name, one in job.records[rank, step].digests.items()
        if name.startswith(stem)
    }


def _is_rounded(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if two tensors are equal after rounding to a dtype, or after conversion to the
    other's lower-precision dtype.
    """
    if one.shape != two.shape or not one.is_floating_point():
        return one.shape == two.shape and torch.equal(one, two)
    return torch.equal(one.to(dtype).to(two.dtype), two) or torch.equal(one, two.to(one.dtype))


@dataclasses.dataclass(frozen=True)
class Earlier:
    """Recording of the uninterrupted job, and the noise floor of that job."""

    folder: Path
    job: JobRecording
    floor: NoiseFloor


def read(folder: Path) -> Earlier:
    """Read a saved recording. Raises UsageError if it is not the complete recording of a job."""
    return Earlier(folder, read_saved_recording(folder), noise_floor.read_noise_floor(folder))


def judged(case: CaseReport, earlier: Earlier, job: JobRecording) -> CaseReport:
    """Add the comparison with the earlier job to a report. Raises UsageError if the jobs train
    different models.
    """
    results, causes, note = judge(earlier, job)
    return msgspec.structs.replace(
        case,
        verdict=merge_verdicts([case.verdict, *(result.verdict for result in results)]),
        checks=(*case.checks, *results),
        diagnosis=(*case.diagnosis, *causes),
        notes=(note, *case.notes),
    )


Judged = tuple[list[CheckResult], list[Diagnosis], str]


def judge(earlier: Earlier, job: JobRecording) -> Judged:
    """Return the checks, the causes of failed checks, and a sentence about the comparison."""
    if not job.steps or job.divided_by:
        missing = Tally(STATE, NO_LAYER)
        missing.missing(job.divided_by and f"ranks hold shards of one model ({job.divided_by})")
        return [missing.result()], [], "nothing is compared with the job that it resumes"
    _check_model(earlier, job)
    both = ResumedJob(earlier.job, job, earlier.floor)
    if _find_step(both):
        _compare_buffers(both)
        if _compare_optimizer(both):  # settings are saved with the optimizer state
            _compare_settings(both)
        _compare_scaler(both)
        _compare_averages(both)
        _compare_samples(both)
        _compare_random(both)
        if not both.data.result().compared.elements:
            both.data.missing("no samples and no random numbers were recorded")
    results = [both.state.result(), both.data.result()]
    note = f"the job resumes before step {both.step} of the job in {earlier.folder}"
    if all(result.verdict == "pass" for result in results):
        results.append(_training(both))
        note += f", and is compared over {results[-1].compared.steps} steps"
    else:
        note += "; later results follow from these differences and are not compared"
    return results, both.found, note


def _check_model(earlier: Earlier, job: JobRecording) -> None:
    if other := name_in_only_one(earlier.job, job):
        raise UsageError(
            f"{earlier.folder} is a recording of a different model: only one of the two has the "
            f"{other}"
        )


# -- the resume step -----------------------------------------------------------------------------


def _find_step(both: ResumedJob) -> bool:
    """Find the step at which the job resumed, by its parameters. Return False if nothing else can
    be compared.
    """
    own = digests(both.now, both.first, "before/")
    places = range(len(both.then.steps))
    known = [digests(both.then, step, "before/") for step in both.then.steps]
    moving = [n for n in own if len({one.get(n) for one in known}) > 1] or [*own]
    counts = [sum(one.get(name) == own[name] for name in moving) for one in known]
    both.state.count(parameter="parameters", rank=0, step=both.first, elements=len(own))
    exact = [place for place in places if counts[place] == len(moving)]
    both.at = max(
        exact or places, key=lambda place: (counts[place], _count_matches(both, place), -place)
    )
    fixed = [name for name in own if name not in moving and own[name] != known[0].get(name)]
    if fixed:
        both.differs(
            both.state, "weights-not-restored",
            f"{len(fixed)} parameters that the earlier job never updated ({fixed[0]} first) have "
            "different values",
        )  # fmt: skip
    if exact and (both.at > 0 or both.then.steps[0] > 0):
        return True
    if exact:
        return _began_anew(both)
    last = both.then.steps[-1]
    after = digests(both.then, last, "after/")
    if all(own[name] == after.get(name, own[name]) for name in moving):
        both.state.missing(
            f"the job resumes after step {last}, the last that the earlier job recorded; record "
            "more of the earlier job with --steps"
        )
        return False
    cast = _cast(both, own)
    if cast is not None:
        both.at, dtype = cast
        name = next(name for name in moving if own[name] != known[both.at].get(name))
        both.differs(
            both.state, "checkpoint-low-precision",
            f"the parameters are those before step {both.step}, rounded to {dtype} ({name} first)",
        )  # fmt: skip
        return True
    lost = [name for name in moving if own[name] != known[both.at].get(name)]
    far = "" if len(lost) < len(moving) else _nearest(both)
    both.differs(
        both.state, "weights-not-restored",
        f"{len(lost)} of {len(moving)} parameters ({lost[0]} first) differ from those before step "
        f"{both.step}, and no other step matches all of them{far}",
    )  # fmt: skip
    return len(lost) < len(moving)


def _count_matches(both: ResumedJob, place: int) -> int:
    """Return how much further state matches at a step: optimizer state, counters, settings."""
    step, one = both.then.steps[place], both.now.records[0, both.first]
    other = both.then.records[0, step]
    state = [digests(job, at, "optim/") for job, at in ((both.then, step), (both.now, both.first))]
    return (state[0] == state[1]) + (one.counters == other.counters) + (one.groups == other.groups)


def _began_anew(both: ResumedJob) -> bool:
    """Report a job that starts with the initial parameters: it loaded no checkpoint."""
    both.differs(
        both.state, "weights-not-restored",
        f"the job starts with the initial parameters of the earlier job, before step {both.step}: "
        "no checkpoint was loaded into the model",
    )  # fmt: skip
    return False


def _cast(both: ResumedJob, own: Digests) -> tuple[int, str] | None:
    """Find the step whose parameters match after rounding. Return its index and the dtype."""
    names = [f"before/{name}" for name in own]
    for place in reversed(range(len(both.then.steps))):
        kept = both.then.tensors(0, both.then.steps[place]), both.now.tensors(0, both.first)
        is_kept = all(name in held for held in kept for name in names)
        if is_kept and (dtype := both.rounded_to(both.then.steps[place], names)):
            return place, dtype
    return None


def _nearest(both: ResumedJob) -> str:
    """Describe the nearest step, if no parameters match."""
    distances = {}
    own = both.now.tensors(0, both.first)
    for place, step in enumerate(both.then.steps):
        kept = both.then.tensors(0, step)
        names = [n for n in kept if n.startswith("before/") and n in own]
        size = sum(norm_of(kept[n]) ** 2 for n in names) ** 0.5
        if size:
            distances[place] = (
                sum(distance_between(kept[n], own[n]) ** 2 for n in names) ** 0.5 / size
            )
    if not distances:
        return ""
    both.at = min(distances, key=lambda place: distances[place])
    return f"; step {both.step} is nearest, at {distances[both.at]:.2g} of their norm"


# -- state at the resume step --------------------------------------------------------------------


def _compare_buffers(both: ResumedJob) -> None:
    own, then = (
        both.now.records[0, both.first].digests, both.then.records[0, both.step].digests
    )  # fmt: skip
    names = [name for name in then if name.startswith("buffer/") and name in own]
    both.state.count(parameter="buffers", rank=0, step=both.first, elements=len(names))
    lost = [name.removeprefix("buffer/") for name in names if own[name] != then[name]]
    if dtype := both.rounded_to(both.step, [f"buffer/{name}" for name in lost]):
        both.differs(
            both.state, "checkpoint-low-precision",
            f"buffers are those before step {both.step}, rounded to {dtype} ({lost[0]} first)",
        )  # fmt: skip
    elif lost:
        both.differs(
            both.state, "buffers-lost",
            f"{len(lost)} of {len(names)} buffers ({lost[0]} first) differ from those before step "
            f"{both.step}",
        )  # fmt: skip


def _compare_optimizer(both: ResumedJob) -> bool:
    own = digests(both.now, both.first, "optim/")
    then = digests(both.then, both.step, "optim/")
    both.state.count(parameter="optimizer", rank=0, step=both.first, elements=len(then))
    lost = [name for name in then if own.get(name) != then[name]]
    if not lost:
        return True
    keys = sorted({name.rpartition("/")[2] for name in lost})
    elsewhere = [
        step for step in both.then.steps if own and digests(both.then, step, "optim/") == own
    ]
    if not own:
        both.differs(
            both.state, "optimizer-state-lost",
            f"the optimizer starts without {', '.join(keys)}, which the earlier job had for "
            f"{len({n.rpartition('/')[0] for n in then})} parameters before step {both.step}",
        )  # fmt: skip
    elif elsewhere:
        both.differs(
            both.state, "checkpoint-mixes-steps",
            f"the parameters are those before step {both.step}, and the optimizer's state is that "
            f"before step {elsewhere[0]}",
        )  # fmt: skip
    elif set(keys) <= set(both.then.records[0, both.step].counters):
        counted = both.now.records[0, both.first].counters
        was = both.then.records[0, both.step].counters
        said = ", ".join(f"{k} is {counted.get(k, 0):g}, but was {was[k]:g}" for k in keys)
        both.differs(
            both.state,
            "step-counter-lost",
            f"optimizer state: {said} before step {both.step}",
        )
    elif dtype := both.rounded_to(both.step, [f"optim/{name}" for name in lost]):
        both.differs(
            both.state, "checkpoint-low-precision",
            f"the optimizer's state is that before step {both.step}, rounded to {dtype} "
            f"({lost[0]} first)",
        )  # fmt: skip
    else:
        both.differs(
            both.state, "optimizer-state-lost",
            f"the optimizer's state ({lost[0]} first, {len(lost)} of {len(then)}) differs from "
            f"that before step {both.step}",
        )  # fmt: skip
    return bool(own) and not elsewhere


def _compare_settings(both: ResumedJob) -> None:
    one, two = comparable_recordings(*_common_steps(both))
    now, then = two.header(0, 0).optimizer, one.header(0, 0).optimizer
    both.state.count(parameter="settings", rank=0, step=both.first, elements=then.count(" "))
    if now != then:
        _name_settings(both, 0)


def _name_settings(both: ResumedJob, later: int) -> None:
    """Name the cause of optimizer settings that differ `later` steps after the job resumed."""
    step = both.then.steps[both.at + later]
    own, was = both.now.records[0, both.now.steps[later]].groups, both.then.records[0, step].groups
    found = [
        (key, mine[key], other[key])
        for mine, other in zip(own, was, strict=False)
        for key in mine
        if key in other and mine[key] != other[key]
    ]
    if not found:
        said = f"step {step}: the number of param_groups differs"
        both.differs(both.state, "optimizer-settings-differ", said, "resumed")
        return
    elsewhere = [
        at
        for at in both.then.steps
        if all(
            group.get(key) == mine[key]
            for mine, group in zip(own, both.then.records[0, at].groups, strict=False)
            for key, _, _ in found
            if key in mine
        )
    ]
    key, mine, other = found[0]
    said = f"step {step}: {key} is {mine:.9g}, but was {other:.9g}"
    if not any(is_rate(name) for name, _, _ in found):
        both.differs(both.state, "optimizer-settings-differ", said, "resumed")
    elif later:
        both.differs(
            both.state, "scheduler-state-lost",
            f"{said}; it is right at earlier steps, where it is restored with the optimizer",
        )  # fmt: skip
    elif elsewhere:
        both.differs(
            both.state, "scheduler-state-lost", f"{said}; it is the value of step {elsewhere[0]}"
        )
    else:
        both.differs(both.state, "learning-rate-differs", said, "resumed")


def _compare_scaler(both: ResumedJob) -> None:
    now, then = both.now.records[0, both.first].scale, both.then.records[0, both.step].scale
    both.state.count(parameter="scale", rank=0, step=both.first, elements=then is not None)
    if now != then:
        both.differs(both.state, "scaler-state-lost",
                     f"the loss scale is {now or 1:g}, but was {then or 1:g} at step "
                     f"{both.step}")  # fmt: skip


def _compare_averages(both: ResumedJob) -> None:
    """Compare averages of the model (EMA): tensors of the earlier job that change at every step and
    never equal the model. A copy of the best model so far changes as well; it is excluded.
    """
    held = [set(both.then.records[0, step].held) for step in both.then.steps]
    beside = [held[at] for at in (both.at - 1, both.at + 1) if 0 <= at < len(held)]
    moving = held[both.at].difference(*beside, _copies(both.then)) if beside else set()
    both.state.count(parameter="averages", rank=0, step=both.first, elements=len(moving))
    # A tensor loaded from the checkpoint may remain in memory without being updated.
    own = Counter(both.now.records[0, both.first].held)
    if len(both.now.steps) > 1:
        own -= Counter(both.now.records[0, both.now.steps[-1]].held)
    if moving - set(own):
        both.differs(
            both.state, "ema-lost",
            f"the average of the model that the earlier job held before step {both.step} is "
            "missing, or is no longer updated",
        )  # fmt: skip


def _copies(job: JobRecording) -> set[str]:
    found = set()
    for step in job.steps:
        own = digests(job, step, "before/")
        found |= {digest("".join(own[n] for n in names).encode()) for names in (own, sorted(own))}
    return found


def _common_steps(both: ResumedJob) -> tuple[JobRecording, JobRecording]:
    """Return both jobs, restricted to the steps that both have from the resumed step on."""
    steps = both.then.steps[both.at :]
    most = min(len(steps), len(both.now.steps))
    return (
        dataclasses.replace(both.then, steps=steps[:most]),
        dataclasses.replace(both.now, steps=both.now.steps[:most]),
    )


def _compare_samples(both: ResumedJob) -> None:
    one, two = comparable_recordings(*_common_steps(both))
    for rank in range(one.world):
        own = two.header(rank, 0).ids
        both.data.count(parameter="samples", rank=rank, step=both.first, elements=len(own))
        if own != one.header(rank, 0).ids:
            _name_samples(both, 0, rank)
            return


def _name_samples(both: ResumedJob, later: int, rank: int) -> None:
    """Name the cause of samples that differ `later` steps after the job resumed."""
    whole, here = comparable_recordings(both.then, both.now)
    place = both.at + later
    rows = here.header(rank, later).ids
    step = both.then.steps[place]
    others = {p: whole.header(rank, p).ids for p in range(len(both.then.steps))}
    same = [p for p, ids in others.items() if rows and ids == rows]
    who = "" if whole.as_one else f" of rank {rank}"
    if same:
        at = both.then.steps[same[0]]
        said = f"step {step}: the samples{who} are those of step {at}"
        if same[0] > place:
            both.differs(both.data, "resume-skips-samples", said)
        elif _begins_epoch(both.then, rank, at):
            both.differs(both.data, "resume-restarts-epoch", f"{said}, the first of an epoch")
        else:
            both.differs(both.data, "resume-repeats-samples", said)
        return
    before = {row for p in range(place) for row in others[p]}
    after = {row for p in range(place + 1, len(others)) for row in others[p]}
    seen = sum(row in before for row in rows)
    if rows and seen == len(rows) and not set(rows) & set(others[place]):
        both.differs(both.data, "resume-repeats-samples",
                     f"step {step}: the samples{who} are from steps before it")  # fmt: skip
    elif rows and all(row in after for row in rows) and not set(rows) & before:
        both.differs(both.data, "resume-skips-samples",
                     f"step {step}: the samples{who} are from steps after it")  # fmt: skip
    else:
        both.differs(
            both.data, "resume-changes-data-order",
            f"step {step}: {len(set(rows) & set(others[place]))} of {len(rows)} samples{who} are "
            "those of the earlier job, and the others are in an order that never occurred there",
        )  # fmt: skip


def _begins_epoch(job: JobRecording, rank: int, step: int) -> bool:
    """Return True if the step has the first batch of a loader's epoch."""
    record = job.records[rank, step]
    return any(number == 0 for one in record.passes if one.live for _, _, number in one.batches)


def _compare_random(both: ResumedJob) -> None:
    """Compare the RNG streams of the first step's forward passes, if both jobs have the same world
    size.
    """
    one, two = comparable_recordings(*_common_steps(both))
    if one.as_one:
        return
    for rank in range(one.world):
        own, then = two.header(rank, 0).rng_digest, one.header(rank, 0).rng_digest
        both.data.count(parameter="random numbers", rank=rank, step=both.first, elements=1)
        if own != then:
            both.differs(
                both.data, "rng-state-lost",
                f"rank {rank} draws different random numbers in the forward pass than at step "
                f"{both.step}",
            )  # fmt: skip
            return


# -- results -------------------------------------------------------------------------------------


def _training(both: ResumedJob) -> CheckResult:
    one, two = _common_steps(both)
    tally = Tally(TRAINING, NO_LAYER)
    missing = why_not_comparable(one, two)
    if missing:
        tally.missing(f"training is not compared: {missing}")
        return tally.result()
    comparison = compare_recordings(one, two, [(both.floor, both.at)])
    _name_parted(both, comparison, tally)
    found = comparison.result()
    for moment in found.moments:
        tally.count(parameter=moment.kind, rank=0, step=both.first, elements=moment.tensors)
    for later in range(len(found.drift)):
        tally.count(parameter="", rank=0, step=both.now.steps[later], elements=0)
    if found.beyond is not None:
        _fail(both, tally, found.beyond, found.beyond_kind)
    elif found.first is not None and comparison.diverged is None:
        if comparison.unmeasured:
            tally.missing(
                f"the jobs are not bit-identical ({_place(both, found.first, found.kind)}), and "
                f"the noise floor is not known: {comparison.unmeasured}"
            )
        else:
            tally.remark(
                "the jobs are not bit-identical, but within the bounds, first at "
                f"{_place(both, found.first, found.kind)}"
            )
    return tally.result()


def _name_parted(both: ResumedJob, comparison: JobComparison, tally: Tally) -> None:
    """Name the first input (settings, samples, RNG) that matched when the job resumed, but not
    later.
    """
    pair = comparison.diverged
    if pair is None:
        return
    before = len(both.found)
    if pair.what == "optimizer's settings":
        _name_settings(both, pair.step)
    elif pair.what == "sample ids":
        _name_samples(both, pair.step, pair.rank)
    else:
        step = both.then.steps[both.at + pair.step]
        both.differs(both.data, "rng-state-lost",
                     f"step {step}: {pair.what} of rank {pair.rank} differ, but not at earlier "
                     "steps")  # fmt: skip
    for one in both.found[before:]:
        tally.fail(one.evidence, parameter=pair.what, step=pair.step)


def _place(both: ResumedJob, place: Difference, kind: str) -> str:
    return f"step {both.then.steps[both.at + place.step]}, {kind}, {place.parameter}"


def _fail(both: ResumedJob, tally: Tally, beyond: Difference, kind: str) -> None:
    said = (
        f"{_place(both, beyond, kind)}: differs from the earlier job by more than rounding, "
        "although parameters, optimizer state, samples and random numbers were the same"
    )
    tally.fail(said, parameter=beyond.parameter, step=beyond.step)
    both.found.append(name_cause("unexplained", said, "resumed"))
