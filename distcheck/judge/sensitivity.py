"""Derives the verdict of a passing case from its sensitivity. Does not import torch.

If, for some rank, no tensor at any step would have revealed a mistake, the case did not test for
that mistake. It is then `unknown`, however much was compared.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from distcheck.records import Case, CheckResult, Compared, FindingKind, VerdictName
from distcheck.records.mistakes import (
    MISTAKES,
    SENSITIVITY,
    RevealedMistakes,
    describe_revealed_mistakes,
    joined_list,
    merge_two_revealed_mistakes,
    smallest_revealed_scale_errors,
)

_NOTHING_COUNTS = (
    "nothing counts as compared: no tensor could have revealed any of the simplest mistakes"
)
_ALONE = (
    "a single rank has nothing to synchronize, so even a missing sync would pass; pass --world 2 "
    "or more"
)


def judge_sensitivity(case: Case, results: Sequence[CheckResult], *, if_none: str) -> CheckResult:
    """Check that each simple mistake would be revealed; `if_none`: nothing was compared."""
    if case.world == 1:
        return CheckResult(check=SENSITIVITY, layer="-", verdict="unknown", reason=_ALONE)
    found = [result for result in results if result.shown]
    shown = _merge_layers(found)
    if not shown:
        return CheckResult(check=SENSITIVITY, layer="-", verdict="unknown", reason=if_none)
    missing = list(_missing(case, shown))
    counting = [result for result in found if result.compared.tensors]
    verdict: VerdictName = "unknown" if missing else "pass"
    return CheckResult(
        check=SENSITIVITY,
        layer="-",
        verdict=verdict,
        compared=Compared(
            tensors=sum(one.counts for one in shown.values()),
            elements=max((result.compared.elements for result in counting), default=0),
            ranks=max((result.compared.ranks for result in counting), default=0),
            steps=max((result.compared.steps for result in counting), default=0),
        ),
        reason="; ".join(missing) if missing else _describe(case, shown),
        shown=shown,
    )


def unknown_if_insensitive(result: CheckResult) -> CheckResult:
    """Change a pass to unknown if no mistake could have failed the check."""
    if result.verdict != "pass" or not result.shown or result.compared.tensors:
        return result
    reason = f"{_NOTHING_COUNTS} ({_why_insensitive(list(result.shown.values()))})"
    return msgspec.structs.replace(
        result,
        verdict="unknown",
        reason="; ".join(filter(None, [reason, result.reason])),
        lead=reason,
        kinds=(FindingKind.NOTHING_COUNTS, *result.kinds),
    )


def only_unrevealed_mistakes(results: Sequence[CheckResult]) -> str:
    """Return the unrevealed mistakes if they are the only reason that a case does not pass. Return
    "" if a check failed, or is unknown for a different reason.
    """
    lacking = [result for result in results if result.verdict != "pass"]
    for result in lacking:
        insensitive = result.check == SENSITIVITY or FindingKind.NOTHING_COUNTS in result.kinds
        if result.verdict != "unknown" or not insensitive:
            return ""
    return next((result.reason for result in lacking if result.check == SENSITIVITY), "")


def _merge_layers(results: Sequence[CheckResult]) -> dict[str, RevealedMistakes]:
    """Merge the sensitivity of layers, which judge the same steps (numbers do not add)."""
    merged: dict[str, RevealedMistakes] = {}
    for result in results:
        for name, one in result.shown.items():
            before = merged.get(name)
            if before is None:
                merged[name] = one
            else:
                most = max(before.steps, one.steps)
                merged[name] = msgspec.structs.replace(
                    merge_two_revealed_mistakes(before, one), steps=most
                )
    return merged


def _missing(case: Case, shown: Mapping[str, RevealedMistakes]) -> Iterator[str]:
    """Yield the mistakes that no tensor would have revealed, one sentence per reason."""
    tensors, by_reason = list(shown.values()), defaultdict[str, list[str]](list)
    for name, mistake in MISTAKES.items():
        possible = [one for one in tensors if name in one.shown]
        if not possible or name == "other-parameter":
            continue
        seen = {rank for one in possible for rank in one.shown[name]}
        possible_ranks = set(case.with_data) if mistake.of_ranks else {0}
        if unseen := sorted(possible_ranks - seen):
            whose = ""
            if len(unseen) < len(possible_ranks):
                whose = f" (rank {', '.join(map(str, unseen))})"
            why = f"--accept {case.accept} allows it" if case.accept else _why_insensitive(possible)
            by_reason[why].append(f"{mistake.says}{whose}")
    for why, mistakes in by_reason.items():
        yield f"no tensor would have revealed {joined_list(mistakes, 'or')}: {why}"


def _why_insensitive(tensors: Sequence[RevealedMistakes]) -> str:
    if all(one.zero for one in tensors):
        return "gradients are zero on every rank"
    if all(one.alike for one in tensors):
        return "gradients are the same on every rank"
    if all(one.zero_on_some for one in tensors):
        return (
            "gradients are zero on some ranks (for example ranks whose shard has no token), and "
            "elsewhere the bound is larger than the effect of the mistake"
        )
    return "the bound is larger than the effect of the mistake"


def _describe(case: Case, shown: Mapping[str, RevealedMistakes]) -> str:
    """Describe the mistakes that would have been revealed, and in how many tensors."""
    text = describe_revealed_mistakes(shown, ranks=len(case.with_data))
    return text if case.accept is None else f"{text}; {_within_what_is_accepted(case, shown)}"


def _within_what_is_accepted(case: Case, shown: Mapping[str, RevealedMistakes]) -> str:
    """Describe the wrong factors that an accepted deviation hides."""
    found = smallest_revealed_scale_errors(shown)
    if found is None or found[0] == float("inf"):
        return f"--accept {case.accept}: the smallest detectable scale error was not measured"
    least, most = found
    return (
        f"with --accept {case.accept} a scale error is detected from {_share(least)} in the most "
        f"sensitive tensor, and from {_share(most)} in the least sensitive one"
    )


def _share(value: float) -> str:
    return f"{100 * value:.2g}%" if value < 10 else "any amount"
