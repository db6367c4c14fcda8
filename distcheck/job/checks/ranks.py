"""Checks state that must be the same on all ranks (parameters, settings, loss scales), and RNG
streams, which must differ.
"""

from collections.abc import Iterator

import torch

from distcheck.judge.checks.comparison import Comparison, tensor_difference
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.records import CheckResult, Difference, FindingKind
from distcheck.records.layers import NO_LAYER


def _same_digests(job: JobRecording, tally: Tally, step: int, prefixes: tuple[str, ...]) -> None:
    first = job.records[0, step].digests
    kept = averaged_parameters(job)
    names = [n for n in first if n.startswith(prefixes) and _bare(n) not in kept]
    for name in names if job.world > 1 else ():
        plain = name.partition("/")[2]
        tally.count(parameter=plain, rank=0, step=step, elements=0)  # other ranks' counterpart
    for rank in range(1, job.world):
        own = job.records[rank, step].digests
        for name in names:
            plain = name.partition("/")[2]
            if name.startswith("after/") and not job.holds(rank, step, plain):
                continue  # its value before the next step is compared
            apart = None if own.get(name) == first[name] else _distance(job, rank, step, name)
            tally.add(Comparison(1, apart, apart), parameter=plain, rank=rank, step=step)


def _same_in_units(job: JobRecording, tally: Tally, step: int, kind: str) -> None:
    """Compare ranks within model-parallel units: ranks that hold the same shard, and tensors that
    two pipeline stages share from the start (tied weights).
    """
    if job.apart is None:
        return
    apart, first = job.apart, job.steps[0]
    is_staged = any(axis.kind == "pipeline" for axis in job.ranks[0].axes)
    for replica in job.replicas:
        seen: dict[object, int] = {}
        for rank in replica:
            record = apart.records[rank, step]
            for name in (n for n in record.digests if n.startswith(kind)):
                plain, part = _bare(name), record.parts.get(name)
                began = apart.records[rank, first].digests.get(f"before/{plain}", "")
                place = (name, None if part is None else part.at, began if is_staged else "")
                other = seen.setdefault(place, rank)
                if other == rank:
                    continue
                same = record.digests[name] == apart.records[other, step].digests[name]
                by = None if same else _distance(apart, rank, step, name, other)
                tally.add(Comparison(1, by, by), parameter=plain, rank=rank, step=step)


def differs_in_units(job: JobRecording) -> str:
    """Return the first parameter whose initial values differ within a model-parallel
    unit, or "".
    """
    tally = Tally("initial state", NO_LAYER)
    for step in job.steps[:1]:
        _same_in_units(job, tally, step, "before/")
    first = tally.result().first
    return "" if first is None else first.parameter


def _distance(job: JobRecording, rank: int, step: int, name: str, beside: int = 0) -> Difference:
    """Return the difference of two ranks, as the L2 norm estimated from their 64 projections."""
    own, other = job.sums(rank, step, name), job.sums(beside, step, name)
    if own is None or other is None or own.shape != other.shape:
        zero = torch.zeros(1)
        own, other = zero + float("inf"), zero
    return tensor_difference(
        float(own.norm()), float(other.norm()), float((own - other).norm()), 0.0
    )


def averaged_parameters(job: JobRecording) -> list[str]:
    """Return the parameters of modules that have neither gradients nor an optimizer, if some of
    these parameters change: averages of other parameters, such as an EMA inside the model. A change
    on any rank counts, because on a rank where an average starts, its updates may be below
    rounding.
    """
    if len(job.steps) < 2:
        return []
    digests = {name for one in job.records.values() for name in one.digests}
    trained = {name for name in digests if name.startswith(("after/", "local/"))}
    begin, end = (job.at(step) for step in (job.steps[0], job.steps[-1]))
    names = [n for n in begin[0].digests if n.startswith("before/")]
    moved = {
        _module(name)
        for name in names
        if any(e.digests.get(name, b.digests[name]) != b.digests[name]
               for b, e in zip(begin, end, strict=True) if name in b.digests)
    }  # fmt: skip
    moved -= {_module(name) for name in trained}
    return [_bare(name) for name in names if _module(name) in moved]


def _module(name: str) -> str:
    return _bare(name).partition(".")[0]


def finite(job: JobRecording) -> Iterator[CheckResult]:
    """Yield a failure if inputs, losses or gradients are not finite."""
    for step in job.steps:
        for rank, record in enumerate(job.at(step)):
            if record.not_finite:
                tally = Tally("finite", NO_LAYER)
                several = ", ".join(record.not_finite[:4])
                tally.fail(
                    f"step {step}: rank {rank} has inf or NaN in {several}",
                    parameter=record.not_finite[0], rank=rank, step=step,
                )  # fmt: skip
                yield tally.result()
                return


def initial_state(job: JobRecording) -> CheckResult:
    """Check that all ranks have the same parameters and buffers before the first recorded step."""
    tally = Tally("initial state", NO_LAYER)
    _same_digests(job, tally, job.steps[0], ("before/", "buffer/"))
    _same_in_units(job, tally, job.steps[0], "before/")
    if job.processes == 1:
        tally.remark("a single rank has no other rank to compare with")
    return tally.result()


def agreement(job: JobRecording) -> CheckResult:
    """Check that all ranks have the same parameters after every step and before the next."""
    tally = Tally("agreement", NO_LAYER)
    for step in job.steps:
        if step != job.steps[0]:
            _same_digests(job, tally, step, ("before/",))
        _same_digests(job, tally, step, ("after/",))
        _same_in_units(job, tally, step, "after/")
    return tally.result()


def first_different_start(job: JobRecording, step: int) -> str:
    """Return the first parameter that differs across ranks at the start of a step, or ""."""
    for name in (n for n in job.records[0, step].digests if n.startswith("before/")):
        if len({record.digests.get(name) for record in job.at(step)}) > 1:
            return _bare(name)
    return ""


def first_divergence_before(job: JobRecording, step: int) -> str:
    """Return the first parameter that diverges across ranks between two steps, or ""."""
    before = {n: d for n, d in job.records[0, step].digests.items() if n.startswith("before/")}
    for name in before:
        alike = {job.records[rank, step].digests.get(name) for rank in range(job.world)}
        then = [one for one in job.steps if one < step and _bare(name) in job.parameters(one)]
        last = {r.digests.get(f"after/{_bare(name)}") for r in job.at(then[-1])} if then else set()
        if len(alike) > 1 and len(last) == 1:
            return _bare(name)
    return ""


def first_rank_local_write(job: JobRecording, step: int) -> str:
    """Return the first parameter modified between forward and step on some ranks only, or ""."""
    for name in job.parameters(step):
        if len({record.digests.get(f"written/{name}") for record in job.at(step)}) > 1:
            return name
    return ""


def _bare(name: str) -> str:
    return name.partition("/")[2]


def random_streams(job: JobRecording) -> Iterator[CheckResult]:
    """Check that ranks draw different random numbers, in forward or between loading the batch and
    the loss.
    """
    tally = Tally("random streams", NO_LAYER)
    for step, rank, reason in _identical_noise(
        job
    ):  # reported first: other findings are only warnings
        reason = f"step {step}: {reason}"
        tally.fail(reason, kind=FindingKind.SAME_NOISE, parameter="torch", rank=rank, step=step)
    compared = _compare_streams_of_shared_samples(job, tally)
    for step in job.steps:
        seen: dict[str, int] = {}
        for rank in range(job.world):
            for one in job.records[rank, step].passes:
                # Without a batch, ranks may draw the same samples and each use its shard of them.
                draws = one.draws or (one.drew and one.batches)
                if not draws or not one.live or job.world == 1:
                    continue
                compared = True
                tally.count(parameter="torch", rank=rank, step=step, elements=1)
                other = seen.setdefault(one.random["torch"], rank)
                if other != rank:
                    where = "in the forward pass" if one.draws else "between a batch and its loss"
                    tally.fail(
                        f"step {step}: ranks {other} and {rank} draw the same random numbers "
                        f"{where}",
                        parameter="torch", rank=rank, step=step,
                    )  # fmt: skip
    if compared:
        yield tally.result()


def _identical_noise(job: JobRecording) -> Iterator[tuple[int, int, str]]:
    """Yield the ranks whose samples differ, but have the same random numbers, such as diffusion
    noise and timesteps.

    The evidence is an input of the model, or a target of the loss, with different numbers for each
    sample of a batch, that no loader read and that both ranks have. One number for all samples, a
    shared mask, and numbers that ranks may have sent to each other before backward, are no
    evidence.
    """
    said = (
        "ranks {other} and {rank} have different samples and draw the same random numbers for "
        "them between a batch and its loss ({what})"
    )
    for step in job.steps if job.world > 1 else ():
        seen: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {}
        for rank, record in enumerate(job.at(step)):
            sends = any(call.elements > 1 and not call.after_backward for call in record.calls)
            loaded = {leaf for batch in record.batches for leaf in batch.leaves}
            for one in () if sends else record.trained:
                targets = [(call.target, f"the target of {call.name}") for call in one.losses]
                inputs = [(d, f"input {n} of the model") for n, d in enumerate(one.inputs)]
                for name, what in (*inputs, *targets) if one.drew and one.batches else ():
                    other, rows = seen.setdefault((name, one.random["torch"]), (rank, one.rows))
                    if rank == other or name in loaded or {*rows} & {*one.rows}:
                        continue
                    held = job.tensors(rank, step).get(f"data/{name}")
                    if held is not None and _differs_by_sample(held, len(one.rows)):
                        yield step, rank, said.format(other=other, rank=rank, what=what)


def _differs_by_sample(held: torch.Tensor, count: int) -> bool:
    return held.dim() > 0 and len(held) == count > 1 and bool((held[1:] != held[:1]).any())


def _compare_streams_of_shared_samples(job: JobRecording, tally: Tally) -> bool:
    """Compare the RNG streams of ranks that share samples. Return True if there are such ranks."""
    compared = False
    if job.apart is None or not any(axis.kind == "sequence" for axis in job.ranks[0].axes):
        return False
    for step in job.steps:
        for replica in job.replicas:
            several = zip(*(job.apart.records[rank, step].passes for rank in replica), strict=False)
            for passes in (one for one in several if all(p.draws and p.live for p in one)):
                pieces = len({p.inputs for p in passes}) == len(passes)
                if not pieces:
                    continue
                compared = True
                tally.count(parameter="torch", rank=replica[0], step=step, elements=len(passes))
                if len({p.random["torch"] for p in passes}) < len(passes):
                    tally.fail(
                        f"step {step}: ranks {', '.join(map(str, replica))}, which hold shards of "
                        "the same samples, draw the same random numbers in the forward pass",
                        parameter="torch", rank=replica[-1], step=step,
                    )  # fmt: skip
    return compared


def settings(job: JobRecording) -> CheckResult:
    """Check that optimizer settings, including learning rates, are the same on all ranks."""
    tally = Tally("learning rate", NO_LAYER)
    for step in job.steps:
        first = job.records[0, step].groups
        for rank in range(job.world):
            own = job.records[rank, step].groups
            tally.count(parameter="groups", rank=rank, step=step, elements=sum(map(len, own)))
            if len(own) != len(first):
                tally.fail(
                    f"step {step}: rank {rank} has {len(own)} parameter groups, but rank 0 has "
                    f"{len(first)}",
                    parameter="groups", rank=rank, step=step,
                )  # fmt: skip
                continue
            for number, (mine, other) in enumerate(zip(own, first, strict=True)):
                for key in sorted(set(mine) | set(other)):
                    if mine.get(key) != other.get(key):
                        tally.fail(
                            f"step {step}: {key} of group {number} is {mine.get(key)} on rank "
                            f"{rank}, but {other.get(key)} on rank 0",
                            parameter=f"param_groups[{number}]/{key}", rank=rank, step=step,
                            actual=mine.get(key, ""), expected=other.get(key, ""),
                        )  # fmt: skip
    return tally.result()


def scaler(job: JobRecording) -> Iterator[CheckResult]:
    """Check that loss scales, and the steps that a GradScaler skips, are the same on all ranks."""
    if all(record.scale is None for record in job.records.values()):
        return
    tally = Tally("loss scaler", NO_LAYER)
    for step in job.steps:
        first = job.records[0, step]
        for rank in range(job.world):
            own = job.records[rank, step]
            tally.count(parameter="scale", rank=rank, step=step, elements=1)
            if own.skipped != first.skipped or own.scale != first.scale:
                did = {True: "skips the step", False: "takes the step"}
                tally.fail(
                    f"step {step}: rank {rank} {did[own.skipped]} at scale {own.scale}, but rank "
                    f"0 {did[first.skipped]} at scale {first.scale}",
                    parameter="scale", rank=rank, step=step,
                )  # fmt: skip
            if any(clip.scaled for clip in own.clips):
                tally.fail(
                    f"step {step}: gradients are clipped while still scaled by "
                    f"{own.scale or 1.0:g}, before GradScaler.unscale_",
                    kind=FindingKind.BEFORE_UNSCALE,
                    parameter="scale", rank=rank, step=step,
                )  # fmt: skip
    yield tally.result()
