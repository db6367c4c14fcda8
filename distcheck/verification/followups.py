"""What is run once more, or not counted, when a strategy's cases have failed for a known reason.

What may come of a call that was not waited for is run once in a simulated world, which sees every
use of a tensor in flight: processes see what happened to be in it. Where it stops at such a call,
that is the cause, in place of what follows from it.

Four kinds of right code fail in the default cases, and none of them in a usual training:

- code that cannot take a parameter of no dimension (`x[:]`, `len(x)`), which the lattice and the
  composite have, or one of five (`channels_last`), which the composite has. They are run again with
  another parameter in its place, and those reports take the first ones' places
- code that computes in float32 whatever the gradients' dtype is: it fails in the float64 case,
  which is added for full batch float64, with numbers of float32 or an exception that names a dtype.
  Where every float32 case passed, that case is left out
- code that takes no account of gradients that some ranks do not have: it raises or hangs in the
  cell that the default run adds for them, which is left out then (`plan/cells_to_run.py`)
- code that weights no rank, where shards are unequal: it is wrong there, and stays so. A case with
  equal shards is run to say what passes then; also where nothing explains the failure, since there
  a cause that weights hide may have a name

What is not judged for such a reason is said in a note, with the option that asks for it. A rank
that is killed, leaves or is stopped excuses nothing.

No torch here.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from distcheck import backends
from distcheck.judge import schedules
from distcheck.plan.cells_to_run import counts_if_finished
from distcheck.records import Case, CaseReport, Diagnosis, Outcome, merge_verdicts
from distcheck.records.case_ids import as_file_name
from distcheck.records.exit_status import MISUSES, RankEnd
from distcheck.records.layers import IN_FLOAT64
from distcheck.records.schedules import Searched
from distcheck.training.jobs import DIGEST, DigestRequest
from distcheck.worlds.launch import Ranks, search_schedules
from distcheck.worlds.pool import Pool

Kind = Literal["no scalar", "no volume", "equal shards", "in flight"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
# The parameter that code may be unable to take: what it is, what comes in its place, what has one.
_ODD = {
    "no scalar": ("without dimensions", "a vector of one element", "a logit scale"),
    "no volume": ("of five dimensions", "one of four", "a 3-d convolution"),
}
_WITHOUT: dict[Kind, dict[str, str]] = {
    "no scalar": {name: f"{name}:no-scalar" for name in ("lattice", "composite")},
    "no volume": {"composite": "composite:no-volume"},
}
# A dtype, in the words of torch, NumPy, Python and the backends.
_DTYPE = re.compile(
    r"\b(?:dtypes?|(?:scalar|tensor|data) types?|b?float(?:16|32|64)|complex(?:64|128)|[Dd]ouble"
    r"|Float|Half|(?:Float|Double|Half)Tensor)\b"
)
# What gradients are called that were used before an exchange had ended.
_RACES = {
    "nondeterministic",
    "partial-sync",
    "duplicated-rank",
    "single-rank-gradient",
    "unexplained",
}
_FOLLOW = {
    "missing-sync",
    "replicated-gradients-differ",
    "wrong-update",
}  # from one, though each has other causes
_MOST_SHOWN = 160  # characters of an error


class FollowUp(msgspec.Struct, frozen=True, kw_only=True):
    """A case to run because of another one's report."""

    case: Case
    kind: Kind
    of: CaseReport

    def replaces(self, done: CaseReport) -> bool:
        """Whether its report takes the place of the first one: also where it shows that the code
        fails for another reason, the dtype.
        """
        by_dtype = _is_companion(self.case) and _names_dtype(done)
        return self.kind in _ODD and (done.ranks_finished or by_dtype)


def follow_ups(reports: Sequence[CaseReport]) -> list[FollowUp]:
    """The cases to run after these: of equal shards at most one for a strategy and world."""
    found: dict[tuple[object, ...], FollowUp] = {}
    for report in (report for report in reports if not is_untrained(report)):
        for kind in _KINDS:
            if kind in _ODD:
                case = _without(kind, report, reports)
            else:
                case = (_with_equal_shards if kind == "equal shards" else _simulated)(report)
            once = kind not in _ODD
            of = (report.case.siblings, report.case.adaptation) if once else report.case.id
            key = (kind, of)
            if case is not None and key not in found:
                found[key] = FollowUp(case=case, kind=kind, of=report)
    return list(found.values())


def _without(kind: Kind, report: CaseReport, reports: Sequence[CaseReport]) -> Case | None:
    """Ranks crashed on a workload that has such a parameter, and on another one they did not."""
    alike = _siblings(report, reports)
    finished = any(r.ranks_finished for r in alike)
    without = _WITHOUT[kind].get(report.case.workload)
    if without is None or not _crashed(report) or not finished:
        return None
    return msgspec.structs.replace(report.case, workload=without)


def _with_equal_shards(report: CaseReport) -> Case | None:
    case, shards = report.case, len(report.case.with_data)
    equal = case.batch // shards * shards
    is_it = any(cause.cause in ("unweighted-mean", "unexplained") for cause in report.diagnosis)
    if not is_it or equal == case.batch or "lattice" in case.layers or case.dtype != "float32":
        return None
    name = as_file_name(f"{case.id}-batch-{equal}")
    return msgspec.structs.replace(case, id=name, batch=equal, rerun=False)


def _simulated(report: CaseReport) -> Case | None:
    case = report.case
    is_it = report.ranks_finished and any(one.cause in _RACES for one in report.diagnosis)
    if not is_it or case.device != "cpu" or backends.name_of(case.backend) == "simulated":
        return None
    return msgspec.structs.replace(
        case, id=as_file_name(f"{case.id}-simulated"), backend="simulated", rerun=False
    )


def take_in(
    reports: Sequence[CaseReport], done: Sequence[tuple[FollowUp, CaseReport]]
) -> list[CaseReport]:
    found = list(reports)
    for follow_up, report in done:
        change = _CHANGES.get(follow_up.kind, _with_another)
        found = [change(each, follow_up, report) for each in found]
    return found


def _with_another(report: CaseReport, follow_up: FollowUp, done: CaseReport) -> CaseReport:
    of, own = follow_up.of.case, report.case
    # It may stand in the first one's place already; another follow-up's has no part in this one.
    here = own.id == of.id and own.workload in (of.workload, follow_up.case.workload)
    if not here or not follow_up.replaces(done):
        return report
    odd, another, such = _ODD[follow_up.kind]
    note = (
        f"parameters {odd} are not judged: the code fails on the one of {of.workload} "
        f"({_error(follow_up.of)}), but not on {another}, which was run instead; a model with such "
        f"a parameter ({such}) fails; --workload {of.workload} makes it count"
    )
    return msgspec.structs.replace(done, notes=(*done.notes, note))


def _with_hint(report: CaseReport, follow_up: FollowUp, done: CaseReport) -> CaseReport:
    if report.case.siblings != follow_up.case.siblings:
        return report
    found = [_hinted(cause, follow_up.case, done) for cause in report.diagnosis]
    named = [one for one in done.diagnosis if one.cause != "unexplained"]
    if named and {one.cause for one in found} == {"unexplained"}:
        said = f"with --batch {follow_up.case.batch}, where all shards are equal: "
        found = [msgspec.structs.replace(one, evidence=said + one.evidence) for one in named]
    return msgspec.structs.replace(report, diagnosis=tuple(found))


def _with_misuse(report: CaseReport, follow_up: FollowUp, done: CaseReport) -> CaseReport:
    """What the simulated world has stopped at, in place of what processes made of it."""
    misuses = [one for one in done.diagnosis if one.cause in MISUSES]
    left = [one for one in report.diagnosis if one.cause not in _RACES | _FOLLOW]
    same = report.case.siblings == follow_up.of.case.siblings
    if not misuses or not same or len(left) == len(report.diagnosis):
        return report
    note = (
        "named by a simulated world, which was run since the gradients may be those of a race: "
        f"{follow_up.case.command_line}"
    )
    return msgspec.structs.replace(report, diagnosis=(*misuses, *left), notes=(*report.notes, note))


_CHANGES = {"equal shards": _with_hint, "in flight": _with_misuse}


def _hinted(cause: Diagnosis, case: Case, done: CaseReport) -> Diagnosis:
    """Code without weights is right, or wrong in another way as well, where shards are equal."""
    if cause.cause != "unweighted-mean":
        return cause
    shards = len(case.with_data)
    if done.verdict == "pass":
        first = f"right where all ranks have as many samples ({case.workload} {case.dtype} passes "
        evidence = f"{first}with --batch {case.batch}), and not with these shards: {cause.evidence}"
        suggestion = f"{cause.suggestion}, as with --batch {case.batch}, a multiple of {shards}"
        return msgspec.structs.replace(cause, evidence=evidence, suggestion=suggestion)
    causes = ", ".join(dict.fromkeys(one.cause for one in done.diagnosis))
    what = f"with --batch {case.batch} all shards are equal: {case.workload} {case.dtype} does not "
    what += f"pass there either ({causes or done.verdict})"
    return msgspec.structs.replace(cause, suggestion=f"{cause.suggestion}; {what}")


def leave_out(reports: Sequence[CaseReport]) -> tuple[list[CaseReport], dict[str, str]]:
    """The reports that count, with notes on those that do not, and why they do not, by their id:
    the float64 cases of code that computes in float32, and the cells of the default run that ranks
    do not finish.
    """
    out: dict[str, str] = {}
    untrained = [r for r in reports if is_untrained(r) and _siblings(r, reports)]
    reports = [report for report in reports if report not in untrained]
    for report in reports:
        alike = [r for r in _siblings(report, reports) if r.case.dtype == "float32"]
        why = _why_not_float64(report) if _is_companion(report.case) else ""
        # One of the two may have been run again without its scalar.
        same = [r for r in alike if _base(r.case) == _base(report.case)]
        # A crash that the same workload does not have in float32 comes of the dtype, also where
        # gradients are wrong.
        ran = bool(same) and all(r.ranks_finished for r in same)
        passed = ran and all(r.verdict == "pass" for r in alike)
        if why and (passed or (ran and report.ranks_failed)):
            out[report.case.id] = _float64_note(report, why, passed=passed)
    kept = [r for r in reports if r.case.id not in out]
    left = [(r, out[r.case.id]) for r in reports if r.case.id in out]
    for report in untrained:
        out[report.case.id] = _untrained_note(report)
        # Beside a failure it says nothing: the code may have ended there for the same reason.
        if all(r.verdict != "fail" for r in _siblings(report, kept)):
            left.append((report, out[report.case.id]))
    notes: Callable[[CaseReport], list[str]] = lambda report: [  # noqa: E731
        note for other, note in left if other.case.siblings == report.case.siblings
    ]
    return [msgspec.structs.replace(r, notes=(*notes(r), *r.notes)) for r in kept], out


def _base(case: Case) -> str:
    return case.workload.partition(":")[0]


def _is_companion(case: Case) -> bool:
    """Whether it is the float64 case that a float32 case is given, and was not asked for."""
    return case.dtype == "float64" and case.layers == (IN_FLOAT64,)


def _why_not_float64(report: CaseReport) -> str:
    rounded = report.verdict == "fail" and report.rounded_to == "float32"
    if rounded and not report.ranks_failed:
        return "every gradient that it leaves is a float32 number"
    return f"it fails on other gradients ({_error(report)})" if _names_dtype(report) else ""


def _names_dtype(report: CaseReport) -> bool:
    """Whether ranks failed with an exception that names one: no other is a matter of dtypes."""
    return _crashed(report) and _DTYPE.search(_error(report)) is not None


def _float64_note(report: CaseReport, why: str, *, passed: bool) -> str:
    so = "it says nothing about the gradients" if passed else "it says nothing of the gradients"
    return (
        f"{report.case.workload} in float64 does not count: the code computes in float32 alone, "
        f"{why}; {so}, which cannot show errors below about 1e-7 of a gradient; --dtype float64 "
        "makes it count"
    )


def stands(report: CaseReport) -> bool:
    """Whether a report has failed for what no other case can excuse: known before these are run."""
    excused = is_untrained(report) or _is_companion(report.case)
    odd = any(report.case.workload in names for names in _WITHOUT.values())
    return report.verdict == "fail" and not excused and not (odd and _crashed(report))


def is_untrained(report: CaseReport) -> bool:
    """Whether the code could not train a case that counts only if ranks finish it: it raised, or
    waits for ever, or its calls do not match (which may make gloo kill a rank), or it exchanged
    nothing, as buckets that wait for every parameter. A rank that ends in another way shows nothing
    about it.
    """
    ended = report.ranks_failed and not any(map(_is_gone, report.outcomes))
    return (ended or _exchanged_nothing(report)) and counts_if_finished(report.case)


def _exchanged_nothing(report: CaseReport) -> bool:
    """Whether every rank holds its own gradients; one rank's, in a world of two, are the same."""
    causes = {one.cause for one in report.diagnosis}
    return "missing-sync" in causes and causes <= {"missing-sync", "single-rank-gradient"}


def _is_gone(outcome: Outcome) -> bool:
    """Whether a rank ended, or was stopped, by something else than what its calls came to."""
    if outcome.outcome not in (RankEnd.KILLED, RankEnd.EXITED, RankEnd.LOST):
        return outcome.silence == "stopped"
    return not (outcome.proven or outcome.sizes_differ)


def _untrained_note(report: CaseReport) -> str:
    first = next(iter(report.diagnosis), None)
    if _exchanged_nothing(report):
        return (
            f"optional check {report.case.workload} skipped: where a rank does not use some layer, "
            "no gradient of the other layers is exchanged either, and no error says so; that is "
            "right for models in which every rank uses every layer; --workload "
            f"{report.case.workload} requires it"
        )
    ended = _error(report) if first is None or first.cause == "crash" else first.evidence
    name = report.case.workload
    return (
        f"optional check {name} skipped: p.grad is None on some ranks ({_shortened(ended)}); that "
        f"is right for models in which every rank uses every layer; --workload {name} requires it"
    )


def _siblings(report: CaseReport, reports: Sequence[CaseReport]) -> list[CaseReport]:
    """The other cases of the same code, called in the same way, in the same world."""
    case = report.case
    return [
        r
        for r in reports
        if r is not report
        and (r.case.siblings, r.case.adaptation) == (case.siblings, case.adaptation)
    ]


def _crashed(report: CaseReport) -> bool:
    """Whether ranks raised, and none ended in another way: killed, gone, or waiting."""
    ends = {o.outcome for o in report.outcomes} - {RankEnd.FINISHED, RankEnd.ENDED}
    return report.ranks_failed and ends == {RankEnd.RAISED}


def _error(report: CaseReport) -> str:
    """The error of the first rank that ended by itself, in one line."""
    first: Outcome = min(report.outcomes, key=lambda o: (RankEnd(o.outcome).place, o.rank))
    return _shortened(first.error or first.reason or first.last_call or first.outcome)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# -- schedules of a simulated world ----------------------------------------------------------------

_OF_ENDS = ("hang", "collective-mismatch", "unmatched-message")


def schedules_are_due(report: CaseReport) -> bool:
    """Whether schedules of a case are to be searched: where it passed, a failure is theirs; where
    its ranks did not finish, it may be that only buffers would save it.
    """
    passed = report.verdict != "fail"
    return bool(report.case.schedules) and not report.unfinished and (passed or report.ranks_failed)


def with_schedules(
    pool: Pool,
    report: CaseReport,
    *,
    description: bytes,
    data_fd: int | None,
    show: Callable[[str], None],
) -> CaseReport:
    """The report with the check `schedules`. Raises CannotRunError where they cannot be run."""
    case = report.case
    found = _search(pool, case, description, data_fd, show)
    replay = msgspec.structs.replace(case, schedules=0, preemptions=0).command_line
    result, causes = schedules.judged(found, ranks=case.world, digests=_digests, replay=replay)
    report = _with_contents(report, found)
    checks = (*report.checks, result)
    if report.verdict == "fail":  # the ranks' end is its failure, and the cause may be named better
        named = [c for c in report.diagnosis if not causes or c.cause not in _OF_ENDS]
        return msgspec.structs.replace(report, checks=checks, diagnosis=(*causes, *named))
    return msgspec.structs.replace(
        report,
        checks=checks,
        verdict=merge_verdicts([report.verdict, result.verdict]),
        diagnosis=(*report.diagnosis, *causes),
    )


def _with_contents(report: CaseReport, found: Searched) -> CaseReport:
    if report.contents is None:
        return report
    ended = max(found.ran - len(found.late), 0)
    contents = msgspec.structs.replace(report.contents, schedules=ended)
    return msgspec.structs.replace(report, contents=contents)


def _digests(result: bytes) -> tuple[str, ...]:
    found: tuple[str, ...] = DIGEST.decode(result)
    return found


def _search(
    pool: Pool,
    case: Case,
    description: bytes,
    data_fd: int | None,
    show: Callable[[str], None],
) -> Searched:
    ranks = Ranks(
        job=DIGEST,
        backend=case.backend,
        size=case.world,
        request=lambda meeting: DigestRequest(
            case=case, rendezvous=meeting, description=description
        ),
        deadline_s=case.deadline_s,
    )
    return search_schedules(
        pool,
        ranks,
        schedules=case.schedules,
        preemptions=case.preemptions,
        fds={} if data_fd is None else {"data": data_fd},
        on_progress=lambda ran: show(
            f"{case.strategy}, world {case.world}: schedule {ran} of at most {case.schedules}"
        ),
    )
