"""A job that continues another one, judged against the recording of that one, which went on.

Where it resumed is looked up: the step of the earlier job that began with the parameters that this
one begins with. Then everything that a step begins with is compared, bit for bit, and both are
walked on side by side (`judge/parting/jobs.py`). Each thing that a checkpoint must bring back has
its own cause; what is computed from other things than before follows from them and is not judged.
"""

import dataclasses
from pathlib import Path

import msgspec

from distcheck.errors import UsageError
from distcheck.job.resumed import (
    CASTS,
    STATE,
    Continued,
    Digests,
    common_steps,
    compare_averages,
    compare_buffers,
    compare_optimizer,
    compare_random,
    compare_samples,
    compare_scaler,
    compare_settings,
    digests,
    is_rounded,
    name_samples,
    name_settings,
)
from distcheck.judge.checks.tally import Tally
from distcheck.judge.parting import yardstick
from distcheck.judge.parting.jobs import JobWalk, walk_jobs, why_not
from distcheck.judge.parting.yardstick import Yardstick, apart, norm_of
from distcheck.recordings.jobs.reading import JobRecording, read_kept
from distcheck.recordings.recording import Kind
from distcheck.records import CaseReport, CheckResult, Diagnosis, Difference, merge_verdicts
from distcheck.records.causes import name_cause
from distcheck.records.layers import NO_LAYER

TRAINING = "resumed training"


@dataclasses.dataclass(frozen=True)
class Earlier:
    """The recording that a job continues, and how far its moved runs were from it."""

    folder: Path
    job: JobRecording
    yard: Yardstick


def read(folder: Path) -> Earlier:
    """Raises UsageError for what is not the whole recording of a job."""
    return Earlier(folder, read_kept(folder), yardstick.read(folder))


def judged(case: CaseReport, earlier: Earlier, job: JobRecording) -> CaseReport:
    """The report on a job, with what it continues. Raises UsageError where the recording is another
    model's.
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
    """The checks, the causes behind those that failed, and a sentence on what was compared."""
    if not job.steps or job.divided_by:
        missing = Tally(STATE, NO_LAYER)
        missing.missing(job.divided_by and f"ranks hold parts of one model ({job.divided_by})")
        return [missing.result()], [], "nothing is compared with the job that it continues"
    _check_model(earlier, job)
    both = Continued(earlier.job, job, earlier.yard)
    if _find_step(both):
        compare_buffers(both)
        if compare_optimizer(both):  # whose settings are saved with it
            compare_settings(both)
        compare_scaler(both)
        compare_averages(both)
        compare_samples(both)
        compare_random(both)
        if not both.data.result().compared.elements:
            both.data.missing("no samples and no random numbers were seen")
    results = [both.state.result(), both.data.result()]
    note = f"it resumes before step {both.step} of the job in {earlier.folder}"
    if all(result.verdict == "pass" for result in results):
        results.append(_training(both))
        note += f", and is compared over {results[-1].compared.steps} steps"
    else:
        note += "; what it computes from there on follows from what differs, and is not compared"
    return results, both.found, note


def _check_model(earlier: Earlier, job: JobRecording) -> None:
    for kind in (Kind.PARAMETER, Kind.BUFFER):
        one, two = (set(side.names(kind)) for side in (earlier.job, job))
        if one != two:
            other = min(one ^ two)
            raise UsageError(
                f"{earlier.folder} is the recording of another model: only one of both has the "
                f"{kind.label} {other}"
            )


# -- where it resumed ----------------------------------------------------------------------------


def _find_step(both: Continued) -> bool:
    """Finds the step by its parameters; False where nothing else can be compared."""
    own = digests(both.now, both.first, "before/")
    places = range(len(both.then.steps))
    known = [digests(both.then, step, "before/") for step in both.then.steps]
    moving = [n for n in own if len({one.get(n) for one in known}) > 1] or [*own]
    counts = [sum(one.get(name) == own[name] for name in moving) for one in known]
    both.state.count(parameter="parameters", rank=0, step=both.first, elements=len(own))
    exact = [place for place in places if counts[place] == len(moving)]
    both.at = max(exact or places, key=lambda place: (counts[place], _others(both, place), -place))
    fixed = [name for name in own if name not in moving and own[name] != known[0].get(name)]
    if fixed:
        both.differs(
            both.state, "weights-not-restored",
            f"{len(fixed)} parameters that the earlier job never changed ({fixed[0]} first) are "
            "not what they were",
        )  # fmt: skip
    if exact and (both.at > 0 or both.then.steps[0] > 0):
        return True
    if exact:
        return _began_anew(both)
    last = both.then.steps[-1]
    after = digests(both.then, last, "after/")
    if all(own[name] == after.get(name, own[name]) for name in moving):
        both.state.missing(
            f"it resumes after step {last}, the last that the earlier job recorded: record more of "
            "that one with --steps"
        )
        return False
    cast = _cast(both, own)
    if cast is not None:
        both.at, dtype = cast
        name = next(name for name in moving if own[name] != known[both.at].get(name))
        both.differs(
            both.state, "state-rounded",
            f"the parameters are those before step {both.step}, rounded to {dtype} ({name} first)",
        )  # fmt: skip
        return True
    lost = [name for name in moving if own[name] != known[both.at].get(name)]
    far = "" if len(lost) < len(moving) else _nearest(both)
    both.differs(
        both.state, "weights-not-restored",
        f"{len(lost)} of {len(moving)} parameters ({lost[0]} first) are not those before step "
        f"{both.step}, nor all of any other step{far}",
    )  # fmt: skip
    return len(lost) < len(moving)


def _others(both: Continued, place: int) -> int:
    """How much else of a step this one begins with."""
    step, one = both.then.steps[place], both.now.records[0, both.first]
    other = both.then.records[0, step]
    state = [digests(job, at, "optim/") for job, at in ((both.then, step), (both.now, both.first))]
    return (state[0] == state[1]) + (one.counters == other.counters) + (one.groups == other.groups)


def _began_anew(both: Continued) -> bool:
    """It has the parameters of the very first step: did it resume at all?"""
    both.differs(
        both.state, "weights-not-restored",
        f"it begins with the parameters that the earlier job began with, before step {both.step}: "
        "no checkpoint was loaded into the model",
    )  # fmt: skip
    return False


def _cast(both: Continued, own: Digests) -> tuple[int, str] | None:
    """The place whose parameters these are but for their rounding, and the dtype of that."""
    for place in reversed(range(len(both.then.steps))):
        pairs = [
            (both.then.tensors(0, both.then.steps[place]).get(f"before/{name}"),
             both.now.tensors(0, both.first).get(f"before/{name}"))
            for name in own
        ]  # fmt: skip
        there = [(one, two) for one, two in pairs if one is not None and two is not None]
        for dtype in CASTS if len(there) == len(pairs) else ():
            if all(is_rounded(one, two, dtype) for one, two in there):
                return place, str(dtype).removeprefix("torch.")
    return None


def _nearest(both: Continued) -> str:
    """How far the nearest step is, where all parameters are other ones."""
    distances = {}
    own = both.now.tensors(0, both.first)
    for place, step in enumerate(both.then.steps):
        kept = both.then.tensors(0, step)
        names = [n for n in kept if n.startswith("before/") and n in own]
        size = sum(norm_of(kept[n]) ** 2 for n in names) ** 0.5
        if size:
            distances[place] = sum(apart(kept[n], own[n]) ** 2 for n in names) ** 0.5 / size
    if not distances:
        return ""
    both.at = min(distances, key=lambda place: distances[place])
    return f"; the nearest is step {both.step}, at {distances[both.at]:.2g} of their norm"


# -- what it computes ----------------------------------------------------------------------------


def _training(both: Continued) -> CheckResult:
    """Both side by side."""
    one, two = common_steps(both)
    tally = Tally(TRAINING, NO_LAYER)
    missing = why_not(one, two)
    if missing:
        tally.missing(f"what it computes is not compared: {missing}")
        return tally.result()
    walk = walk_jobs(one, two, [(both.yard, both.at)])
    _name_parted(both, walk, tally)
    found = walk.result()
    for moment in found.moments:
        tally.count(parameter=moment.kind, rank=0, step=both.first, elements=moment.tensors)
    for later in range(len(found.drift)):
        tally.count(parameter="", rank=0, step=both.now.steps[later], elements=0)
    if found.beyond is not None:
        _fail(both, tally, found.beyond, found.beyond_kind)
    elif found.first is not None and walk.parted is None:
        if walk.unmeasured:
            tally.missing(
                f"bits differ ({_place(both, found.first, found.kind)}), and how far two right "
                f"runs may part is not known: {walk.unmeasured}"
            )
        else:
            tally.remark(
                f"bits differ within their bounds, first at {_place(both, found.first, found.kind)}"
            )
    return tally.result()


def _name_parted(both: Continued, walk: JobWalk, tally: Tally) -> None:
    """A choice that was right at first, and is not later."""
    pair = walk.parted
    if pair is None:
        return
    before = len(both.found)
    if pair.what == "optimizer's settings":
        name_settings(both, pair.step)
    elif pair.what == "sample ids":
        name_samples(both, pair.step, pair.rank)
    else:
        step = both.then.steps[both.at + pair.step]
        both.differs(both.data, "random-state-lost",
                     f"step {step}: {pair.what} of rank {pair.rank} differ, and before they did "
                     "not")  # fmt: skip
    for one in both.found[before:]:
        tally.fail(one.evidence, parameter=pair.what, step=pair.step)


def _place(both: Continued, place: Difference, kind: str) -> str:
    return f"step {both.then.steps[both.at + place.step]}, {kind}, {place.parameter}"


def _fail(both: Continued, tally: Tally, beyond: Difference, kind: str) -> None:
    said = (
        f"{_place(both, beyond, kind)}: further from the earlier job's than rounding explains, "
        "though parameters, optimizer's state, samples and random numbers were the same"
    )
    tally.fail(said, parameter=beyond.parameter, step=beyond.step)
    both.found.append(name_cause("unexplained", said, "resumed"))
