"""Turns the results of a case's ranks and judges into its report."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from distcheck.errors import InternalError
from distcheck.judge import acceptance, diagnosis, sensitivity
from distcheck.judge.checks.merging import (
    earliest_failure,
    merge_results,
    move_excuse_to_reason,
    require_coverage,
)
from distcheck.judge.diagnosis import state
from distcheck.judge.diagnosis.parts import dtype_rounded_to
from distcheck.recordings.traces.layout import OUTPUTS
from distcheck.records import (
    Case,
    CaseReport,
    CheckResult,
    Compared,
    FindingKind,
    Outcome,
    PlannedCheck,
    merge_verdicts,
)
from distcheck.records.exit_status import RankEnd
from distcheck.records.expected_events import PURPOSE
from distcheck.records.layers import BITWISE, IN_FLOAT64, NO_OUTPUTS, ROUNDING
from distcheck.records.ledger import relative
from distcheck.records.mistakes import SENSITIVITY
from distcheck.records.run_facts import DIFFERS
from distcheck.verification import contents
from distcheck.verification.case_run import CaseRun
from distcheck.verification.process_state import with_source_text
from distcheck.workloads.cells import CELLS

# settings and versions that the bits of a floating-point computation depend on
_BIT_SETTINGS = (
    "torch", "cpu", "cpu_capability", "machine", "threads", "mkldnn", "float32_matmul_precision",
    "tf32", "gpu", "cuda", "cudnn",
)  # fmt: skip


def build_case_report(run: CaseRun, *, replay: str, elsewhere: str = "") -> CaseReport:
    """Return the report of a finished or interrupted case. `elsewhere` is the result of
    `recorded_elsewhere` for the traces of the case.
    """
    outcomes = _deciding_outcomes(run)
    results = _mark_consequences(_allow_for(elsewhere, _results(run, outcomes)))
    results, together = _without_empty_agreement(results)
    results, not_given = _without_outputs(results)
    verdict = merge_verdicts([result.verdict for result in results])
    failed = {(result.check, result.layer) for result in results if result.verdict == "fail"}
    found = diagnosis.diagnose(
        () if run.defect else outcomes,
        results,
        run.seen,
        run.separation,
        accept=run.case.accept,
    )
    if (like := run.like) is not None:
        found = diagnosis.diagnose(like.outcomes, like.results, like.seen, accept=like.case.accept)
    return CaseReport(
        rounded_to=dtype_rounded_to(run.seen)
        if run.seen and failed == {("gradients", IN_FLOAT64)}
        else "",
        case=run.case,
        strategy_file=run.facts.strategy_file,
        strategy_line=run.facts.strategy_line,
        verdict=verdict,
        outcomes=tuple(outcomes),
        checks=tuple(results),
        diagnosis=tuple(found),
        where=with_source_text(
            diagnosis.line_of_first_wrong(found, results, run.seen) if run.seen else None,
            run.facts.strategy_file,
        ),
        timings_s={name: round(spent, 3) for name, spent in run.timings_s.items()},
        replay=replay,
        remarks=tuple(state.warn_of_shared_rng(results)),
        ledger=run.ledger and relative(run.ledger),
        accepted=acceptance.describe_acceptance(run.case),
        contents=contents.contents_of(run.case, run.facts, results, surroundings=run.surroundings),
        notes=(
            *run.notes,
            *filter(None, [elsewhere, together, not_given]),
            *_about_cell(run.case, results),
            *_taken_from(run),
        ),
    )


def _taken_from(run: CaseRun) -> list[str]:
    """Return a note on the case that the causes come from, if it is of another workload."""
    if run.like is None or run.like.case.workload == run.case.workload:
        return []
    case, like = (f"{one.case.workload} {one.case.dtype}" for one in (run, run.like))
    return [
        f"{case}: not diagnosed separately; it has the causes of {like}, where the same check "
        "fails at the same step"
    ]


def _without_empty_agreement(results: Sequence[CheckResult]) -> tuple[list[CheckResult], str]:
    """Return the results without an `agreement` that could not have failed, and its reason: if
    ranks unshard everything collectively, there are no replicas to compare.
    """
    for result in results:
        empty = not result.compared.elements and result.insensitive.elements
        if result.check == "agreement" and result.verdict == "pass" and empty:
            return [other for other in results if other is not result], result.reason
    return list(results), ""


def _without_outputs(results: Sequence[CheckResult]) -> tuple[list[CheckResult], str]:
    """Return the results without those of `outputs` if no rank gave any at any step, and a note."""
    empty = [
        result
        for result in results
        if result.check == OUTPUTS
        and result.verdict == "unknown"
        and not result.compared.elements
        and FindingKind.NO_OUTPUTS in result.kinds
    ]
    return [result for result in results if result not in empty], NO_OUTPUTS if empty else ""


def _about_cell(case: Case, results: Sequence[CheckResult]) -> list[str]:
    """Return the purpose of a cell that did not pass; if only its events are missing, the number of
    steps that it takes.
    """
    workload = case.workload
    wrong = {result.check for result in results if result.verdict != "pass"}
    if workload not in CELLS or not wrong:
        return []
    if wrong == {PURPOSE}:
        own = CELLS[workload].steps
        few = f"{workload} trains {own} steps by default, but this run took {case.steps}"
        return [f"{few}; remove --steps"] if case.steps < own else []
    return [
        f"{workload} is a cell: {CELLS[workload].about}; if your code does not need to support "
        f"this, pass --without {workload} or decline it in the contract"
    ]


def machine_differences(recorded: Mapping[str, object], here: Mapping[str, object]) -> str:
    """Return differences from the recording machine that bits may depend on, or ""."""
    other = [
        f"{name} {recorded.get(name)} there, {here.get(name)} here"
        for name in _BIT_SETTINGS
        if recorded.get(name) != here.get(name)
    ]
    if not other:
        return ""
    return (
        f"recorded elsewhere ({'; '.join(other)}): results computed here may not be bit-identical"
    )


def _allow_for(elsewhere: str, results: Sequence[CheckResult]) -> list[CheckResult]:
    """Turn failures against bits computed here into unknown for traces of another machine.

    This concerns the bitwise layer, the initial state, and the rounding bound, whose bound covers
    summing and dividing the ranks' own gradients, while the reference has those of this machine's
    kernels. Comparisons between ranks, the exact sums of integers, and the full batch, whose bound
    covers another order of computation, stand.
    """
    return [
        _with_note(msgspec.structs.replace(result, verdict="unknown"), elsewhere)
        if elsewhere
        and result.verdict == "fail"
        and (result.layer in (BITWISE, ROUNDING) or result.check == "initial state")
        else result
        for result in results
    ]


def _deciding_outcomes(run: CaseRun) -> Sequence[Outcome]:
    if any(o.outcome != RankEnd.FINISHED for o in run.rerun_outcomes):
        where = (
            "in the rerun in separate interpreters" if run.surroundings.factors else "in the rerun"
        )
        return [
            msgspec.structs.replace(o, run=where) if o.outcome != RankEnd.FINISHED else o
            for o in run.rerun_outcomes
        ]
    return run.outcomes


def _results(run: CaseRun, outcomes: Sequence[Outcome]) -> list[CheckResult]:
    parts: dict[tuple[str, str], list[CheckResult]] = defaultdict(list)
    for result in run.results:
        parts[result.check, result.layer].append(result)
    results: list[CheckResult] = []
    for planned in run.planned:
        if planned.scope == "front":
            if planned.check == SENSITIVITY:
                why = run.not_run or _why_not_judged(outcomes)
                shown = sensitivity.judge_sensitivity(run.case, results, if_none=why)
                results.append(require_coverage(shown, planned.required))
            else:
                results.append(
                    _with_note(_outcome_check(planned, outcomes, run.defect), run.not_run)
                )
            continue
        found = parts.get((planned.check, planned.layer))
        if found:
            found.sort(key=lambda part: part.first.step if part.first else 0)
            merged = move_excuse_to_reason(merge_results(found))
        else:
            merged = CheckResult(
                check=planned.check,
                layer=planned.layer,
                verdict="unknown",
                reason=run.not_run or _why_not_judged(outcomes),
            )
        if planned.check == "rerun":
            merged = _of_rerun(run, merged)
        held = sensitivity.unknown_if_insensitive(require_coverage(merged, planned.required))
        held = _with_note(held, planned.note)
        results.append(_of_what_was_accepted(run.case, held))
    return results


def _of_rerun(run: CaseRun, result: CheckResult) -> CheckResult:
    """Add to a result of the rerun its surroundings, and that a harmless difference passes."""
    note = run.rerun_in
    if run.separation is not None and run.separation.harmless and result.verdict == "fail":
        result = msgspec.structs.replace(result, verdict="pass")
        factor = run.separation.factors[0]
        note += f"{DIFFERS}, caused only by {factor}, and every check passes as well"
    return _with_note(result, note) if result.verdict != "unknown" else result


def _of_what_was_accepted(case: Case, result: CheckResult) -> CheckResult:
    """Turn a pass for an accepted deviation that never occurred into unknown."""
    if (result.check, result.layer, result.verdict) != ("gradients", ROUNDING, "pass"):
        return result
    why = acceptance.why_nothing_was_accepted(case, result.kinds)
    return _with_note(msgspec.structs.replace(result, verdict="unknown"), why) if why else result


def _mark_consequences(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Note on failures that begin after the first one that they may follow from it.

    Every step is judged from the ranks' own state, but ranks that have diverged have no common
    loss; and workload `exact` trains from its own start.
    """
    cause = earliest_failure(results)
    if cause is None or cause.first is None:
        return list(results)
    return [
        _with_note(
            result,
            f"begins after {cause.check} had diverged at step {cause.first.step}, and may follow "
            "from it",
        )
        if result is not cause and _may_follow(result, cause)
        else result
        for result in results
    ]


def _may_follow(result: CheckResult, cause: CheckResult) -> bool:
    if result.verdict != "fail" or result.first is None or cause.first is None:
        return False
    both_exact = result.layer == cause.layer == "exact"
    return result.first.step > cause.first.step or (both_exact and result.check != cause.check)


def _outcome_check(
    planned: PlannedCheck, outcomes: Sequence[Outcome], defect: InternalError | None
) -> CheckResult:
    failed = [o for o in outcomes if o.outcome != RankEnd.FINISHED]
    result = CheckResult(
        check=planned.check,
        layer=planned.layer,
        verdict="fail" if failed else "pass" if outcomes else "unknown",
        compared=Compared(ranks=len(outcomes)),
        reason="; ".join(f"rank {o.rank} {o.outcome}" for o in failed),
    )
    if defect is not None:  # says nothing about the strategy
        rank = f"rank {failed[0].rank}" if failed else "a rank"
        result = msgspec.structs.replace(
            result,
            verdict="unknown",
            reason=f"internal error in {rank}: {defect}; this is a bug in distcheck, and the "
            "case was not judged",
            defect=defect.traceback,
        )
    return require_coverage(result, planned.required)


def _why_not_judged(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "not judged: interrupted"
    if any(o.outcome != RankEnd.FINISHED for o in outcomes):
        return "not judged: the ranks finished no step"
    return "not judged"


def _with_note(result: CheckResult, note: str) -> CheckResult:
    if not note:
        return result
    reason = "; ".join(filter(None, [note, result.reason]))
    return msgspec.structs.replace(result, reason=reason, lead=note)
