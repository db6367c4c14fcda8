"""From findings to named causes, each with its evidence and one suggestion.

A cause is named only where the evidence carries it; a mismatch that none explains is reported
as `unexplained`, with what was seen. Causes that the evidence cannot tell apart are all named.

One file a family: `outcomes` (ranks that did not finish), `state` (data, initial state, buffers,
optimizer, reruns), and under `gradients` `weights`, `parts`, `earlier` and `precision`. They see
plain numbers (`facts`), which `observation` measures in a process of its own, and only for cases
that failed.
"""

from collections.abc import Sequence

import msgspec

from distcheck.checks.merging import earliest_failure
from distcheck.diagnosis import gradients, loss_contract, outcomes, state
from distcheck.diagnosis.facts import Facts
from distcheck.diagnosis.places import Failures, where
from distcheck.records import CheckResult, Diagnosis, Outcome

CAUSES = (
    "missing-division", "double-division", "wrong-divisor", "no-sync", "partial-sync",
    "one-rank-only", "dropped-rank", "duplicated-rank", "wrong-parameter-order", "stale-gradient",
    "accumulated-gradient", "unweighted-mean", "low-precision", "initial-state-differs",
    "buffers-differ", "same-data", "overlapping-data", "same-randomness", "clip-before-sync",
    "optimizer-not-stepped", "nonfinite", "nondeterministic", "crash", "hang",
    "collective-mismatch", "unreachable", "unexplained",
)  # fmt: skip


def diagnose(
    ends: Sequence[Outcome], results: Sequence[CheckResult], facts: Facts | None = None
) -> list[Diagnosis]:
    """The causes behind a case's failures; nothing for a case that did not fail.

    `facts` are what a closer look at the trace has measured, if there was one.
    """
    found = outcomes.explain(ends)
    failed = {(r.check, r.layer): r for r in results if r.verdict == "fail"}
    checks = {check for check, _ in failed}
    if not checks - {"outcome"}:
        return found
    facts = facts or Facts(world=len(ends))
    found += state.explain(failed, facts)
    of_gradients = []
    if checks & {"gradients", "agreement"}:
        of_gradients = gradients.explain(facts) + _of_batch(failed, facts)
    differed = state.nondeterministic(failed, alone=checks == {"rerun"})
    if state.gradients_raced(failed):
        found += differed + [_of_one_run(cause) for cause in of_gradients]
    else:
        found += of_gradients + differed
    if not found:
        found.append(_unexplained(failed, facts))
    return loss_contract.with_hint(found, facts) + state.same_randomness(facts)


def worth_a_look(results: Sequence[CheckResult]) -> bool:
    """Whether measuring can tell more than the checks' results: something other than the ranks'
    ends or the rerun failed.
    """
    return any(r.verdict == "fail" and r.check not in ("outcome", "rerun") for r in results)


def steps_to_look_at(results: Sequence[CheckResult]) -> tuple[int, ...]:
    """The first step whose gradients failed, the one after it, and the first that failed at all."""
    failed = [r for r in results if r.verdict == "fail" and r.first is not None]
    steps = [(r.check, r.first.step) for r in failed if r.first is not None]
    if not steps:
        return ()
    first = min(step for _, step in steps)
    of_gradients = min((s for check, s in steps if check == "gradients"), default=first)
    return tuple(dict.fromkeys((of_gradients, of_gradients + 1, first)))


def _of_one_run(cause: Diagnosis) -> Diagnosis:
    evidence = f"{cause.evidence} (in the first run; the second held other gradients there)"
    return msgspec.structs.replace(cause, evidence=evidence)


def _of_batch(failed: Failures, facts: Facts) -> list[Diagnosis]:
    """The shards' mean is what the ranks hold, and the whole batch's gradient is another mean."""
    if not facts.batch_weights or ("gradients", "R") in failed:
        return []
    weights = ", ".join(f"{weight:.5g}" for weight in facts.batch_weights)
    return [
        Diagnosis(
            cause="unweighted-mean",
            evidence="ranks hold the mean by samples of their shards' gradients, and the whole "
            f"batch's gradient is the one with weights {weights}: the loss is a mean over "
            "something that shards hold different numbers of",
            suggestion="weight each rank by what its loss was averaged over (tokens, positive "
            "samples), summed over the ranks, instead of by its samples",
        )
    ]


_START = "start at that step: all that was compared before it agreed"
_HINTS = {
    "parameters": "gradients are right: look for what else writes to parameters or to the "
    "optimizer's state, and for state that is lost or kept twice",
    "loss": "gradients are right: look at how the loss is averaged, and what is added to it",
    "data": "look at the sampler: its seed, its epoch (set_epoch), its rank and world size",
    "local gradients": "look at what changes the loss, the model's output or the gradients before "
    "the exchange, and at how micro-batches are weighted",
}


_AVERAGE = (
    "every rank's own update is right: look at the average of the parameters, what it is divided "
    "by, which ranks and parameters it takes in, and after which steps"
)


def _of_average(first: CheckResult, failed: Failures) -> str:
    """An average of the ranks' parameters that is not one, in numbers; whether any was taken."""
    place, agreement = first.first, failed.get(("agreement", "-"))
    assert place is not None
    text = f"{place.actual:.9g} where the mean of the ranks' own updates is {place.expected:.9g}"
    return "; ".join(filter(None, [text, agreement.reason if agreement else ""]))


def _unexplained(failed: Failures, facts: Facts) -> Diagnosis:
    """The strongest evidence there is, where no cause is carried by it."""
    first = earliest_failure([r for r in failed.values() if r.check != "outcome"])
    assert first is not None
    parts = [f"{first.check} differ first: {where(first)}"]
    reason = first.reason.partition("; ")[0]
    parts += [reason] if reason and (first.layer != "R" or not facts.steps) else []
    suggestion = _HINTS.get(first.check, _START)
    if (first.check, first.layer) == ("parameters", "R"):
        parts += [_of_average(first, failed)]
        suggestion = _AVERAGE
    if facts.other_order:
        parts.append(f"the bits are those of {facts.other_order}")
        suggestion = "promise the order that is used, or use the one that is promised"
    elif _bits_alone(failed, facts):
        parts.append("every gradient is within rounding of the right mean, its last bits are not")
        suggestion = (
            "add up in one order on every rank, the promised one; look at what rounds, and when"
        )
    elif _server_alone(first, facts):
        parts.append("every rank with data holds the right mean, and the one without another")
        suggestion = "have the server keep the mean that it sends, or leave its own gradients alone"
    seen = gradients.describe_unexplained(facts) or gradients.describe_left(facts)
    parts.append(seen)
    evidence = "; ".join(filter(None, parts))
    if facts.trouble:
        evidence += f" (a closer look was not possible: {facts.trouble})"
    return Diagnosis(cause="unexplained", evidence=evidence, suggestion=suggestion)


def _server_alone(first: CheckResult, facts: Facts) -> bool:
    """Gradients are wrong on a rank without data, and were measured to be right on the others."""
    measured = bool(facts.steps) and not any(s.parameters or s.missing for s in facts.steps)
    place = first.first if first.check == "gradients" else None
    if not measured or place is None:
        return False
    return place.rank not in (facts.steps[0].ranks or (place.rank,))


def _bits_alone(failed: Failures, facts: Facts) -> bool:
    """Gradients were measured, none is outside the rounding bound, and their bits differ (those of
    the promised order, or between ranks: it may be the parameters that do not agree).
    """
    seen = {pair for pair in failed if pair[0] in ("gradients", "agreement")}
    within = bool(facts.steps) and not any(s.parameters or s.missing for s in facts.steps)
    apart = ("gradients", "X") in failed or any(len(s.alike) > 1 for s in facts.steps)
    return within and apart and bool(seen) and seen <= {("gradients", "X"), ("agreement", "-")}
