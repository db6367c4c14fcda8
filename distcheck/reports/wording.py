"""Phrases that all formats share."""

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from distcheck.records import (
    AcceptedChanges,
    CallSite,
    CaseReport,
    CheckResult,
    Difference,
    ExploredSearch,
    Number,
    VerdictName,
)
from distcheck.records.mistakes import (
    SENSITIVITY,
    RevealedMistakes,
    describe_revealed_mistakes,
    smallest_revealed_scale_errors,
)
from distcheck.records.run_facts import ModuleComparison

STYLE: dict[VerdictName, str] = {"pass": "bold green", "unknown": "bold yellow", "fail": "bold red"}


def describe_place(difference: Difference) -> str:
    """Format a difference with its place: "step 0, fc.weight[3,1], rank 2: got ...,
    expected ...".
    """
    where = difference.place
    if difference.unit == "":
        if difference.actual == "" and difference.expected == "":
            return where
        return f"{where}: got {show(difference.actual)}, expected {show(difference.expected)}"
    what = "norm " if difference.unit == "L2 norm" else ""
    ulp = "" if difference.ulp is None else f" ({difference.ulp:,} ULP)"
    return (
        f"{where}: got {what}{show(difference.actual)}, expected {show(difference.expected)}, "
        f"error {show(difference.error)}{ulp}, bound {show(difference.bound)}"
    )


def describe_site(site: CallSite | None, strategy_file: str) -> str:
    """Format the line of code of a cause and its text, relative to the strategy's folder; "" if
    there is none.
    """
    if site is None:
        return ""
    if not site.file:
        return "no collective or message used it"
    path, folder = PurePath(site.file), PurePath(strategy_file).parent
    inside = strategy_file != "" and path.is_relative_to(folder)
    place = f"{path.relative_to(folder) if inside else path}:{site.line}"
    return f"{place}  {site.code}".rstrip()


def describe_worst(result: CheckResult) -> tuple[str, str]:
    """Format the largest error and its bound, in the same unit; "identical" for bitwise
    comparisons.
    """
    worst = result.worst
    if worst is None and result.check != SENSITIVITY:
        same = result.compared.elements and result.verdict == "pass"
        return "identical" if same else "", ""
    if worst is None or result.check == SENSITIVITY or worst.unit == "":
        return "", ""
    if worst.bound == 0:
        return f"{float(worst.error):.2g}", "0"
    unit = " L2" if worst.unit == "L2 norm" else ""
    return f"{float(worst.error):.1e}", f"{float(worst.bound):.1e}{unit}"


def advice_lines(suggestion: str) -> list[tuple[str, str]]:
    """Split a suggestion into a labeled line for each situation: "divide once; if ..., reduce
    once".
    """
    first, *others = re.split(r"; (?:or, )?(?=if )", suggestion)
    return [("try", first), *(("or", one) for one in others)] if first else []


def sentence_on_modules(found: ModuleComparison) -> str:
    """Return a sentence about the first wrong module, and about modules that were not recorded."""
    said = [found.first]
    if found.compiled:
        names = ", ".join(name or "the model" for name in found.compiled[:3])
        more = f" and {len(found.compiled) - 3} more" if len(found.compiled) > 3 else ""
        said.append(
            f"modules inside {names}{more} were not recorded, because torch.compile compiled them"
        )
    if found.left_out:
        said.append(f"{found.left_out} further module calls of a step were not recorded")
    return "; ".join(said)


def describe_accepted(allowance: AcceptedChanges) -> str:
    """Format an accepted deviation: the expectation that replaces the default, and the properties
    that are no longer checked.
    """
    lost = "; ".join(allowance.not_owed)
    return f"accepted: {allowance.kind} {allowance.widened}; not checked: {lost}"


def describe_sensitivity(cases: Sequence[CaseReport]) -> Iterator[str]:
    """Yield the mistakes that passing cases would have revealed, over the tensors of all cases (the
    JSON document has each case). If an accepted deviation limits them, there is a sentence per
    case.
    """
    together: dict[str, RevealedMistakes] = {}
    ranks, factors = 0, dict[str, float]()
    for case in cases:
        for result in case.checks:
            if result.check != SENSITIVITY or result.verdict != "pass":
                continue
            if case.case.accept is not None:
                yield f"{SENSITIVITY}: {case.case.workload} {case.case.dtype}: {result.reason}"
                continue
            ranks, dtype = len(case.case.with_data), case.case.dtype
            for name, one in result.shown.items():
                taken = name in together
                together[f"{name} ({case.case.id})" if taken else name] = one
            found = smallest_revealed_scale_errors(result.shown)
            if found is not None:
                factors[dtype] = max(found[1], factors.get(dtype, 0.0))
    if not together:
        return
    text = f"{SENSITIVITY}: {describe_revealed_mistakes(together, ranks=ranks)}"
    if factors:
        least = ", ".join(f"{factor:.1e} in {dtype}" for dtype, factor in factors.items())
        text += (
            "; every tensor that can reveal a wrong scale would have revealed one that is off "
            f"by {least} or more"
        )
    yield text


def format_count(number: int) -> str:
    """Format a large number: 768, 3.6 M."""
    for size, letter in ((10**9, "G"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:,}"


def show(value: Number) -> str:
    """Format a number with nine digits, which float32 needs; return a word unchanged."""
    return value if isinstance(value, str) else f"{value:.9g}"


_TELLS_LITTLE = {"crash": 1, "unexplained": 2}


def most_telling_first(cases: Sequence[CaseReport]) -> list[CaseReport]:
    """Sort cases: first those with a named cause, then crashes, then unexplained failures. One
    mistake may appear in several cases and be recognizable in only some of them.
    """

    def little(case: CaseReport) -> int:
        told = (_TELLS_LITTLE.get(found.cause, 0) for found in case.diagnosis)
        return min(told, default=_TELLS_LITTLE["unexplained"])

    return sorted(cases, key=little)


def describe_search(explored: ExploredSearch) -> str:
    if not explored.cases:
        return f"explore: {explored.strategy}: {explored.reason}"
    found = "found a failure" if explored.verdict == "fail" else "found nothing"
    text = (
        f"explore: {explored.strategy}: {found} in {explored.cases} cases, worlds 1 to "
        f"{explored.most_world}, up to {explored.most_steps} steps; {explored.spent_s:.0f} s of "
        f"{explored.budget_s:g} s, seed {explored.seed}"
    )
    if explored.insensitive:
        text += f"; {explored.insensitive} cases could not have revealed every simple mistake"
    text += "".join(f"; {word} was excluded: {why}" for word, why in explored.left_out.items())
    return "; ".join(filter(None, [text, explored.reason]))
