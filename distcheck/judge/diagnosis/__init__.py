"""From findings to named causes, each with its evidence and one suggestion.

A cause is named only if the evidence supports it. A mismatch that no cause explains is reported as
`unexplained`, with the measurements. If the evidence cannot distinguish several causes, all are
named.

Each family has a file: `outcomes` (ranks that did not finish), `state` (data, initial state,
buffers, optimizer, reruns), `other_causes` (updates, losses, bits, accepted designs), `layouts`
(model-parallel worlds), `communication` (warnings from the ledger of collectives), and `gradients`,
which combines `weights` and `parts`. They read plain numbers (`measurements`). `observation`
measures these in a separate process, and only for failed cases. `measuring` and `layout_measuring`
measure a step with the help of `measured`, `combinations`, `tokens`, `backward` and `updates`.
`source_lines` finds the responsible line.
"""

from collections.abc import Sequence

import msgspec

from distcheck.judge.acceptance import describe_design
from distcheck.judge.checks.merging import earliest_failure
from distcheck.judge.diagnosis import gradients, layouts, other_causes, outcomes, state
from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.judge.diagnosis.source_lines import line_of_first_wrong as line_of_first_wrong
from distcheck.judge.diagnosis.wording import Failures, place_of_divergence
from distcheck.judge.rerun_bisection import BisectionResult
from distcheck.records import CheckResult, Diagnosis, LossName, Outcome
from distcheck.records.causes import joined_suggestions, name_cause
from distcheck.records.layers import BITWISE, ROUNDING


def diagnose(
    ends: Sequence[Outcome],
    results: Sequence[CheckResult],
    facts: Measurements | None = None,
    separation: BisectionResult | None = None,
    *,
    accept: str | None = None,
) -> list[Diagnosis]:
    """Return the causes of a case's failures; nothing for a case that did not fail.

    `facts` are the measurements of the trace. `separation` is the result of further worlds about a
    rerun that differed, if any. `accept` is the deviation that the case accepts.
    """
    found = outcomes.explain(ends)
    if found and separation is not None and separation.depends:
        found.insert(
            0,
            state.cause_in_process_state(
                separation, f"its ranks did not finish ({found[0].cause})"
            ),
        )
    failed = {(r.check, r.layer): r for r in results if r.verdict == "fail"}
    checks = {check for check, _ in failed}
    if not checks - {"outcome"}:
        return found
    facts = facts or Measurements(world=len(ends))
    depends = separation is not None and separation.depends
    differed = (
        []
        if found and depends
        else state.causes_of_nondeterminism(failed, separation, alone=checks == {"rerun"})
    )
    found += state.explain(failed, facts)
    of_gradients = _gradient_causes(failed, facts, accept or "")
    if state.gradients_raced(failed) and not depends:
        found += differed + [_note_first_run_only(cause) for cause in of_gradients]
    else:
        found += of_gradients + differed
        found += _update_causes(failed, facts, found) + other_causes.causes_of_wrong_loss(failed)
    if not found:
        found.append(_unexplained(failed, facts))
    return _with_loss_contract(found, facts) + state.causes_of_shared_rng(facts)


def _gradient_causes(failed: Failures, facts: Measurements, accept: str) -> list[Diagnosis]:
    checks = {check for check, _ in failed}
    if facts.layout is not None:
        moved = failed.get(("parameters", BITWISE))
        moved_at = moved.first.step if moved is not None and moved.first is not None else None
        follows = moved_at is not None and moved_at < facts.layout.step
        return [] if follows else layouts.explain(failed, facts.layout)
    found = other_causes.causes_of_lost_gradients(facts) or other_causes.causes_of_wrong_owners(
        facts
    )
    if checks & {"gradients", "agreement"}:
        found = found or gradients.explain(facts)
        found = _replace_by_model_averaging(found, facts) + _batch_weighting_cause(failed, facts)
        found += [] if found else other_causes.causes_of_unequal_passes(facts)
        found += [] if found else other_causes.causes_of_other_bits(failed, facts)
        found += [] if found else other_causes.causes_of_unaccepted_design(failed, facts, accept)
        found += [] if found else _server(failed, facts)
    if facts.compressor and (":random" not in facts.compressor or not found):
        evidence = f"step 0: all gradients are as --accept {facts.compressor} expects them"
        found = [name_cause("compressed-gradients", evidence, accept=facts.compressor)]
    if "local gradients" in checks and not found:
        found = gradients.explain_local_gradients(facts)
    return found + other_causes.causes_of_wrong_average(failed, facts, accept)


def _replace_by_model_averaging(found: list[Diagnosis], facts: Measurements) -> list[Diagnosis]:
    """Replace a missing synchronization by model averaging if ranks average parameters instead."""
    if not facts.design or "missing-sync" not in {cause.cause for cause in found}:
        return found
    may_accept = any(step.undeclared for step in facts.steps)
    averaging = name_cause(
        "model-averaging",
        f"each rank steps by its local gradients, and {describe_design(facts.design)}: a different "
        "algorithm, which is not equivalent to averaging gradients if the optimizer keeps state",
        "undeclared" if may_accept else "usual",
        design=facts.design,
    )
    return [averaging if cause.cause == "missing-sync" else cause for cause in found]


def _update_causes(
    failed: Failures, facts: Measurements, found: list[Diagnosis]
) -> list[Diagnosis]:
    """Return the causes of a wrong update, unless it is a consequence or part of other causes."""
    causes = {cause.cause for cause in found}
    others = {"optimizer-not-stepped", "model-averaging", "initial-state-differs", "nonfinite"}
    if causes & {*others, "exceeds-accepted-deviation"}:
        return []
    first = earliest_failure([r for r in failed.values() if r.check != "outcome"])
    return other_causes.causes_of_wrong_update(failed, facts, first)


def needs_diagnosis(results: Sequence[CheckResult]) -> bool:
    """Return True if measurements can help: a check other than outcome and rerun failed."""
    return any(r.verdict == "fail" and r.check not in ("outcome", "rerun") for r in results)


def steps_to_diagnose(results: Sequence[CheckResult]) -> tuple[int, ...]:
    """Return the first step whose gradients failed, its successor, and the first failed step."""
    failed = [r for r in results if r.verdict == "fail" and r.first is not None]
    steps = [(r.check, r.first.step) for r in failed if r.first is not None]
    if not steps:
        return ()
    first = min(step for _, step in steps)
    of_gradients = min((s for check, s in steps if check == "gradients"), default=first)
    return tuple(dict.fromkeys((of_gradients, of_gradients + 1, first)))


def step_of_update(results: Sequence[CheckResult]) -> int:
    """Return the first step whose parameters failed, or -1."""
    failed = [r for r in results if r.verdict == "fail" and r.check == "parameters"]
    return min((r.first.step for r in failed if r.first is not None), default=-1)


def _note_first_run_only(cause: Diagnosis) -> Diagnosis:
    evidence = f"{cause.evidence} (in the first run; the gradients of the second run differ there)"
    return msgspec.structs.replace(cause, evidence=evidence)


def _batch_weighting_cause(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    """Name a batch whose gradient has other weights, if ranks hold the mean by samples."""
    if not facts.batch_weights or ("gradients", ROUNDING) in failed:
        return []
    weights = ", ".join(f"{weight:.5g}" for weight in facts.batch_weights)
    return [
        name_cause(
            "unweighted-mean",
            "ranks hold the mean of the local gradients weighted by samples, but the gradient "
            f"of the global batch has the weights {weights}: the loss is a mean over items whose "
            "number differs between shards",
            "averaged-over",
        )
    ]


def _unexplained(failed: Failures, facts: Measurements) -> Diagnosis:
    """Report the strongest evidence if no cause is supported."""
    first = earliest_failure([r for r in failed.values() if r.check != "outcome"])
    assert first is not None
    parts = [f"{first.check} diverge first: {place_of_divergence(first)}"]
    reason = first.first_reason
    parts += [reason] if reason and (first.layer != ROUNDING or not facts.steps) else []
    seen = gradients.describe_unexplained(facts) or gradients.describe_local_gradients(facts)
    parts.append(seen)
    evidence = "; ".join(filter(None, parts))
    if facts.trouble:
        evidence += f" (measurements were not possible: {facts.trouble})"
    hint = {"data": "data", "local gradients": "local-gradients"}.get(first.check, "usual")
    return name_cause("unexplained", evidence, hint)


def _server(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    """Name gradients that are right on all ranks with data, and wrong on the rank without."""
    first = failed.get(("gradients", ROUNDING)) or failed.get(("gradients", "exact"))
    measured = bool(facts.steps) and not any(s.parameters or s.missing for s in facts.steps)
    if first is None or first.first is None or not measured:
        return []
    if first.first.rank in (facts.steps[0].ranks or (first.first.rank,)):
        return []
    return [
        name_cause(
            "parameter-server-differs",
            "every rank with data holds the right mean, but the rank without data does not: "
            f"{place_of_divergence(first)}, got {first.first.actual}, "
            f"expected {first.first.expected}",
        )
    ]


# Causes that another factor on the loss may resemble; it explains no others.
_BY_SCALE = (
    "missing-division", "double-division", "wrong-divisor", "unweighted-mean", "unweighted-tokens",
    "padding-counted",
)  # fmt: skip


_LOSSES: dict[LossName, str] = {
    "mean": "the mean over a rank's samples",
    "mean/world": "the mean over a rank's samples, divided by the world size",
    "sum/global": "the sum over a rank's samples, divided by the number of all samples",
    "tokens": "the sum over a rank's tokens",
}


def _with_loss_contract(found: Sequence[Diagnosis], facts: Measurements) -> list[Diagnosis]:
    """Add the matching loss contract to the first cause that it would explain, only if everything
    recorded is right under that contract (computed, not guessed).
    """
    chosen = next((d for cause in _BY_SCALE for d in found if d.cause == cause), None)
    chosen = chosen or next((d for d in found if d.cause == "unexplained"), None)
    if chosen is None or not facts.right_under:
        return list(found)
    names = " or ".join(f"--loss {name} ({_LOSSES[name]})" for name in facts.right_under)
    contract = joined_suggestions(chosen.cause, "loss-contract", names=names)
    hinted = msgspec.structs.replace(
        chosen,
        evidence=f"{chosen.evidence}; or the code is correct, and --loss does not match how the "
        "training loop scales the loss",
        suggestion=f"{chosen.suggestion}; {contract}",
    )
    return [hinted if d is chosen else d for d in found]
