"""Runs that end before every case is judged: what they carry along, and the report of none."""

import contextlib
from collections.abc import Iterator, Sequence

from distcheck.errors import HelperError, RankLostError
from distcheck.records import Case, CaseReport, Origin, Report, RunPlan
from distcheck.verification.book import Book


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a verification; carries the report on what had been judged by then."""

    def __init__(self, report: Report) -> None:
        super().__init__("interrupted")
        self.report = report


class GivenUpError(HelperError):
    """The run lost what it needs; carries the report on what had been judged by then."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.given_up)
        self.report = report
        self.exit_code = report.given_up_as


@contextlib.contextmanager
def reported(book: Book) -> Iterator[None]:
    """Around the running of cases: whatever ends it takes along the report on what there is."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(book.report(interrupted=True)) from None
    except (HelperError, RankLostError) as error:
        raise GivenUpError(book.report(given_up=error)) from error


def nothing_judged(
    cases: Sequence[Case],
    reason: str,
    whole: RunPlan | None,
    origin: Origin,
    *,
    unfinished: bool = False,
) -> Report:
    """The report of a run that was given up before any rank of it began."""
    unknown = [
        CaseReport(
            case=case,
            strategy_file="",
            verdict="unknown",
            outcomes=(),
            checks=(),
            notes=(reason,),
            unfinished=unfinished,
        )
        for case in cases
    ]
    return Report(environment={}, cases=tuple(unknown), plan=whole, made=origin)
