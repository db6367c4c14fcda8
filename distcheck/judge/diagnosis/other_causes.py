"""Causes not related to wrong means: lost gradients, bits, updates, losses, accepted designs."""

import math

from distcheck.judge.diagnosis import gradients
from distcheck.judge.diagnosis.measurements import Measurements, PassFacts, UpdateFacts
from distcheck.judge.diagnosis.wording import (
    Failures,
    first_names_text,
    number_text,
    place_of_divergence,
)
from distcheck.records import CheckResult, Diagnosis
from distcheck.records.causes import name_cause
from distcheck.records.layers import BITWISE, ROUNDING
from distcheck.records.odd_ranks import ranks_in_words

_SHOWN = 4


def causes_of_lost_gradients(facts: Measurements) -> list[Diagnosis]:
    if not facts.lost:
        return []
    evidence = f"{facts.lost}: the local gradient is lost before the first collective"
    return [name_cause("wrong-local-gradient", evidence, "lost")]


def causes_of_other_bits(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    """Name gradients within the rounding bound whose bits are not as promised, or differ."""
    pairs = {pair for pair in failed if pair[0] in ("gradients", "agreement")}
    right = bool(facts.steps) and not any(
        s.parameters or s.missing or s.not_finite for s in facts.steps
    )
    if not right or not pairs or not pairs <= {("gradients", BITWISE), ("agreement", "-")}:
        return []
    what = "every gradient is within rounding of the right mean, but not bit-identical to that "
    result = failed.get(("gradients", BITWISE))
    if result is not None:
        evidence = f"{what}of the promised order and scale: {place_of_divergence(result)}"
        if facts.other_order:
            evidence += f"; it is bit-identical in the order {facts.other_order}"
            return [name_cause("not-as-promised", evidence, "other-order")]
        return [name_cause("not-as-promised", evidence)]
    if not any(len(step.alike) > 1 for step in facts.steps):
        return []
    evidence = f"{what}of the other ranks: {place_of_divergence(failed['agreement', '-'])}"
    return [name_cause("replicas-not-bit-identical", evidence)]


def causes_of_unequal_passes(facts: Measurements) -> list[Diagnosis]:
    """Name backward passes of a step that have different weights."""
    found = facts.passes
    if found is None or not facts.steps or facts.steps[0].step != found.step:
        return []
    shares = facts.steps[0].shares
    rows = _relative_weights(found, shares)
    # Heuristic: far above the roundings of a least-squares fit, far below a lost pass.
    if all(abs(c - row[0][0]) <= 1e-3 for row in rows for counts in row for c in counts):
        return []  # all equal: a factor with its own name
    text = "; ".join(
        f"rank {facts.steps[0].number(rank)} holds "
        + ", ".join(_format_weights(counts) for counts in rows[rank])
        for rank in range(min(len(rows), _SHOWN))
    )
    return [
        name_cause(
            "lost-micro-batch",
            f"step {found.step}: each rank's {found.passes} backward passes should each have "
            f"weight 1; {text} times those of ranks "
            f"{', '.join(str(facts.steps[0].number(r)) for r in range(len(rows)))}",
        )
    ]


def _relative_weights(found: PassFacts, shares: tuple[float, ...]) -> list[list[list[float]]]:
    return [
        [[weight / share for weight in of_rank] for of_rank, share in zip(row, shares, strict=True)]
        for row in found.weights
    ]


def _format_weights(counts: list[float]) -> str:
    # Heuristic: printed as 0; far below a meaningful weight.
    return "(" + ", ".join(f"{0.0 if abs(c) < 1e-4 else c:.4g}" for c in counts) + ")"


def causes_of_wrong_average(failed: Failures, facts: Measurements, accept: str) -> list[Diagnosis]:
    """Name wrong combinations of parameters, if these are accepted."""
    seen = facts.mistake
    if facts.design:
        seen = f"the code follows another design: it passes with --accept {facts.design}"
    if seen and accept:
        evidence = f"parameters are not combined by --accept {accept}: {seen}"
        return [name_cause("exceeds-accepted-deviation", evidence, "combined")]
    if ("parameters", ROUNDING) not in failed or facts.average is None:
        return []
    found = gradients.explain_step(facts.average)
    return [
        name_cause(
            finding.cause,
            "of the parameters, which are averaged at this step (local values are those after "
            f"the rank's own update): {finding.evidence}",
            "average",
        )
        for finding in found
    ]


def causes_of_unaccepted_design(
    failed: Failures, facts: Measurements, accept: str
) -> list[Diagnosis]:
    """Name results that do not match the accepted design."""
    result = failed.get(("gradients", ROUNDING))
    compressed = facts.compression
    if result is None or not (compressed is not None or accept.startswith("quantized")):
        return []
    if compressed is not None and compressed.mistake:
        evidence = f"{place_of_divergence(result)}: every rank holds the gradients"
        return [name_cause("wrong-error-feedback", f"{evidence} {compressed.mistake}")]
    if compressed is not None and (factor := compressed.factor):
        world = facts.world
        named = {float(world): "missing-division", 1 / world: "double-division"}
        # Heuristic: far above float32 rounding, and no other factor is this close.
        cause = next((c for f, c in named.items() if math.isclose(f, factor, rel_tol=1e-4)), "")
        return [
            name_cause(
                cause or "wrong-divisor",
                f"{place_of_divergence(result)}: every rank holds {number_text(factor)} times the "
                f"gradients of --accept {accept}",
                "low-rank",
                world=world,
            )
        ]
    reason = result.first_reason if compressed is None else compressed.why
    seen = gradients.describe_unexplained(facts)
    evidence = "; ".join(filter(None, [place_of_divergence(result), reason, seen]))
    evidence = f"gradients are not within --accept {accept}: {evidence}"
    return [name_cause("exceeds-accepted-deviation", evidence)]


def causes_of_wrong_update(
    failed: Failures, facts: Measurements, first: CheckResult | None
) -> list[Diagnosis]:
    """Name optimizer steps that differ from those of a single process."""
    result = failed.get(("parameters", BITWISE))
    if result is None and first is not None and (first.check, first.layer) == (
        "parameters", "exact",
    ):  # fmt: skip
        result = first
    if result is None:
        return []
    seen = facts.update
    if seen is not None and (named := _owner_causes(seen, facts.world)):
        return named
    evidence = (
        "with the ranks' gradients, the reference optimizer step yields different parameters "
    )
    evidence += f"or a different optimizer state: {place_of_divergence(result)}"
    reason = result.first_reason
    if seen is None:
        evidence += f"; {reason}" if reason else ""
    else:
        evidence += f"; {_update_text(seen, facts.world)}"
    return [name_cause("wrong-update", evidence)]


def _owner_causes(seen: UpdateFacts, world: int) -> list[Diagnosis]:
    """Name updates by owners: missing broadcasts, and separate clipping."""
    names = ", ".join(seen.parameters[:_SHOWN])
    if seen.owners and seen.unchanged:
        return [
            name_cause(
                "missing-broadcast",
                f"after step {seen.step}, {names} (of {len(seen.parameters)} in all) is right on "
                "only one rank and unchanged on the others: the rank that updates it did not "
                "broadcast it",
            )
        ]
    if seen.counted:
        return [
            name_cause(
                "clip-norm-includes-replicas",
                f"step {seen.step}: the update is {number_text(seen.factor)}x the right one, as "
                "if gradients were clipped by a norm in which "
                f"{', '.join(seen.counted[:_SHOWN])} (of {len(seen.counted)} in all) are "
                f"included {seen.times} times",
            )
        ]
    if seen.norms:
        norms = ", ".join(f"{norm:.4g}" for norm in seen.norms)
        return [
            name_cause(
                "clip-by-shard-norm",
                f"step {seen.step}: the update is as if each rank had clipped its shards by the "
                f"norm of only these shards ({norms}), and not by the norm of all gradients",
            )
        ]
    return []


def _update_text(seen: UpdateFacts, world: int) -> str:
    names = [*seen.parameters, *seen.state]
    ranks = "every rank" if len(seen.ranks) == world else ranks_in_words(seen.ranks)
    text = f"wrong on {ranks} after step {seen.step}: {first_names_text(names, _SHOWN)}"
    if not seen.parameters:
        return f"{text}; the parameters are right"
    if seen.unchanged:
        return f"{text}; they did not change"
    # Heuristic: with a larger residual, an update is not a multiple of the right one.
    if seen.rest > 1e-3:
        return text
    # Heuristic: printed as a factor of 1.
    if abs(seen.factor - 1) > 1e-4:
        text += f"; the update is {number_text(seen.factor)}x the right one"
    if seen.decay:
        what = "subtracted from" if seen.decay < 0 else "added to"
        text += f"; {abs(seen.decay):.3g} of each was {what} it"
    return text


def causes_of_wrong_owners(facts: Measurements) -> list[Diagnosis]:
    if not facts.elsewhere:
        return []
    shown = ", ".join(
        f"{one.name} on rank {one.holder} and not on rank {one.owner}"
        for one in facts.elsewhere[:_SHOWN]
    )
    more = len(facts.elsewhere) - _SHOWN
    return [
        name_cause(
            "reduced-to-wrong-rank",
            f"step {facts.elsewhere[0].step}: the right gradient is not on the rank whose "
            f"optimizer updates the parameter: {shown}"
            f"{f', and {more} more' if more > 0 else ''}",
        )
    ]


def causes_of_wrong_loss(failed: Failures) -> list[Diagnosis]:
    results = [result for (check, _), result in failed.items() if check == "loss"]
    if not results or {check for check, _ in failed} - {"loss", "outcome"}:
        return []
    place = results[0].first
    numbers = f" is {place.actual}, but should be {place.expected}" if place else ""
    evidence = "gradients and parameters are right, but the returned loss is not: "
    return [name_cause("wrong-loss", f"{evidence}{place_of_divergence(results[0])}{numbers}")]
