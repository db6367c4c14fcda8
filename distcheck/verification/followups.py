"""Runs follow-up cases after known kinds of failure, and leaves out cases that do not count. Does
not import torch.

A failure that may come from an unwaited call is run once in a simulated world. It detects every use
of a tensor in flight; processes only show the accidental content of the tensor. If the simulated
world stops at such a call, the call is the cause, and replaces its consequences.

Five kinds of correct code fail in the default cases, but not in typical trainings:

- code that cannot handle a scalar (0-d) parameter (`x[:]`, `len(x)`), which workloads `exact` and
  `composite` have, or a 5-d one (`channels_last`), which `composite` has. Such a case reruns with
  a different parameter, and the new report replaces the first
- code for one tensor that its author calls on a vector of all gradients, and that cannot handle a
  small tensor (`torch.chunk(x, world_size)`). Such a case reruns with a vector of all gradients
- code that computes in float32 whatever the gradients' dtype: it fails in the float64 case added
  for full batch float64, with values representable in float32 or an exception that names a dtype.
  If every float32 case passed, the float64 case is left out
- code that ignores gradients missing on some ranks: it raises or hangs in the cell that the default
  run adds for them, which is then left out (`plan/cells_to_run.py`)
- code that weights ranks equally although shards are uneven. The failure remains. A case with equal
  shards runs to report if it passes; also if the failure is unexplained, since weights may hide a
  cause that has a name

A note lists the properties that are not judged for such a reason, with the option that tests them.
A rank that is killed, exits or is stopped never leads to a follow-up.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from distcheck import backends, registry
from distcheck.plan.cells_to_run import counts_only_if_finished
from distcheck.records import Case, CaseReport, Diagnosis, Outcome, merge_verdicts
from distcheck.records.case import as_file_name
from distcheck.records.exit_status import MISUSES, RankEnd
from distcheck.records.layers import IN_FLOAT64
from distcheck.records.run_facts import LIMIT, TAKEN_AS
from distcheck.records.schedules import ScheduleSearchResult
from distcheck.training.jobs import DIGEST, DigestRequest
from distcheck.verification.session import Session
from distcheck.worlds.launch import Ranks

Kind = Literal["no scalar", "no volume", "flat", "equal shards", "in flight"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
# Parameters that code may not handle: description, replacement, example.
_ODD = {
    "no scalar": ("scalar (0-d) parameters", "a vector of one element", "a logit scale"),
    "no volume": ("five-dimensional parameters", "a four-dimensional one", "a 3-d convolution"),
    "flat": ("small tensors", "a vector of all gradients", "fewer rows than ranks"),
}
_WITHOUT: dict[Kind, dict[str, str]] = {
    "no scalar": {name: f"{name}:no-scalar" for name in ("exact", "composite")},
    "no volume": {"composite": "composite:no-volume"},
    "flat": {name: name for name in ("exact", "composite")},
}
# A dtype, in the terms of torch, NumPy, Python and the backends.
_DTYPE = re.compile(
    r"\b(?:dtypes?|(?:scalar|tensor|data) types?|b?float(?:16|32|64)|complex(?:64|128)|[Dd]ouble"
    r"|Float|Half|(?:Float|Double|Half)Tensor)\b"
)
# Causes named for gradients that were used before a collective had completed.
_RACES = {
    "hang",
    "nondeterministic",
    "nonfinite",
    "partial-sync",
    "duplicated-rank",
    "single-rank-gradient",
    "unexplained",
}
_FOLLOW = {
    "missing-sync",
    "replicated-gradients-differ",
    "wrong-update",
}  # consequences, also with other causes
_MOST_SHOWN = 160  # characters of an error


class FollowUp(msgspec.Struct, frozen=True, kw_only=True):
    """A case to run because of the report of a failed case."""

    case: Case
    kind: Kind
    of: CaseReport

    def replaces(self, done: CaseReport) -> bool:
        """Return True if the follow-up's report replaces the first one. It also does so if it shows
        that the dtype is the reason for the failure.
        """
        by_dtype = _is_companion(self.case) and _names_dtype(done)
        return self.kind in _ODD and (done.ranks_finished or by_dtype)


def follow_ups(reports: Sequence[CaseReport]) -> list[FollowUp]:
    """Return cases to run after these; with equal shards one per strategy and world."""
    found: dict[tuple[object, ...], FollowUp] = {}
    for report in (report for report in reports if not is_untrained(report)):
        for kind in _KINDS:
            if kind in _ODD:
                case = _without(kind, report, reports)
            else:
                case = (_with_equal_shards if kind == "equal shards" else _simulated)(report)
            once = kind not in _ODD
            of = (report.case.sibling_key, report.case.adaptation) if once else report.case.id
            key = (kind, of)
            if case is not None and key not in found:
                found[key] = FollowUp(case=case, kind=kind, of=report)
    return list(found.values())


def _without(kind: Kind, report: CaseReport, reports: Sequence[CaseReport]) -> Case | None:
    """Return a case without such a parameter, if ranks crash with it and not on other workloads."""
    alike = _siblings(report, reports)
    finished = any(r.ranks_finished for r in alike)
    without = _WITHOUT[kind].get(report.case.workload)
    if without is None or not _crashed(report) or not finished:
        return None
    if kind == "flat":
        is_it = any(note.startswith(f"{TAKEN_AS}tensor-mean") for note in report.notes)
        adaptation = msgspec.structs.replace(report.case.adaptation, form="flat-mean")
        return msgspec.structs.replace(report.case, adaptation=adaptation) if is_it else None
    return msgspec.structs.replace(report.case, workload=without)


def _with_equal_shards(report: CaseReport) -> Case | None:
    case, shards = report.case, len(report.case.with_data)
    equal = case.batch // shards * shards
    is_it = any(cause.cause in ("unweighted-mean", "unexplained") for cause in report.diagnosis)
    if not is_it or equal == case.batch or "exact" in case.layers or case.dtype != "float32":
        return None
    name = as_file_name(f"{case.id}-batch-{equal}")
    return msgspec.structs.replace(case, id=name, batch=equal, rerun=False)


def _simulated(report: CaseReport) -> Case | None:
    case = report.case
    causes = {one.cause for one in report.diagnosis}
    is_it = "hang" in causes or (report.ranks_finished and causes & _RACES)
    if not is_it or case.device != "cpu" or backends.name_of(case.backend) == "simulated":
        return None
    if not registry.is_installed("simulated"):
        return None
    return msgspec.structs.replace(
        case, id=as_file_name(f"{case.id}-simulated"), backend="simulated", rerun=False
    )


def amend_report(
    reports: Sequence[CaseReport], done: Sequence[tuple[FollowUp, CaseReport]]
) -> list[CaseReport]:
    found = list(reports)
    for follow_up, report in done:
        change = _CHANGES.get(follow_up.kind, _with_another)
        found = [change(each, follow_up, report) for each in found]
    return found


def _with_another(report: CaseReport, follow_up: FollowUp, done: CaseReport) -> CaseReport:
    of, own = follow_up.of.case, report.case
    # It may already replace the first one; another follow-up's does not concern this one.
    here = own.id == of.id and own.workload in (of.workload, follow_up.case.workload)
    if not here or not follow_up.replaces(done):
        return report
    odd, another, such = _ODD[follow_up.kind]
    note = (
        f"{LIMIT}{odd} are not judged: the code fails on the one in {of.workload} "
        f"({_error(follow_up.of)}), but not on {another}, which ran instead; a model with such a "
        f"parameter ({such}) fails; pass --workload {of.workload} to judge it"
    )
    return msgspec.structs.replace(done, notes=(*done.notes, note))


def _with_hint(report: CaseReport, follow_up: FollowUp, done: CaseReport) -> CaseReport:
    if report.case.sibling_key != follow_up.case.sibling_key:
        return report
    found = [_hinted(cause, follow_up.case, done) for cause in report.diagnosis]
    named = [one for one in done.diagnosis if one.cause != "unexplained"]
    if named and {one.cause for one in found} == {"unexplained"}:
        said = f"with --batch {follow_up.case.batch}, which makes all shards equal: "
        found = [msgspec.structs.replace(one, evidence=said + one.evidence) for one in named]
    return msgspec.structs.replace(report, diagnosis=tuple(found))


def _with_misuse(report: CaseReport, follow_up: FollowUp, done: CaseReport) -> CaseReport:
    """Replace the causes found with processes by the misuse that the simulated world found."""
    misuses = [one for one in done.diagnosis if one.cause in MISUSES]
    left = [one for one in report.diagnosis if one.cause not in _RACES | _FOLLOW]
    same = report.case.sibling_key == follow_up.of.case.sibling_key
    if not misuses or not same or len(left) == len(report.diagnosis):
        return report
    note = (
        "identified in a simulated world, which ran because the failure may be the result of a "
        f"race condition: {follow_up.case.command_line}"
    )
    return msgspec.structs.replace(report, diagnosis=(*misuses, *left), notes=(*report.notes, note))


_CHANGES = {"equal shards": _with_hint, "in flight": _with_misuse}


def _hinted(cause: Diagnosis, case: Case, done: CaseReport) -> Diagnosis:
    """Add the result with equal shards: code that weights ranks equally passes there, or has
    another failure.
    """
    if cause.cause != "unweighted-mean":
        return cause
    shards = len(case.with_data)
    if done.verdict == "pass":
        first = (
            f"correct if all ranks have equally many samples ({case.workload} {case.dtype} passes "
        )
        evidence = f"{first}with --batch {case.batch}), but not with these shards: {cause.evidence}"
        suggestion = f"{cause.suggestion}, as with --batch {case.batch}, a multiple of {shards}"
        return msgspec.structs.replace(cause, evidence=evidence, suggestion=suggestion)
    causes = ", ".join(dict.fromkeys(one.cause for one in done.diagnosis))
    what = f"with --batch {case.batch} all shards are equal: {case.workload} {case.dtype} does not "
    what += f"pass there either ({causes or done.verdict})"
    return msgspec.structs.replace(cause, suggestion=f"{cause.suggestion}; {what}")


def leave_out_cases(reports: Sequence[CaseReport]) -> tuple[list[CaseReport], dict[str, str]]:
    """Return the reports that count, with notes on the others, and by id the reason that one does
    not: it is a float64 case of float32 code, or a default cell that ranks do not finish.
    """
    out: dict[str, str] = {}
    untrained = [r for r in reports if is_untrained(r) and _siblings(r, reports)]
    reports = [report for report in reports if report not in untrained]
    for report in reports:
        alike = [r for r in _siblings(report, reports) if r.case.dtype == "float32"]
        why = _why_not_float64(report) if _is_companion(report.case) else ""
        # One of the two may have been rerun without its scalar.
        same = [r for r in alike if _workload_name(r.case) == _workload_name(report.case)]
        # A crash that the same workload does not have in float32 is caused by the dtype, even if
        # gradients are wrong.
        ran = bool(same) and all(r.ranks_finished for r in same)
        passed = ran and all(r.verdict == "pass" for r in alike)
        if why and (passed or (ran and report.ranks_failed)):
            out[report.case.id] = _float64_note(report, why)
    kept = [r for r in reports if r.case.id not in out]
    left = [(r, out[r.case.id]) for r in reports if r.case.id in out]
    for report in untrained:
        out[report.case.id] = _untrained_note(report)
        # Next to a failure it shows nothing: the code may have ended for the same reason.
        if all(r.verdict != "fail" for r in _siblings(report, kept)):
            left.append((report, out[report.case.id]))
    notes: Callable[[CaseReport], list[str]] = lambda report: [  # noqa: E731
        note for other, note in left if other.case.sibling_key == report.case.sibling_key
    ]
    return [msgspec.structs.replace(r, notes=(*notes(r), *r.notes)) for r in kept], out


def _workload_name(case: Case) -> str:
    return case.workload.partition(":")[0]


def _is_companion(case: Case) -> bool:
    """Return True for the float64 case that was added to a float32 case, not requested."""
    return case.dtype == "float64" and case.layers == (IN_FLOAT64,)


def _why_not_float64(report: CaseReport) -> str:
    rounded = report.verdict == "fail" and report.rounded_to == "float32"
    if rounded and not report.ranks_failed:
        return "all of its gradients are representable in float32"
    return f"it fails on other gradients ({_error(report)})" if _names_dtype(report) else ""


def _names_dtype(report: CaseReport) -> bool:
    return _crashed(report) and _DTYPE.search(_error(report)) is not None


def _float64_note(report: CaseReport, why: str) -> str:
    return (
        f"{report.case.workload} in float64 is not judged: the code computes only in float32, "
        f"{why}; only float32 cases judge its gradients, and they cannot reveal errors below about "
        "1e-7 of a gradient; pass --dtype float64 to judge it"
    )


def failure_stands(report: CaseReport) -> bool:
    """Return True if no follow-up, none of which has run yet, can excuse this failure."""
    excused = is_untrained(report) or _is_companion(report.case)
    odd = any(report.case.workload in names for names in _WITHOUT.values())
    return report.verdict == "fail" and not excused and not (odd and _crashed(report))


def is_untrained(report: CaseReport) -> bool:
    """Return True if the code could not train a case that counts only if its ranks finish.

    The code then raised, deadlocked, had mismatched calls (for which gloo may kill a rank), or did
    not synchronize, as with buckets that wait for every parameter. Ranks that ended for a different
    reason show nothing about the code.
    """
    ended = report.ranks_failed and not any(map(_is_gone, report.outcomes))
    return (ended or _exchanged_nothing(report)) and counts_only_if_finished(report.case)


def _exchanged_nothing(report: CaseReport) -> bool:
    """Return True if every rank holds local gradients; with two ranks, one rank's look the same."""
    causes = {one.cause for one in report.diagnosis}
    return "missing-sync" in causes and causes <= {"missing-sync", "single-rank-gradient"}


def _is_gone(outcome: Outcome) -> bool:
    """Return True if a rank was ended by something other than its calls."""
    if outcome.outcome not in (RankEnd.KILLED, RankEnd.EXITED, RankEnd.LOST):
        return outcome.silence == "stopped"
    return not (outcome.proven or outcome.sizes_differ)


def _untrained_note(report: CaseReport) -> str:
    first = next(iter(report.diagnosis), None)
    if _exchanged_nothing(report):
        return (
            f"optional check {report.case.workload} skipped: if a rank does not use some layer, "
            "the gradients of the other layers are not synchronized either, and no error is "
            "raised; that is correct for models in which every rank uses every layer; pass "
            f"--workload {report.case.workload} to require it"
        )
    ended = _error(report) if first is None or first.cause == "crash" else first.evidence
    name = report.case.workload
    return (
        f"optional check {name} skipped: p.grad is None on some ranks ({_shortened(ended)}); "
        "that is correct for models in which every rank uses every layer; pass --workload "
        f"{name} to require it"
    )


def _siblings(report: CaseReport, reports: Sequence[CaseReport]) -> list[CaseReport]:
    """Return the other cases of the same code, called in the same way, in the same world."""
    case = report.case
    return [
        r
        for r in reports
        if r is not report
        and (r.case.sibling_key, r.case.adaptation) == (case.sibling_key, case.adaptation)
    ]


def _crashed(report: CaseReport) -> bool:
    """Return True if ranks raised, and none was killed, exited or hung."""
    ends = {o.outcome for o in report.outcomes} - {RankEnd.FINISHED, RankEnd.ENDED}
    return report.ranks_failed and ends == {RankEnd.RAISED}


def _error(report: CaseReport) -> str:
    """Return the error of the first rank that failed by itself, in one line."""
    first: Outcome = min(report.outcomes, key=lambda o: (RankEnd(o.outcome).place, o.rank))
    return _shortened(first.error or first.reason or first.last_call or first.outcome)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# -- schedules of a simulated world ----------------------------------------------------------------

_OF_ENDS = ("hang", "collective-mismatch", "unmatched-message")


def needs_schedule_search(report: CaseReport) -> bool:
    """Return True if schedules of a case must be searched. After a pass, only schedules can reveal
    a failure. If ranks did not finish, buffered sends may show the reason.
    """
    passed = report.verdict != "fail"
    return bool(report.case.schedules) and not report.unfinished and (passed or report.ranks_failed)


def with_schedule_check(session: Session, report: CaseReport) -> CaseReport:
    """Return the report with the check `schedules`. Raises CannotRunError if they cannot run."""
    case = report.case
    found = _search(session, case)
    replay = msgspec.structs.replace(case, schedules=0, preemptions=0).command_line
    judged = registry.load("simulated").check_schedules
    result, causes = judged(found, ranks=case.world, digests=_digests, replay=replay)
    report = _with_contents(report, found)
    checks = (*report.checks, result)
    if report.verdict == "fail":  # its failure is the ranks' exit, whose cause may be refined
        named = [c for c in report.diagnosis if not causes or c.cause not in _OF_ENDS]
        return msgspec.structs.replace(report, checks=checks, diagnosis=(*causes, *named))
    return msgspec.structs.replace(
        report,
        checks=checks,
        verdict=merge_verdicts([report.verdict, result.verdict]),
        diagnosis=(*report.diagnosis, *causes),
    )


def _with_contents(report: CaseReport, found: ScheduleSearchResult) -> CaseReport:
    if report.contents is None:
        return report
    ended = max(found.ran - len(found.late), 0)
    contents = msgspec.structs.replace(report.contents, schedules=ended)
    return msgspec.structs.replace(report, contents=contents)


def _digests(result: bytes) -> tuple[str, ...]:
    found: tuple[str, ...] = DIGEST.decode(result)
    return found


def _search(session: Session, case: Case) -> ScheduleSearchResult:
    ranks = Ranks(
        job=DIGEST,
        backend=case.backend,
        size=case.world,
        request=lambda meeting: DigestRequest(
            case=case, rendezvous=meeting, description=session.data.description
        ),
        deadline_s=case.deadline_s,
    )
    found: ScheduleSearchResult = registry.load("simulated").search_schedules(
        session.pool,
        ranks,
        schedules=case.schedules,
        preemptions=case.preemptions,
        fds=session.data.fds,
        on_progress=lambda ran: session.listener.preparing(
            f"{case.strategy}, world {case.world}: schedule {ran} of at most {case.schedules}"
        ),
    )
    return found
