"""From findings to named causes, each with its evidence and one suggestion.

A cause is named only where the evidence carries it; a mismatch that none explains is reported
as `unexplained`, with what was seen. Causes that the evidence cannot tell apart are all named.

One file a family: `outcomes` (ranks that did not finish), `state` (data, initial state, buffers,
optimizer, reruns), `other_causes` (updates, losses, bits, accepted designs), `layouts` (of
model-parallel worlds), and `gradients`, which asks `weights`, `parts` and
`precision`. They see plain numbers (`facts`), which `observation` has measured in a process of its
own, and only for cases that failed: `measuring` and `layout_measuring` a step, `measured` what they
ask of it, `combinations`, `tokens`, `backward`, `updates` what else it is,
`ways` the line that it is about.
"""

from collections.abc import Sequence

import msgspec

from distcheck.judge.checks.merging import earliest_failure
from distcheck.judge.diagnosis import exchanging, gradients, layouts, other_causes, outcomes, state
from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.judge.diagnosis.source_lines import culprit as culprit
from distcheck.judge.diagnosis.wording import Failures, where
from distcheck.judge.rerun_bisection import Separation
from distcheck.records import CheckResult, Diagnosis, Outcome
from distcheck.records.causes import name_cause, suggested
from distcheck.records.layers import BITWISE, ROUNDING


def diagnose(
    ends: Sequence[Outcome],
    results: Sequence[CheckResult],
    facts: Measurements | None = None,
    separation: Separation | None = None,
    *,
    accept: str | None = None,
) -> list[Diagnosis]:
    """The causes behind a case's failures; nothing for a case that did not fail.

    `facts` are what a closer look at the trace has measured, `separation` what further worlds have
    shown of a rerun that differed, if there were any; `accept` is what the case accepts.
    """
    found = outcomes.explain(ends)
    if found and separation is not None and separation.depends:
        found.insert(
            0, state.of_process(separation, f"its ranks did not finish ({found[0].cause})")
        )
    failed = {(r.check, r.layer): r for r in results if r.verdict == "fail"}
    checks = {check for check, _ in failed}
    if not checks - {"outcome"}:
        return found
    facts = facts or Measurements(world=len(ends))
    depends = separation is not None and separation.depends
    differed = (
        [] if found and depends else state.of_rerun(failed, separation, alone=checks == {"rerun"})
    )
    found += state.explain(failed, facts)
    of_gradients = _of_gradients(failed, facts, accept or "")
    if state.gradients_raced(failed) and not depends:
        found += differed + [_of_one_run(cause) for cause in of_gradients]
    else:
        found += of_gradients + differed
        found += _of_update(failed, facts, found) + other_causes.of_loss(failed)
    if not found:
        found.append(_unexplained(failed, facts))
    return _with_loss_contract(found, facts) + state.same_randomness(facts)


def _of_gradients(failed: Failures, facts: Measurements, accept: str) -> list[Diagnosis]:
    checks = {check for check, _ in failed}
    if facts.layout is not None:
        moved = failed.get(("parameters", BITWISE))
        moved_at = moved.first.step if moved is not None and moved.first is not None else None
        follows = moved_at is not None and moved_at < facts.layout.step
        family = exchanging if facts.layout.form else layouts
        return [] if follows else family.explain(failed, facts.layout)
    found = other_causes.lost(facts) or other_causes.of_owners(facts)
    if checks & {"gradients", "agreement"}:
        found = found or gradients.explain(facts)
        found = _averaged(found, facts) + _of_batch(failed, facts)
        found += [] if found else other_causes.of_passes(facts)
        found += [] if found else other_causes.of_bits(failed, facts)
        found += [] if found else other_causes.of_design(failed, facts, accept)
        found += [] if found else _server(failed, facts)
    if "local gradients" in checks and not found:
        found = gradients.explain_left(facts)
    return found + other_causes.of_average(failed, facts)


def _averaged(found: list[Diagnosis], facts: Measurements) -> list[Diagnosis]:
    """What is not a missing exchange: ranks exchange parameters in place of gradients."""
    if not facts.averaged_every or "missing-sync" not in {cause.cause for cause in found}:
        return found
    every = facts.averaged_every
    may_accept = any(step.undeclared for step in facts.steps)
    steps = "every step" if every == 1 else f"every {every} steps"
    averaging = name_cause(
        "model-averaging",
        f"gradients are each rank's own, and after {steps} all ranks hold the mean of the "
        "parameters that their own updates left: another design, which differs from a mean "
        "of gradients where the optimizer keeps state",
        "undeclared" if may_accept else "usual",
        every=every,
    )
    return [averaging if cause.cause == "missing-sync" else cause for cause in found]


def _of_update(failed: Failures, facts: Measurements, found: list[Diagnosis]) -> list[Diagnosis]:
    """Unless it follows from what was found, or is part of it."""
    causes = {cause.cause for cause in found}
    if causes & {"optimizer-not-stepped", "model-averaging", "initial-state-differs", "nonfinite"}:
        return []
    first = earliest_failure([r for r in failed.values() if r.check != "outcome"])
    return other_causes.of_update(failed, facts, first)


def needs_diagnosis(results: Sequence[CheckResult]) -> bool:
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


def step_of_update(results: Sequence[CheckResult]) -> int:
    """The first step whose parameters failed; -1 where none did."""
    failed = [r for r in results if r.verdict == "fail" and r.check == "parameters"]
    return min((r.first.step for r in failed if r.first is not None), default=-1)


def _of_one_run(cause: Diagnosis) -> Diagnosis:
    evidence = f"{cause.evidence} (in the first run; the second held other gradients there)"
    return msgspec.structs.replace(cause, evidence=evidence)


def _of_batch(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    """The shards' mean is what the ranks hold, and the whole batch's gradient is another mean."""
    if not facts.batch_weights or ("gradients", ROUNDING) in failed:
        return []
    weights = ", ".join(f"{weight:.5g}" for weight in facts.batch_weights)
    return [
        name_cause(
            "unweighted-mean",
            "ranks hold the mean by samples of their shards' gradients, and the whole "
            f"batch's gradient is the one with weights {weights}: the loss is a mean over "
            "something that shards hold different numbers of",
            "averaged-over",
        )
    ]


def _unexplained(failed: Failures, facts: Measurements) -> Diagnosis:
    """The strongest evidence there is, where no cause is carried by it."""
    first = earliest_failure([r for r in failed.values() if r.check != "outcome"])
    assert first is not None
    parts = [f"{first.check} differ first: {where(first)}"]
    reason = first.first_reason
    parts += [reason] if reason and (first.layer != ROUNDING or not facts.steps) else []
    seen = gradients.describe_unexplained(facts) or gradients.describe_left(facts)
    parts.append(seen)
    evidence = "; ".join(filter(None, parts))
    if facts.trouble:
        evidence += f" (a closer look was not possible: {facts.trouble})"
    hint = {"data": "data", "local gradients": "local-gradients"}.get(first.check, "usual")
    return name_cause("unexplained", evidence, hint)


def _server(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    """Gradients are wrong on a rank without data, and were measured to be right on the others."""
    first = failed.get(("gradients", ROUNDING)) or failed.get(("gradients", "lattice"))
    measured = bool(facts.steps) and not any(s.parameters or s.missing for s in facts.steps)
    if first is None or first.first is None or not measured:
        return []
    if first.first.rank in (facts.steps[0].ranks or (first.first.rank,)):
        return []
    return [
        name_cause(
            "parameter-server-differs",
            "every rank with data holds the right mean, but the one without does not: "
            f"{where(first)}, got {first.first.actual}, expected {first.first.expected}",
        )
    ]


# What another factor on the loss may look like; anything else is not explained by it.
_BY_SCALE = (
    "missing-division", "double-division", "wrong-divisor", "unweighted-mean", "unweighted-tokens",
    "padding-counted",
)  # fmt: skip


def _with_loss_contract(found: Sequence[Diagnosis], facts: Measurements) -> list[Diagnosis]:
    """The same causes; the first that a loss contract would explain says so. Only where all that
    was recorded is right under that contract, which was computed, not guessed.
    """
    chosen = next((d for cause in _BY_SCALE for d in found if d.cause == cause), None)
    chosen = chosen or next((d for d in found if d.cause == "unexplained"), None)
    if chosen is None or not facts.right_under:
        return list(found)
    names = " or ".join(f"--loss {name}" for name in facts.right_under)
    hinted = msgspec.structs.replace(
        chosen,
        evidence=f"{chosen.evidence}; every gradient of every rank and step is right under {names}",
        suggestion=f"{chosen.suggestion}; {suggested(chosen.cause, 'loss-contract', names=names)}",
    )
    return [hinted if d is chosen else d for d in found]
