"""What a job that continues another one begins with, next to what that one held at the step.

Each thing that a checkpoint must bring back is compared bit for bit, and has its own cause.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

import torch

from distcheck.job.accepting import is_rate
from distcheck.judge.checks.tally import Tally
from distcheck.judge.parting.jobs import sides
from distcheck.judge.parting.yardstick import Yardstick
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import digest
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.layers import NO_LAYER

STATE, DATA = "resumed state", "resumed data"
CASTS = (torch.float16, torch.bfloat16)
Digests = Mapping[str, str]


@dataclasses.dataclass
class Continued:
    """Both jobs, and what was found so far; `at` is the place among the earlier job's steps at
    which this one resumed.
    """

    then: JobRecording
    now: JobRecording
    yard: Yardstick
    at: int = 0
    found: list[Diagnosis] = dataclasses.field(default_factory=list)
    state: Tally = dataclasses.field(default_factory=lambda: Tally(STATE, NO_LAYER))
    data: Tally = dataclasses.field(default_factory=lambda: Tally(DATA, NO_LAYER))

    @property
    def step(self) -> int:
        """The step of the earlier job that the first one here should be."""
        return self.then.steps[self.at]

    @property
    def first(self) -> int:
        """This job's first step."""
        return self.now.steps[0]

    def differs(self, tally: Tally, cause: str, evidence: str, *variants: str) -> None:
        """Something is not what it was. A cause is named once."""
        tally.fail(evidence, parameter=cause, step=self.first)
        if all(one.cause != cause for one in self.found):
            self.found.append(name_cause(cause, evidence, *variants))


def digests(job: JobRecording, step: int, stem: str) -> Digests:
    """What all ranks hold at a step, of which each may have a part."""
    return {
        name.removeprefix(stem): one
        for rank in reversed(range(job.world))
        for name, one in job.records[rank, step].digests.items()
        if name.startswith(stem)
    }


def is_rounded(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether one tensor is the other, rounded to a dtype or kept in a shorter one."""
    if one.shape != two.shape or not one.is_floating_point():
        return one.shape == two.shape and torch.equal(one, two)
    return torch.equal(one.to(dtype).to(two.dtype), two) or torch.equal(one, two.to(one.dtype))


def compare_buffers(both: Continued) -> None:
    """Rank 0's."""
    own, then = (
        both.now.records[0, both.first].digests, both.then.records[0, both.step].digests
    )  # fmt: skip
    names = [name for name in then if name.startswith("buffer/") and name in own]
    both.state.count(parameter="buffers", rank=0, step=both.first, elements=len(names))
    lost = [name.removeprefix("buffer/") for name in names if own[name] != then[name]]
    pairs = [(both.then.tensors(0, both.step).get(f"buffer/{n}"),
              both.now.tensors(0, both.first).get(f"buffer/{n}")) for n in lost]  # fmt: skip
    there = [(one, two) for one, two in pairs if one is not None and two is not None]
    short = next((d for d in CASTS if all(is_rounded(a, b, d) for a, b in there)), None)
    if there and short is not None:
        both.differs(
            both.state, "state-rounded",
            f"buffers are those before step {both.step}, rounded to "
            f"{str(short).removeprefix('torch.')} ({lost[0]} first)",
        )  # fmt: skip
    elif lost:
        both.differs(
            both.state, "buffers-lost",
            f"{len(lost)} of {len(names)} buffers ({lost[0]} first) are not those before step "
            f"{both.step}",
        )  # fmt: skip


def compare_optimizer(both: Continued) -> bool:
    """Compares the optimizer's state; whether it may be that of this step."""
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
            f"the optimizer begins without {', '.join(keys)}, which the earlier job's had of "
            f"{len({n.rpartition('/')[0] for n in then})} parameters before step {both.step}",
        )  # fmt: skip
    elif elsewhere:
        both.differs(
            both.state, "weights-of-another-step",
            f"the parameters are those before step {both.step}, and the optimizer's state is that "
            f"before step {elsewhere[0]}",
        )  # fmt: skip
    elif set(keys) <= set(both.then.records[0, both.step].counters):
        counted = both.now.records[0, both.first].counters
        was = both.then.records[0, both.step].counters
        said = ", ".join(f"{k} is {counted.get(k, 0):g} and was {was[k]:g}" for k in keys)
        both.differs(
            both.state,
            "step-counter-lost",
            f"of the optimizer's state, {said} before step {both.step}",
        )
    elif dtype := _cast_of_state(both, lost):
        both.differs(
            both.state, "state-rounded",
            f"the optimizer's state is that before step {both.step}, rounded to {dtype} "
            f"({lost[0]} first)",
        )  # fmt: skip
    else:
        both.differs(
            both.state, "optimizer-state-lost",
            f"the optimizer's state ({lost[0]} first, {len(lost)} of {len(then)}) is not that "
            f"before step {both.step}",
        )  # fmt: skip
    return bool(own) and not elsewhere


def _cast_of_state(both: Continued, lost: list[str]) -> str:
    """The dtype that what is kept of the optimizer's state was rounded to, if it was."""
    own, then = both.now.tensors(0, both.first), both.then.tensors(0, both.step)
    pairs = [(then[f"optim/{n}"], own[f"optim/{n}"]) for n in lost
             if f"optim/{n}" in then and f"optim/{n}" in own]  # fmt: skip
    for dtype in CASTS if pairs else ():
        if all(is_rounded(one, two, dtype) for one, two in pairs):
            return str(dtype).removeprefix("torch.")
    return ""


def compare_settings(both: Continued) -> None:
    """The optimizer's settings at the first step."""
    one, two = sides(*common_steps(both))
    now, then = two.header(0, 0).optimizer, one.header(0, 0).optimizer
    both.state.count(parameter="settings", rank=0, step=both.first, elements=then.count(" "))
    if now != then:
        name_settings(both, 0)


def name_settings(both: Continued, later: int) -> None:
    """Names the cause of other settings, so many steps after the first."""
    step = both.then.steps[both.at + later]
    own, was = both.now.records[0, both.now.steps[later]].groups, both.then.records[0, step].groups
    found = [
        (key, mine[key], other[key])
        for mine, other in zip(own, was, strict=False)
        for key in mine
        if key in other and mine[key] != other[key]
    ]
    if not found:
        said = f"step {step}: the optimizer has another number of groups"
        both.differs(both.state, "settings-differ", said, "resumed")
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
    said = f"step {step}: {key} is {mine:.9g}, and was {other:.9g}"
    if not any(is_rate(name) for name, _, _ in found):
        both.differs(both.state, "settings-differ", said, "resumed")
    elif later:
        both.differs(
            both.state, "schedule-restarts",
            f"{said}; it is right in steps before that, as the optimizer has it",
        )  # fmt: skip
    elif elsewhere:
        both.differs(both.state, "schedule-restarts", f"{said}: that of step {elsewhere[0]}")
    else:
        both.differs(both.state, "learning-rate-differs", said, "resumed")


def compare_scaler(both: Continued) -> None:
    """The scale of the loss."""
    now, then = both.now.records[0, both.first].scale, both.then.records[0, both.step].scale
    both.state.count(parameter="scale", rank=0, step=both.first, elements=then is not None)
    if now != then:
        both.differs(both.state, "scaler-lost",
                     f"the loss is scaled by {now or 1:g}, and was by {then or 1:g} at step "
                     f"{both.step}")  # fmt: skip


def compare_averages(both: Continued) -> None:
    """Averages of the model: what the earlier job held that moved with every step, and was at none
    what the model was (a copy of the best model so far moves as well).
    """
    held = [set(both.then.records[0, step].held) for step in both.then.steps]
    beside = [held[at] for at in (both.at - 1, both.at + 1) if 0 <= at < len(held)]
    moving = held[both.at].difference(*beside, _copies(both.then)) if beside else set()
    both.state.count(parameter="averages", rank=0, step=both.first, elements=len(moving))
    # What is loaded from a checkpoint is still there, perhaps, and does not move.
    own = Counter(both.now.records[0, both.first].held)
    if len(both.now.steps) > 1:
        own -= Counter(both.now.records[0, both.now.steps[-1]].held)
    if moving - set(own):
        both.differs(
            both.state, "ema-lost",
            f"the average of the model that the earlier job held before step {both.step} is not "
            "there, or is not moved any more",
        )  # fmt: skip


def _copies(job: JobRecording) -> set[str]:
    """The digests that copies of the model at any step have."""
    found = set()
    for step in job.steps:
        own = digests(job, step, "before/")
        found |= {digest("".join(own[n] for n in names).encode()) for names in (own, sorted(own))}
    return found


def common_steps(both: Continued) -> tuple[JobRecording, JobRecording]:
    """Both, from the step on at which this one resumed, as far as both go."""
    steps = both.then.steps[both.at :]
    most = min(len(steps), len(both.now.steps))
    return (
        dataclasses.replace(both.then, steps=steps[:most]),
        dataclasses.replace(both.now, steps=both.now.steps[:most]),
    )


def compare_samples(both: Continued) -> None:
    """Those of the first step."""
    one, two = sides(*common_steps(both))
    for rank in range(one.world):
        own = two.header(rank, 0).ids
        both.data.count(parameter="samples", rank=rank, step=both.first, elements=len(own))
        if own != one.header(rank, 0).ids:
            name_samples(both, 0, rank)
            return


def name_samples(both: Continued, later: int, rank: int) -> None:
    """Names what became of the order of samples, so many steps after the first."""
    whole, here = sides(both.then, both.now)
    place = both.at + later
    rows = here.header(rank, later).ids
    step = both.then.steps[place]
    others = {p: whole.header(rank, p).ids for p in range(len(both.then.steps))}
    same = [p for p, ids in others.items() if rows and ids == rows]
    who = "" if whole.as_one else f" of rank {rank}"
    if same:
        at = both.then.steps[same[0]]
        said = f"step {step}: the samples{who} are those that step {at} had"
        if same[0] > place:
            both.differs(both.data, "samples-skipped", said)
        elif _begins_epoch(both.then, rank, at):
            both.differs(both.data, "data-order-restarts", f"{said}, the first of an epoch")
        else:
            both.differs(both.data, "samples-repeated", said)
        return
    before = {row for p in range(place) for row in others[p]}
    after = {row for p in range(place + 1, len(others)) for row in others[p]}
    seen = sum(row in before for row in rows)
    if rows and seen == len(rows) and not set(rows) & set(others[place]):
        both.differs(both.data, "samples-repeated",
                     f"step {step}: the samples{who} are from steps before it")  # fmt: skip
    elif rows and all(row in after for row in rows) and not set(rows) & before:
        both.differs(both.data, "samples-skipped",
                     f"step {step}: the samples{who} are from steps after it")  # fmt: skip
    else:
        both.differs(
            both.data, "data-order-differs",
            f"step {step}: {len(set(rows) & set(others[place]))} of {len(rows)} samples{who} are "
            "those that the earlier job had, and the others come in an order that it never had",
        )  # fmt: skip


def _begins_epoch(job: JobRecording, rank: int, step: int) -> bool:
    """Whether a step has the first batch of a pass over a loader."""
    record = job.records[rank, step]
    return any(number == 0 for one in record.passes if one.live for _, _, number in one.batches)


def compare_random(both: Continued) -> None:
    """The streams that forward passes of the first step draw from, in one world."""
    one, two = sides(*common_steps(both))
    if one.as_one:
        return
    for rank in range(one.world):
        own, then = two.header(rank, 0).rng_digest, one.header(rank, 0).rng_digest
        both.data.count(parameter="random numbers", rank=rank, step=both.first, elements=1)
        if own != then:
            both.differs(
                both.data, "random-state-lost",
                f"rank {rank} draws other random numbers in the forward pass than at step "
                f"{both.step}",
            )  # fmt: skip
            return
