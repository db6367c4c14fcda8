"""Reads reports from files, and checks that they are valid and consistent.

A verdict in a file is only a claim. It follows from the checks, the exit status of ranks and the
plan in the same file, so it is recomputed from these. A file that contradicts itself is damaged. So
is a file whose plan lacks cases of its own command line. (No reader can detect a file that was
changed consistently; keep reports where only your runs can write.)
"""

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from distcheck.errors import ExitCode, UsageError
from distcheck.records import (
    CaseReport,
    CheckResult,
    Difference,
    RunPlan,
    exit_code_of_report,
    merge_verdicts,
    verdict_of,
)
from distcheck.records.case import CELL
from distcheck.records.exit_status import RankEnd
from distcheck.records.expected_events import PURPOSE
from distcheck.records.layers import NO_LAYER
from distcheck.records.mistakes import SENSITIVITY
from distcheck.records.run_facts import ExploredSearch
from distcheck.reports.json_report import Document, check_shape, read_document, totals_of

_OUTCOME, _DATA, _INITIAL = "outcome", "data", "initial state"
# Planned for every case, in addition to its outcome; a guard only compares ranks.
_ALWAYS = (_DATA, _INITIAL, "gradients", "agreement")
_OF_A_GUARD = ("agreement",)
_OF_RANKS_ALONE = (_OUTCOME, SENSITIVITY)  # which count no tensors
_WITHOUT_TENSORS = (*_OF_RANKS_ALONE, _DATA, PURPOSE)
# Options of a command line, by their name in a planned case: those whose values all count, and
# those whose last value counts.
_SEVERAL = {"--strategy": "strategy", "--world": "world", "--workload": "workload"}
_LAST = {"--dtype": "dtype", "--backend": "backend", "--device": "device", "--seed": "seed"}
_MASKED = "<$"  # beginning of a masked secret
_MAY_BE_LEFT_OUT = "exact"  # by a dtype or accepted deviation without it
_WITH_PLAN = (["distcheck", "verify"], ["distcheck", "record"])  # commands that always have one


def read_report(path: Path) -> dict[str, Any]:
    """Read the document in a file. Raises UsageError if it is damaged or contradicts itself."""
    document = read_document(path)
    found = check_document(document, str(path))
    for problem in _missing(found):
        raise UsageError(f"{path} is damaged: {problem}; write the report again")
    return document


def check_document(document: dict[str, Any], name: str) -> Document:
    """Validate a document. Raises UsageError if it contradicts itself."""
    found = check_shape(document, name)
    for problem in _contradictions(found):
        raise UsageError(f"{name} is damaged: {problem}; write the report again")
    return found


def _contradictions(document: Document) -> Iterator[str]:
    for name, times in Counter(case.case.id for case in document.cases).items():
        if times > 1:
            yield f"case {name!r} is in it {times} times"
    for case in document.cases:
        for problem in _errors_in_case(case):
            yield f"case {case.case.id!r} {problem}"
    failed = {case.case.id for case in document.cases if case.verdict == "fail"}
    for one in document.explored:
        yield from _errors_in_search(one, document.plan)
        if (one.verdict == "fail") != bool(failed & set(one.found)):
            yield (
                f"the search of {one.strategy!r} has the verdict {one.verdict}, which does not "
                "follow from its cases"
            )
    verdict = verdict_of(document)
    if document.verdict != verdict:
        yield f"the report has the verdict {document.verdict}, but its cases give {verdict}"
    code = exit_code_of_report(document)
    allowed = {code, ExitCode.INTERRUPTED}
    if code in (
        ExitCode.PASS,
        ExitCode.UNKNOWN,
        ExitCode.INTERNAL,
    ):  # the report could not be saved
        allowed.add(ExitCode.CANNOT_RUN)
    if code == ExitCode.UNKNOWN:  # a process with ranks was lost before a case was judged
        allowed.add(ExitCode.RANK_FAILED)
    if document.exit_code not in allowed:
        yield f"the report has the exit code {document.exit_code}, but its cases give {int(code)}"
    yield from _errors_in_plan(document)
    yield from _errors_in_totals(document)


def _errors_in_totals(document: Document) -> Iterator[str]:
    """Yield errors in the totals. Failed cases do not count as left out."""
    totals = totals_of([case.verdict for case in document.cases], document.left_out)
    if document.totals is None and document.left_out:
        yield "it lists excluded cases but has no totals"
    if document.totals is not None and document.totals != totals:
        there, here = (
            ", ".join(f"{count} {name}" for name, count in counts.items())
            for counts in (document.totals, totals)
        )
        yield f"its totals are {there}, but its cases give {here}"


def _errors_in_search(one: ExploredSearch, plan: RunPlan | None) -> Iterator[str]:
    searches = () if plan is None else plan.searches
    if one.strategy not in {search.strategy for search in searches}:
        yield f"it searched for a failure of {one.strategy!r}, which is not in its plan"
    if one.verdict == "pass" and not 0 < one.passed <= one.cases:
        yield (
            f"a search of {one.strategy!r} passed, but only {one.passed} of its {one.cases} "
            "cases did"
        )


def _errors_in_case(case: CaseReport) -> Iterator[str]:
    if case.replay and not _is_command(case.replay):
        yield "has a replay that is not a single distcheck command"
    verdict = merge_verdicts([check.verdict for check in case.checks])
    if case.verdict != verdict:
        yield f"has the verdict {case.verdict}, but its checks give {verdict}"
    ended = {check.verdict for check in case.checks if check.check == _OUTCOME}
    ranks = sorted(outcome.rank for outcome in case.outcomes)
    finished = all(outcome.outcome == RankEnd.FINISHED for outcome in case.outcomes)
    if "pass" in ended and not (finished and ranks == list(range(case.case.world))):
        yield f"passed its outcome check, although not all {case.case.world} ranks finished"
    if case.ranks_failed and ended and "fail" not in ended:
        yield "has a rank that did not finish, but no failed outcome check"
    for check in case.checks:
        if problem := _wrong_bound(check):
            yield f"has a bound in its check {check.check!r} that {problem}"
    if case.verdict != "fail" and case.diagnosis:
        yield f"has the cause {case.diagnosis[0].cause!r}, although it did not fail"
    if case.verdict == "pass":
        yield from _errors_in_pass(case, ended)


def _errors_in_pass(case: CaseReport, ended: Collection[str]) -> Iterator[str]:
    """Yield errors in a passing case. A pass needs the checks of every case, a nonempty comparison
    in each, and no error beyond its bound.
    """
    if not ended:
        yield "passed without an outcome check"
    there = {check.check for check in case.checks}
    for name in _OF_A_GUARD if case.case.workload == "job" and case.case.id == "guard" else _ALWAYS:
        if name not in there:
            yield f"passed without the check {name!r}, which every case has"
    for check in case.checks:
        if check.first is not None or (check.worst is not None and _is_beyond(check.worst)):
            yield f"passed the check {check.check!r}, although an error exceeds its bound"
        if less := _compared_too_little(case, check):
            yield f"passed the check {check.check!r}, although it compared {less}"


def _compared_too_little(case: CaseReport, check: CheckResult) -> str:
    """Return a description of coverage that a passing check lacks, as far as its case implies that
    coverage.
    """
    seen = check.compared
    if not any(msgspec.structs.astuple(seen)):
        return "nothing"
    if check.check in (_OUTCOME, _INITIAL) and seen.ranks != case.case.world:
        return f"{seen.ranks} of {case.case.world} ranks"
    # By a layer, a job's data is the content of samples, which two ranks show if both have one.
    if (check.check, check.layer) == (_DATA, NO_LAYER) and seen.steps != case.case.steps:
        return f"{seen.steps} of {case.case.steps} steps"
    needed = ["ranks"]
    needed += [] if check.check in _OF_RANKS_ALONE else ["elements", "steps"]
    needed += [] if check.check in _WITHOUT_TENSORS else ["tensors"]
    return next((f"no {name}" for name in needed if not getattr(seen, name)), "")


def _is_beyond(worst: Difference) -> bool:
    error, bound = float(worst.error), float(worst.bound)
    return not 0 <= error <= bound


def _wrong_bound(check: CheckResult) -> str:
    """Return a description of an invalid bound. Nothing is within an infinite or NaN bound, so a
    pass has no such bound. A failure may have one, if the reference overflows.
    """
    bounds = [float(place.bound) for place in (check.worst, check.first) if place is not None]
    if any(bound < 0 for bound in bounds):
        return "is below zero"
    if check.verdict == "pass" and not all(map(math.isfinite, bounds)):
        return "is not a finite number, although it passed"
    return ""


def _is_command(text: str) -> bool:
    """Return True if a text is a single distcheck command. Users paste it into their shell."""
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    return words[:1] == ["distcheck"] and shlex.join(words) == text


def _errors_in_plan(document: Document) -> Iterator[str]:
    if document.plan is not None:
        yield from _differences_from_plan(document, document.plan)
        yield from _not_planned(document, document.plan)
    elif document.made is not None and document.made.command.split()[:2] in _WITH_PLAN:
        yield "its command line plans cases, but it has no plan"


def _differences_from_plan(document: Document, plan: RunPlan) -> Iterator[str]:
    planned = {cell.id: cell for cell in plan.cases}
    if len(planned) < len(plan.cases):
        yield "the plan holds a case twice"
    for case in (report.case for report in document.cases):
        cell = planned.get(case.id)
        for name in () if cell is None else CELL:
            if getattr(case, name) != getattr(cell, name):
                yield (
                    f"case {case.id!r} has the {name} {getattr(case, name)!r}, but "
                    f"{getattr(cell, name)!r} in the plan"
                )
    if plan.shard > plan.shards:
        yield f"the report is part {plan.shard} of {plan.shards}"
    for name in [*(case.case.id for case in document.cases), *document.left_out]:
        cell = planned.get(name)
        if cell is not None and not plan.holds(name):
            part = plan.assigned.get(name, 1)
            yield f"the report is part {plan.shard}, but has case {name!r} of part {part}"
    known = {case.case.id for case in document.cases}
    for name in document.left_out:
        if name in known:
            yield f"case {name!r} is in the report, but is also listed as left out"
        elif name not in planned:
            yield f"case {name!r} is listed as left out, but is not in the plan"


def _missing(document: Document) -> Iterator[str]:
    """Yield planned items that a passing report lacks. (A merge of parts adds them as unknown.)"""
    plan = document.plan
    if plan is None or document.exit_code != ExitCode.PASS:
        return
    there = {case.case.id for case in document.cases} | document.left_out.keys()
    for cell in plan.cases:
        if plan.holds(cell.id) and cell.id not in there:
            yield f"the report passed, but case {cell.id!r} of its plan is not in it"
    searched = {one.strategy for one in document.explored}
    for search in plan.searches:
        if plan.shard in (0, search.shard) and search.strategy not in searched:
            yield f"the report passed, but the search of {search.strategy!r} is not in it"


def _not_planned(document: Document, plan: RunPlan) -> Iterator[str]:
    for made in (document.made, *(part.made for part in document.parts or ())):
        if made is not None:
            yield from not_in_plan(made.command, plan)


def not_in_plan(command: str, plan: RunPlan) -> Iterator[str]:
    """Yield requests of `command` that `plan` lacks. Only options on the command line are compared,
    not those of a matrix file or defaults. The plan may contain further cells and searches.
    """
    typed = _typed_values(command)
    named = {name: typed[option] for option, name in _SEVERAL.items() if option in typed}
    named |= {name: typed[option][-1:] for option, name in _LAST.items() if option in typed}
    cells = [{name: str(getattr(cell, name)) for name in named} for cell in plan.cases]
    for values in product(*map(dict.fromkeys, named.values())):
        wanted = dict(zip(named, values, strict=True))
        if wanted not in cells and wanted.get("workload") != _MAY_BE_LEFT_OUT:
            words = ", ".join(f"{name} {value}" for name, value in wanted.items())
            yield f"its command line asks for {words}, but the plan has no such case"


def _typed_values(command: str) -> dict[str, list[str]]:
    """Return the values of the options above, as far as they can be parsed reliably."""
    try:
        words = shlex.split(command)
    except ValueError:
        return {}
    if words[:2] != ["distcheck", "verify"]:
        return {}
    found: dict[str, list[str]] = defaultdict(list)
    for option, value in _option_values(words[2:]):
        found[option].append(value)
    return {
        option: values
        for option, values in found.items()
        if not any(_MASKED in value for value in values)
    }


def _option_values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for at, word in enumerate(words):
        option, _, value = word.partition("=")
        if option not in _SEVERAL and option not in _LAST:
            continue
        if option != word:
            yield option, _normalize_number(value)
        elif at + 1 < len(words):
            yield option, _normalize_number(words[at + 1])


def _normalize_number(value: str) -> str:
    """Return a number in the form that a plan uses: 4 for 04."""
    try:
        return str(int(value))
    except ValueError:
        return value
