"""Causes beside wrong means: what was lost before, bits, updates, losses, accepted designs."""

import math

from distcheck.judge.diagnosis import gradients
from distcheck.judge.diagnosis.facts import Facts, PassFacts, UpdateFacts
from distcheck.judge.diagnosis.findings import number_text, ranks_text
from distcheck.judge.diagnosis.places import Failures, where
from distcheck.records import CheckResult, Diagnosis
from distcheck.records.layers import BITWISE, ROUNDING

_SAME_ORDER = "promise the order that is used, or use the one that is promised"
_ONE_ORDER = "add up in one order on every rank"
_SHOWN = 4


def lost(facts: Facts) -> list[Diagnosis]:
    """A loss from which no gradient comes back."""
    if not facts.lost:
        return []
    return [
        Diagnosis(
            cause="wrong-local-gradient",
            evidence=f"{facts.lost}: the shard's gradient is gone before anything is exchanged",
            suggestion="look at what scales the loss: a schedule that reaches zero, a weight that "
            "was never set",
        )
    ]


def of_bits(failed: Failures, facts: Facts) -> list[Diagnosis]:
    """Gradients that were measured, are within the rounding bound of the mean, and have other bits
    than promised, or than each other.
    """
    pairs = {pair for pair in failed if pair[0] in ("gradients", "agreement")}
    right = bool(facts.steps) and not any(
        s.parameters or s.missing or s.not_finite for s in facts.steps
    )
    if not right or not pairs or not pairs <= {("gradients", BITWISE), ("agreement", "-")}:
        return []
    what = "every gradient is within rounding of the right mean, but its last bits are not those "
    result = failed.get(("gradients", BITWISE))
    if result is not None:
        evidence = f"{what}of the promised order and scale: {where(result)}"
        suggestion = f"{_ONE_ORDER}, the promised one; look at what rounds, and when"
        if facts.other_order:
            evidence += f"; the bits are those of {facts.other_order}"
            suggestion = _SAME_ORDER
        return [Diagnosis(cause="not-as-promised", evidence=evidence, suggestion=suggestion)]
    if not any(len(step.alike) > 1 for step in facts.steps):
        return []
    return [
        Diagnosis(
            cause="last-bits-differ",
            evidence=f"{what}of the other ranks: {where(failed['agreement', '-'])}",
            suggestion=f"{_ONE_ORDER}, or let one rank add up and broadcast its result: replicas "
            "that differ in their last bits drift apart",
        )
    ]


def of_passes(facts: Facts) -> list[Diagnosis]:
    """Several backward passes in a step, which do not count alike."""
    found = facts.passes
    if found is None or not facts.steps or facts.steps[0].step != found.step:
        return []
    shares = facts.steps[0].shares
    rows = _counts(found, shares)
    # Chosen: far above the roundings of a least-squares fit, far below a lost pass.
    if all(abs(c - row[0][0]) <= 1e-3 for row in rows for counts in row for c in counts):
        return []  # all alike, by a factor that has its own name
    text = "; ".join(
        f"rank {facts.steps[0].number(rank)} holds "
        + ", ".join(_times(counts) for counts in rows[rank])
        for rank in range(min(len(rows), _SHOWN))
    )
    return [
        Diagnosis(
            cause="lost-micro-batch",
            evidence=f"step {found.step}: each rank's {found.passes} backward passes should count "
            f"once each; {text} times those of ranks "
            f"{', '.join(str(facts.steps[0].number(r)) for r in range(len(rows)))}",
            suggestion="exchange the sum of all backward passes of the step once, after the last: "
            "look for an exchange that begins too early, a buffer that only the first or the "
            "last pass fills, and a scale that every pass applies",
        )
    ]


def _counts(found: PassFacts, shares: tuple[float, ...]) -> list[list[list[float]]]:
    return [
        [[weight / share for weight in of_rank] for of_rank, share in zip(row, shares, strict=True)]
        for row in found.weights
    ]


def _times(counts: list[float]) -> str:
    # Chosen: what is shown as 0; far below a count that means something.
    return "(" + ", ".join(f"{0.0 if abs(c) < 1e-4 else c:.4g}" for c in counts) + ")"


def of_average(failed: Failures, facts: Facts) -> list[Diagnosis]:
    """Wrong averages of parameters, where such averages are accepted."""
    if ("parameters", ROUNDING) not in failed or facts.average is None:
        return []
    found = gradients.explain_step(facts.average)
    return [
        Diagnosis(
            cause=finding.cause,
            evidence=f"of the parameters, which are averaged then (a rank's own is what its own "
            f"update left): {finding.evidence}",
            suggestion=_AVERAGE,
        )
        for finding in found
    ]


_AVERAGE = (
    "every rank's own update is right: look at the average of the parameters, what it is divided "
    "by, which ranks and parameters it takes in, and after which steps"
)


def of_design(failed: Failures, facts: Facts, accept: str) -> list[Diagnosis]:
    """Something else than the design that was accepted."""
    result = failed.get(("gradients", ROUNDING))
    if result is None or not accept.startswith(("low-rank", "quantised")):
        return []
    factor = facts.scaled_projection
    if factor is not None:
        world = facts.world
        named = {float(world): "missing-division", 1 / world: "double-division"}
        # Chosen: far above rounding in float32, and no other factor is so near.
        cause = next((c for f, c in named.items() if math.isclose(f, factor, rel_tol=1e-4)), "")
        return [
            Diagnosis(
                cause=cause or "wrong-divisor",
                evidence=f"{where(result)}: every rank holds {number_text(factor)} times what a "
                "projection of the mean is",
                suggestion=f"divide by the number of ranks ({world}) once, after the last of the "
                "exchanges or before the first",
            )
        ]
    reason = result.reason.partition("; ")[0]
    seen = gradients.describe_unexplained(facts)
    evidence = "; ".join(filter(None, [where(result), reason, seen]))
    return [
        Diagnosis(
            cause="not-as-accepted",
            evidence=f"gradients are not what --accept {accept} allows: {evidence}",
            suggestion="look at what the compression does beyond that: fewer bits or more "
            "directions than were said, directions that are not orthonormal, feedback that is "
            "lost, and ranks that are left out",
        )
    ]


def of_update(failed: Failures, facts: Facts, first: CheckResult | None) -> list[Diagnosis]:
    """Steps of the optimizer that are not those that it takes on one machine."""
    result = failed.get(("parameters", BITWISE))
    if result is None and first is not None and (first.check, first.layer) == (
        "parameters", "lattice",
    ):  # fmt: skip
        result = first
    if result is None:
        return []
    seen = facts.update
    if seen is not None and (named := _of_owners(seen, facts.world)):
        return named
    evidence = "with the gradients that ranks held, the optimizer's step gives other parameters "
    evidence += f"or another state of its own: {where(result)}"
    reason = result.reason.partition("; ")[0]
    if seen is None:
        evidence += f"; {reason}" if reason else ""
    else:
        evidence += f"; {_update_text(seen, facts.world)}"
    return [
        Diagnosis(
            cause="wrong-update",
            evidence=evidence,
            suggestion="look for what else writes to parameters or to the optimizer's state, for "
            "state that is lost or kept twice, and for an optimizer with other settings",
        )
    ]


def _of_owners(seen: UpdateFacts, world: int) -> list[Diagnosis]:
    """Updates that are the owners' affair: what was not sent on, and what was clipped apart."""
    names = ", ".join(seen.parameters[:_SHOWN])
    if seen.owners and seen.unchanged:
        return [
            Diagnosis(
                cause="lost-broadcast",
                evidence=f"after step {seen.step}, {names} (of {len(seen.parameters)} in all) is "
                "right on one rank alone, and on the other ranks as it was before the step: the "
                "rank that updates it did not send it on",
                suggestion="broadcast every parameter from its owner after the owner's step: look "
                "for a list of parameters that ends too early, and for an owner that differs from "
                "rank to rank",
            )
        ]
    if seen.counted:
        return [
            Diagnosis(
                cause="replicas-in-norm",
                evidence=f"step {seen.step}: parameters moved {number_text(seen.factor)} times as "
                "far as they should, as if they had been clipped by a norm in which "
                f"{', '.join(seen.counted[:_SHOWN])} (of {len(seen.counted)} in all) count "
                f"{seen.times} times",
                suggestion="count what several ranks hold once in the norm: add up the squares of "
                "pieces over the ranks, and those of whole parameters on one rank alone",
            )
        ]
    if seen.norms:
        norms = ", ".join(f"{norm:.4g}" for norm in seen.norms)
        return [
            Diagnosis(
                cause="local-norm-clip",
                evidence=f"step {seen.step}: parameters moved as if ranks had clipped the pieces "
                f"that they hold by the norms of these pieces alone ({norms}), and not by the "
                "norm of all gradients",
                suggestion="add up the squares of the norms of all ranks' pieces before the root: "
                "torch's clip_grad_norm_ does so for DTensors; for pieces that are plain tensors "
                "give the strategy clip(model, max_norm), which the loop then calls in its place",
            )
        ]
    return []


def _update_text(seen: UpdateFacts, world: int) -> str:
    names = [*seen.parameters, *seen.state]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    ranks = "every rank" if len(seen.ranks) == world else ranks_text(seen.ranks)
    text = f"wrong on {ranks} after step {seen.step}: {', '.join(names[:_SHOWN])}{more}"
    if not seen.parameters:
        return f"{text}; the parameters are right"
    if seen.unchanged:
        return f"{text}; they stayed as they were"
    # Chosen: where more of an update is left over, it is not a multiple of the right one.
    if seen.rest > 1e-3:
        return text
    # Chosen: what is shown as a factor of 1.
    if abs(seen.factor - 1) > 1e-4:
        text += f"; they moved {number_text(seen.factor)} times as far as they should"
    if seen.decay:
        what = "taken from" if seen.decay < 0 else "added to"
        text += f"; {abs(seen.decay):.3g} of each was {what} it"
    return text


def of_owners(facts: Facts) -> list[Diagnosis]:
    """The cause `wrong-owner`."""
    if not facts.elsewhere:
        return []
    shown = ", ".join(
        f"{one.name} on rank {one.holder} and not on rank {one.owner}"
        for one in facts.elsewhere[:_SHOWN]
    )
    more = len(facts.elsewhere) - _SHOWN
    return [
        Diagnosis(
            cause="wrong-owner",
            evidence=f"step {facts.elsewhere[0].step}: the right gradient is on another rank than "
            f"the one whose optimizer updates the parameter: {shown}"
            f"{f', and {more} more' if more > 0 else ''}",
            suggestion="reduce each gradient to the rank that has its parameter in the groups of "
            "its optimizer: look for two lists of owners, or one that is in another order",
        )
    ]


def of_loss(failed: Failures) -> list[Diagnosis]:
    """A loss that is wrong where all else is right."""
    results = [result for (check, _), result in failed.items() if check == "loss"]
    if not results or {check for check, _ in failed} - {"loss", "outcome"}:
        return []
    place = results[0].first
    numbers = f" is {place.actual}, and should be {place.expected}" if place else ""
    return [
        Diagnosis(
            cause="wrong-loss",
            evidence="gradients and parameters are right, but the returned loss is not: "
            f"{where(results[0])}{numbers}",
            suggestion="look at how the loss is averaged, and what is added to it before it is "
            "returned",
        )
    ]
