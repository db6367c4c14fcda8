"""Diagnoses the bundle of a guard for `distcheck explain`: causes with evidence and a
suggestion.
"""

import math
from collections.abc import Iterator

from distcheck.job.guard.records import (
    LEFT_OUT,
    ONCE,
    OWN,
    Divergence,
    ReplicaFinding,
    TensorProjections,
    abbreviated_ranks,
    sentence_on_finding,
)
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause

# Heuristic: rounding changes a parameter by about 1e-7 of its norm per step, a missing
# synchronization by about the learning rate's fraction of it.
_ROUNDING = 1e-6


def causes(found: Divergence) -> list[Diagnosis]:
    """Return the possible causes of a difference. Differences that follow from other findings are
    omitted.
    """
    by_kind = {one.kind: one for one in found.findings}
    causes = [*_input_causes(found, by_kind), *_settings_causes(found, by_kind)]
    if "initial state" in by_kind:
        causes.append(
            name_cause(
                "initial-state-differs",
                f"before the first step {_groups(by_kind['initial state'])} held different "
                "parameters",
            )
        )
    is_explained = bool({"initial state", "settings"} & set(by_kind))
    replicas = by_kind.get("parameters") or by_kind.get("optimizer state")
    if replicas is not None and not is_explained:
        causes.append(_replica_causes(found, replicas))
    if "buffers" in by_kind and replicas is None:
        causes.append(
            name_cause(
                "buffers-differ",
                f"buffer {by_kind['buffers'].first} differs between "
                f"{_groups(by_kind['buffers'])}, and parameters agree",
                "guard",
            )
        )
    if "exchange" in by_kind and replicas is None:
        causes.append(_reduction_cause(found, by_kind["exchange"]))
    return causes or [_unexplained(found)]


def _reduction_cause(found: Divergence, one: ReplicaFinding) -> Diagnosis:
    evidence = sentence_on_finding(one, found)
    if one.what == LEFT_OUT:
        return name_cause("dropped-rank", evidence, "job")
    if one.what == OWN and one.when != ONCE:
        cause = "partial-sync" if one.differing < one.compared else "missing-sync"
        return name_cause(cause, evidence, "guard")
    return name_cause("wrong-reduction", evidence, "once" if one.when == ONCE else "again")


def _input_causes(found: Divergence, by_kind: dict[str, ReplicaFinding]) -> Iterator[Diagnosis]:
    if "samples" in by_kind:
        yield name_cause(
            "overlapping-data" if by_kind["samples"].is_partly else "same-data",
            sentence_on_finding(by_kind["samples"], found),
            "guard-sampler",
        )
    if "random streams" in by_kind:
        ranks = abbreviated_ranks(by_kind["random streams"].groups[0])
        yield name_cause(
            "shared-rng-seed",
            f"step {found.step}: {ranks} drew the same random numbers in the forward pass",
            "guard",
        )


def _settings_causes(found: Divergence, by_kind: dict[str, ReplicaFinding]) -> Iterator[Diagnosis]:
    one = by_kind.get("settings")
    if one is not None:
        yield name_cause(
            "learning-rate-differs" if one.first.startswith("lr ") else "optimizer-settings-differ",
            f"step {found.step}: {one.first} differs across ranks: {', '.join(one.values[:8])}",
            "settings",
        )


def _replica_causes(found: Divergence, one: ReplicaFinding) -> Diagnosis:
    """Explain replicas that diverged from the same initial state with the same settings."""
    since = f"between steps {found.agreed_at} and {found.step}"
    if found.agreed_at < 0:
        since = f"by step {found.step}"
    apart = max((distance(sums) for sums in found.sums), default=math.nan)
    far = f", by at most {apart:.2g} of a tensor's norm" if not math.isnan(apart) else ""
    what = f"{since}, {one.differing} of {one.compared} {one.kind} diverged{far}"
    rest = sum(len(group) for group in one.groups[1:])
    if len(one.groups[0]) > 1 and rest == 1:
        alone = abbreviated_ranks(one.groups[1])
        return name_cause(
            "one-rank-differs",
            f"{what}; {alone} differs, and the other {len(one.groups[0])} are bit-identical",
            rank=alone,
        )
    if found.state_compared and "optimizer state" not in {f.kind for f in found.findings}:
        return name_cause(
            "parameters-modified-outside-step",
            f"{what}; the first is {one.first}. The optimizer's state agrees, so the "
            "ranks' gradients were the same",
            "guard",
        )
    if not found.state_compared and not apart > _ROUNDING:
        return _unexplained(
            found, also=f"; {what}: rounding, or small steps by different gradients"
        )
    if one.differing < one.compared and one.kind == "parameters":
        return name_cause("partial-sync", f"{what}; the first is {one.first}", "guard")
    if apart <= _ROUNDING:
        evidence = f"{what}, which is rounding: ranks used different summation orders"
        return name_cause("nondeterministic", evidence, "guard")
    return name_cause(
        "missing-sync",
        f"{what}, differently on every rank ({_groups(one)}): each stepped by its local gradients",
        "guard",
    )


def distance(sums: TensorProjections) -> float:
    """Return the largest L2 distance between a rank's tensor and the first rank's, relative to the
    norm of the first rank's.
    """
    first = sums.by_rank[0]
    size = math.hypot(*first)
    apart = max(
        math.hypot(*(a - b for a, b in zip(row, first, strict=True))) for row in sums.by_rank
    )
    return apart / size if size else (math.inf if apart else 0.0)


def _groups(one: ReplicaFinding) -> str:
    return " and ".join(abbreviated_ranks(group) for group in one.groups[:4])


def _unexplained(found: Divergence, also: str = "") -> Diagnosis:
    kinds = ", ".join(one.kind for one in found.findings)
    return name_cause(
        "unexplained",
        f"step {found.step}: {kinds} differ, and no single known mistake explains it{also}",
        "guard",
    )
