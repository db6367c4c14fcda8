"""The schedules of a case in simulation: runs them, and adds to its report what they show."""

from collections.abc import Callable

import msgspec

from distcheck.judge import schedules
from distcheck.records import Case, CaseReport, merge_verdicts
from distcheck.records.schedules import Searched
from distcheck.training.jobs import DIGEST, DigestRequest
from distcheck.worlds.launch import Ranks, search_schedules
from distcheck.worlds.pool import Pool

_OF_ENDS = ("hang", "collective-mismatch", "unmatched-message")


def is_due(report: CaseReport) -> bool:
    """Whether schedules of a case are to be searched: where it passed, a failure is theirs; where
    its ranks did not finish, it may be that only buffers would save it.
    """
    passed = report.verdict != "fail"
    return bool(report.case.schedules) and not report.unfinished and (passed or report.ranks_failed)


def searched(
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
    replay = msgspec.structs.replace(case, schedules=0, switches=0).command_line
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
        switches=case.switches,
        fds={} if data_fd is None else {"data": data_fd},
        on_progress=lambda ran: show(
            f"{case.strategy}, world {case.world}: schedule {ran} of at most {case.schedules}"
        ),
    )
