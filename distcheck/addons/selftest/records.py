"""Plan and results of a selftest. This module does not import torch."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from distcheck.errors import ExitCode
from distcheck.records import CaseReport, Report
from distcheck.records.layers import check_with_layer
from distcheck.worlds.jobs import Job

Naming = Literal["right", "wrong", "unexplained", "-"]
Verdict = Literal["caught", "missed", "passed", "false positive", "left out", "unknown"]
_UNEXPLAINED = "unexplained"


class ListedMutant(msgspec.Struct, frozen=True, kw_only=True):
    """A mutant and its expected results.

    asked    the arguments of `distcheck.verify` that run the mutant
    caught   the (check, layer) pairs that must fail, over all cases of the run; empty if any may
             fail
    causes   the causes that the diagnosis may report
    processes       True if the bug shows only if ranks are processes
    when_simulated  the permitted causes in a simulated world, in which any check may fail; empty if
                    they are the same
    """

    name: str
    file: str
    asked: dict[str, Any]
    caught: tuple[tuple[str, str], ...]
    causes: tuple[str, ...]
    processes: bool = False
    when_simulated: tuple[str, ...] = ()


class Zoo(msgspec.Struct, frozen=True, kw_only=True):
    """All mutants and correct strategies; (name, reason) of those that cannot run here."""

    mutants: tuple[ListedMutant, ...]
    strategies: tuple[str, ...]
    elsewhere: tuple[tuple[str, str], ...] = ()


LIST = Job("distcheck.addons.selftest.command:list_zoo", bytes, Zoo)


class SelftestVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one mutant or one correct case.

    `checks` are the checks that failed. For a mutant, `as_listed` is True if exactly the listed
    checks failed. `detail` is a message for the user, and `replay` is the command that reproduces
    an unexpected result.
    """

    kind: Literal["mutant", "correct"]
    name: str
    file: str = ""
    verdict: Verdict = "unknown"
    checks: tuple[tuple[str, str], ...] = ()
    as_listed: bool = True
    causes: tuple[str, ...] = ()
    naming: Naming = "-"
    detail: str = ""
    replay: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """True if the result is the expected one."""
        return self.verdict in ("caught", "passed", "left out") and self.naming != "wrong"


class DetectionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of the detection table."""

    planted: int
    caught: int
    missed: int
    named_right: int
    named_wrong: int
    unexplained: int
    correct: int
    passed: int
    false_positives: int
    left_out: int  # correct cases that their strategy or the backend cannot run
    unknown: int  # planned mutants or correct cases without a verdict

    @property
    def exit_code(self) -> ExitCode:
        """Exit code: a mismatch if a mutant was missed, a wrong cause was named, or correct code
        failed.
        """
        if self.missed or self.named_wrong or self.false_positives:
            return ExitCode.MISMATCH
        nothing = self.caught + self.passed == 0
        return ExitCode.UNKNOWN if self.unknown or nothing else ExitCode.PASS


def detection_counts(
    rows: Sequence[SelftestVerdict], *, planted: int, correct: int
) -> DetectionCounts:
    """Return the totals. A planned case without a row is unknown; an excluded mutant is not
    planned.
    """

    def of(kind: str, **wanted: str) -> int:
        matching = [r for r in rows if r.kind == kind]
        return sum(all(getattr(r, n) == value for n, value in wanted.items()) for r in matching)

    caught, missed = of("mutant", verdict="caught"), of("mutant", verdict="missed")
    passed = of("correct", verdict="passed")
    false_positives = of("correct", verdict="false positive")
    left_out = of("correct", verdict="left out")
    planted -= of("mutant", verdict="left out")
    return DetectionCounts(
        planted=planted,
        caught=caught,
        missed=missed,
        named_right=of("mutant", naming="right"),
        named_wrong=of("mutant", naming="wrong"),
        unexplained=of("mutant", naming="unexplained"),
        correct=correct,
        passed=passed,
        false_positives=false_positives,
        left_out=left_out,
        unknown=planted - caught - missed + correct - passed - false_positives - left_out,
    )


def judge_mutant(planted: ListedMutant, report: Report, *, seconds: float = 0.0) -> SelftestVerdict:
    """Return the verdict on a mutant: caught if a check of its run failed, missed if all passed."""
    results = [result for case in report.cases for result in case.checks]
    failed = dict.fromkeys((r.check, r.layer) for r in results if r.verdict == "fail")
    causes = dict.fromkeys(found.cause for case in report.cases for found in case.diagnosis)
    verdict: Verdict = {"fail": "caught", "pass": "missed", "unknown": "unknown"}[report.verdict]  # type: ignore[assignment]
    as_listed = not planted.caught or set(failed) == set(planted.caught)
    naming = judge_named_causes(set(causes), set(planted.causes)) if verdict == "caught" else "-"
    return SelftestVerdict(
        kind="mutant",
        name=planted.name,
        file=planted.file,
        verdict=verdict,
        checks=tuple(failed),
        as_listed=as_listed,
        causes=tuple(causes),
        naming=naming,
        detail=_why_not_as_expected(planted, report, as_listed=as_listed, naming=naming),
        replay=next((case.replay for case in report.cases), ""),
        seconds=round(seconds, 3),
    )


def judge_named_causes(found: set[str], allowed: set[str]) -> Naming:
    """Return "right" if every reported cause is permitted, "wrong" if one is not, and "unexplained"
    if none is reported. (`unexplained` itself is not a cause.)
    """
    named = found - {_UNEXPLAINED}
    if not named:
        return "unexplained"
    return "right" if named <= allowed else "wrong"


def judge_correct(case: CaseReport) -> SelftestVerdict:
    """Return the verdict on a correct case. A failed check is a false positive."""
    verdict: Verdict = {"fail": "false positive", "pass": "passed", "unknown": "unknown"}[
        case.verdict
    ]  # type: ignore[assignment]
    wrong = [r for r in case.checks if r.verdict != "pass"]
    return SelftestVerdict(
        kind="correct",
        name=case.case.id,
        file=case.case.strategy,
        verdict=verdict,
        checks=tuple((r.check, r.layer) for r in wrong if r.verdict == "fail"),
        causes=tuple(found.cause for found in case.diagnosis),
        detail="; ".join(f"{r.check} {r.layer}: {r.verdict} {r.reason}" for r in wrong),
        replay=case.replay,
    )


def _why_not_as_expected(
    planted: ListedMutant, report: Report, *, as_listed: bool, naming: str
) -> str:
    parts = []
    if report.verdict != "fail":
        unknown = [r for case in report.cases for r in case.checks if r.verdict == "unknown"]
        parts += [f"{r.check} {r.layer}: {r.reason}" for r in unknown[:1]]
    elif not as_listed:
        parts.append(f"listed with {format_checks(planted.caught)}")
    if naming == "unexplained" and _UNEXPLAINED not in planted.causes:
        parts.append(f"could be named {', '.join(planted.causes)}")
    if naming == "wrong":
        evidence = [d.evidence for case in report.cases for d in case.diagnosis]
        parts.append(f"may be named {', '.join(planted.causes)}; the evidence was: {evidence[0]}")
    return "; ".join(parts)


def format_checks(pairs: Sequence[tuple[str, str]]) -> str:
    """Format checks with their layers, such as "gradients (rounding, full batch float32),
    agreement".
    """
    layers: dict[str, list[str]] = {}
    for check, layer in pairs:
        layers.setdefault(check, []).append(layer)
    return ", ".join(check_with_layer(check, ", ".join(found)) for check, found in layers.items())
