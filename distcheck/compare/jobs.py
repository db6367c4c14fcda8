"""Compares two recordings of training jobs, made by `distcheck job --save`."""

import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from distcheck.compare.records import CaseComparison, compared_case
from distcheck.compare.screen import KnownCase
from distcheck.errors import UsageError
from distcheck.judge import fitting
from distcheck.judge.divergence import noise_floor
from distcheck.judge.divergence.job_recordings import (
    JobComparison,
    compare_recordings,
    name_in_only_one,
    why_not_comparable,
)
from distcheck.judge.divergence.modules import add_module_evidence
from distcheck.plan.provenance import Provenance, changes_affecting_bits
from distcheck.recordings.differing import CHOSEN, TraceComparison
from distcheck.recordings.jobs.reading import REPORT, JobRecording, read_saved_recording
from distcheck.recordings.recording import Kind
from distcheck.records import Case, Change, ChangeKind, Diagnosis, VerdictName
from distcheck.records.causes import name_cause
from distcheck.reports.documents import read_report

_NAME = "job"
_LEFT = 1e-3  # Heuristic: as `job/causes` names a factor
_OF_GRADIENTS = ("loss", "local gradients", "reduced gradients", "gradients")


def compare_jobs(then: Path, now: Path, *, bits: bool) -> tuple[CaseComparison, KnownCase]:
    """Compare two recordings. Return the comparison, and the case of the later job. Raises
    UsageError for a damaged folder, and for recordings of different models.
    """
    earlier, later = (read_saved_recording(folder) for folder in (then, now))
    floors = [(noise_floor.read_noise_floor(folder), 0) for folder in (then, now)]
    reports = [read_report(folder / REPORT) for folder in (then, now)]
    for folder, report in zip((then, now), reports, strict=True):
        if len(report["cases"]) != 1:
            raise UsageError(
                f"{folder / REPORT} is damaged: a job has one case, and it has "
                f"{len(report['cases'])}; run distcheck job again"
            )
    _check_comparable(then, earlier, now, later)
    known = [_known_case(report) for report in reports]
    changed = changes_affecting_bits(
        Provenance(environment=known[0].environment),
        Provenance(environment=known[1].environment),
        known[1].case,
    )
    verdicts = [_verdict_of_job(report) for report in reports]
    before = (*changed, *_changes_before_training(earlier, later, {one.name for one in changed}))
    missing = why_not_comparable(earlier, later)
    if missing:
        found = TraceComparison(why_not=missing)
        one = compared_case(_NAME, found, changed, (verdicts[0], verdicts[1]), bits=bits)
        return msgspec.structs.replace(one, changes=before), known[1]
    comparison = compare_recordings(earlier, later, floors)
    found = comparison.result()
    one = compared_case(
        _NAME, found, changed, (verdicts[0], verdicts[1]), bits=bits, needs_bound=True,
        remark=_remark(comparison, found, earlier, later),
    )  # fmt: skip
    modules = comparison.by_module()
    causes = add_module_evidence(
        _causes(comparison, found, earlier, later, changed), modules, "compared"
    )
    if comparison.diverged is not None and comparison.diverged.what == "optimizer's settings":
        reason = f"the {comparison.diverged.what} differ: later steps are not compared"
        one = msgspec.structs.replace(one, verdict="fail", reason=reason)
    _, op = comparison.first_divergent_op()
    if op and causes:
        evidence = f"{causes[0].evidence}; {op}"
        causes[0] = msgspec.structs.replace(causes[0], evidence=evidence)
    return msgspec.structs.replace(
        one, changes=before, diagnosis=tuple(causes), modules=modules, op=op
    ), known[1]


def _check_comparable(then: Path, earlier: JobRecording, now: Path, later: JobRecording) -> None:
    """Raise UsageError for recordings that cannot be two runs of one training."""
    for folder, job in ((then, earlier), (now, later)):
        if job.divided_by:
            raise UsageError(
                f"{folder}: ranks hold shards of one model ({job.divided_by}), which distcheck "
                "cannot unshard; record the job with DistributedDataParallel or fully_shard"
            )
    if earlier.steps[0] != later.steps[0]:
        raise UsageError(
            f"{then} starts at step {earlier.steps[0]}, but {now} at step {later.steps[0]}; "
            "pass the same --from-step to both, or record the second one with --resumed-from"
        )
    if other := name_in_only_one(earlier, later):
        raise UsageError(
            f"{then} and {now} are recordings of different models: only one of them has the {other}"
        )


def _changes_before_training(
    earlier: JobRecording, later: JobRecording, known: Collection[str]
) -> Iterator[Change]:
    """Yield what differed before the first step, except `known` changes: command, settings,
    variables, optimizer, data loaders, seeds, initial state, data order.
    """
    then, now = _before_training(earlier), _before_training(later)
    for name in [name for name in now | then if name not in known]:
        was, is_now = then.get(name, "none"), now.get(name, "none")
        is_known = name in then and name in now
        if was != is_now and (is_known or " of parameter group " not in name):
            kind: ChangeKind = "code" if name == "script" else "settings"
            yield Change(kind=kind, name=name, then=was, now=is_now)
    one, two = (job.records[0, job.steps[0]].digests for job in (earlier, later))
    states = [name for name in one if name.startswith(("before/", "buffer/")) and name in two]
    if other := [name for name in states if one[name] != two[name]]:
        name = f"the initial state of {len(other)} of {len(states)} tensors, first {other[0]},"
        yield Change(kind="settings", name=name, then=one[other[0]][:8], now=two[other[0]][:8])
    ids = [[i for r in range(job.world) for i in job.header(r, 0).ids] for job in (earlier, later)]
    if ids[0] != ids[1]:
        common = (Counter(ids[0]) & Counter(ids[1])).total()
        is_same = common == len(ids[0]) == len(ids[1])
        said = "the same samples in another order" if is_same else f"{common} of them"
        was = f"{len(ids[0])} samples"
        yield Change(kind="settings", name="the data of the first step", then=was, now=said)


# Variables whose values are part of the launch, and settings that only describe a machine.
_OF_A_LAUNCH = ("MASTER_", "TORCHELASTIC_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "OMPI_", "WORLD_")


def _before_training(job: JobRecording) -> dict[str, str]:
    """Return the choices of rank 0 before its first step, as text by name."""
    rank, record = job.ranks[0], job.records[0, job.steps[0]]
    given = {n: v for n, v in rank.variables.items() if not n.startswith(_OF_A_LAUNCH)}
    found: dict[str, Any] = {
        "world size": job.world, "the command": shlex.join(rank.arguments[1:]),
        "backend": rank.backend, "device": rank.device, "torch": rank.torch,
        "wrapper": rank.wrapper, **rank.settings, **given, "optimizer": record.optimizer,
    }  # fmt: skip
    for number, group in enumerate(record.groups):
        found |= {f"{key} of parameter group {number}": f"{v:.9g}" for key, v in group.items()}
    for one in record.iterations:
        about = msgspec.structs.asdict(one)
        about |= about.pop("settings")
        names = [name for name in about if name not in ("loader", "epoch")]
        found |= {f"{name} of data loader {one.loader}": about[name] for name in names}
    return {name: str(value) for name, value in found.items()}


def _verdict_of_job(report: dict[str, Any]) -> VerdictName:
    """Return a job's verdict; for one rank, whose verdict is never more than unknown, "pass" if no
    other check failed.
    """
    case = report["cases"][0]
    checks = [one["verdict"] for one in case["checks"] if one["check"] != "outcome"]
    only_one = case["case"]["world"] == 1 and case["verdict"] == "unknown" and "fail" not in checks
    verdict: VerdictName = "pass" if only_one else case["verdict"]
    return verdict


def _known_case(report: dict[str, Any]) -> KnownCase:
    entry = report["cases"][0]
    case = msgspec.structs.replace(msgspec.convert(entry["case"], Case), id=_NAME)
    return KnownCase(case, report["environment"], entry["strategy_file"])


def _remark(
    comparison: JobComparison, found: TraceComparison, earlier: JobRecording, later: JobRecording
) -> str:
    said = []
    steps = min(len(earlier.steps), len(later.steps))
    if comparison.unmeasured and found.first is not None:
        said.append(f"the noise floor was not measured: {comparison.unmeasured}")
    if comparison.blurred is not None:
        said.append(
            f"nothing is judged from step {earlier.steps[comparison.blurred]} on, because the "
            "perturbed runs differ there by as much as the gradients themselves"
        )
    if len(earlier.steps) != len(later.steps):
        said.append(f"only the {steps} common steps are compared")
    local = "local gradients are not compared, since one of the two jobs has none"
    if not any(one.kind == "local gradients" for one in found.moments) and found.moments:
        said += [local] if earlier.world == later.world else []
    if earlier.world != later.world:
        said.append(
            f"{earlier.world} and {later.world} ranks, each treated as a single process: local "
            "gradients are not compared"
        )
    return "; ".join(said)


def _causes(
    comparison: JobComparison,
    found: TraceComparison,
    earlier: JobRecording,
    later: JobRecording,
    changed: list[Change],
) -> list[Diagnosis]:
    """Return the causes: differing settings, changed bits, or the difference beyond its bound."""
    pair = comparison.diverged
    if pair is not None and pair.what == "optimizer's settings":
        first = found.first
        if first is not None:
            said = (
                f"step {earlier.steps[pair.step]}: the optimizer's settings were {first.expected}, "
                f"but are {first.actual}"
            )
            rate = str(first.expected).startswith("lr ")
            cause = "learning-rate-differs" if rate else "optimizer-settings-differ"
            return [name_cause(cause, said, "compared")]
    if found.beyond is None:
        return _cause_of_changed_bits(comparison, found, earlier, later, changed)
    step = found.beyond.step
    clips = [_clipping_limits(job, step) for job in (earlier, later)]
    if found.beyond_kind == "gradients" and clips[0] != clips[1]:
        was, now = (", ".join(f"{norm:g}" for norm in one) or "any" for one in clips)
        said = f"step {earlier.steps[step]}: the maximum norm for clipping was {was}, but is {now}"
        return [name_cause("clip-norm-differs", said, "compared")]
    if found.beyond_kind in _OF_GRADIENTS:
        fitted = fitting.fit_least_squares(_gradient_pairs(earlier, later, step))
        if fitted is not None and fitted.share < min(_LEFT, 0.1 * abs(fitted.factors[0] - 1)):
            return [_cause_of_factor(fitted.factors[0], step, earlier, later)]
    said = f"step {earlier.steps[step]}: {found.beyond_kind}, {found.beyond.parameter} first"
    return [name_cause("unexplained", said, "compared")]


def _clipping_limits(job: JobRecording, step: int) -> list[float]:
    """Return the maximum norms and values to which rank 0 clips gradients."""
    return [one.most for one in job.records[0, job.steps[step]].clips if one.most is not None]


def _cause_of_changed_bits(
    comparison: JobComparison,
    found: TraceComparison,
    earlier: JobRecording,
    later: JobRecording,
    changed: list[Change],
) -> list[Diagnosis]:
    """Return the cause for changed bits of the same command, run twice with the same settings."""
    alike = earlier.ranks[0].arguments == later.ranks[0].arguments and not changed
    computed = found.first is not None and comparison.diverged is None and found.kind not in CHOSEN
    if not alike or not computed or earlier.world != later.world or found.first is None:
        return []
    said = f"the same command run twice differs, first at step {found.first.step}: {found.kind}"
    return [name_cause("nondeterministic", f"{said} of {found.first.parameter}")]


def _gradient_pairs(earlier: JobRecording, later: JobRecording, step: int) -> Any:
    kind, places = Kind.GRADIENT, (earlier.steps[step], later.steps[step])
    for name in earlier.names(kind):
        one = earlier.gradient(kind, 0, places[0], name)
        two = later.gradient(kind, 0, places[1], name)
        if one is not None and two is not None and one.numel() == two.numel():
            yield two, one


def _cause_of_factor(
    factor: float, step: int, earlier: JobRecording, later: JobRecording
) -> Diagnosis:
    said = f"step {earlier.steps[step]}: gradients are {factor:.9g}x those of the earlier job"
    by = later.world / earlier.world
    if by != 1 and abs(factor - by) <= _LEFT * by:
        return name_cause("missing-division", f"{said}: the ratio of the world sizes", "job",
                          world=later.world)  # fmt: skip
    if by != 1 and abs(factor - 1 / by) <= _LEFT / by:
        return name_cause("double-division", f"{said}: the inverse ratio of the world sizes", "job")
    return name_cause("wrong-divisor", said, "job")
