"""Deviations by design that the user accepts (`--accept KIND`), and the expectations under them.
Does not import torch.

    low-precision:bf16          gradients are rounded to that dtype (or fp16, fp32). The rounding
                                bound, full batch float32 and float64 are widened as for a
                                promised `wire`                             oracles/rounding.py
    quantized:BITS              gradients are rounded to a grid of 2^BITS steps over the range of
                                one rank or of all. The same bounds are widened
                                                                            oracles/quantum.py
    low-rank:RANK               a matrix is reduced as its projection on RANK directions, and
                                the rest is carried over (PowerSGD)         oracles/low_rank.py
    low-rank:RANK:no-feedback   the same, but the rest is dropped
    local-sgd:PERIOD            ranks step locally, and average their parameters after every
                                PERIOD-th step (1: after every step)        oracles/averaging.py

All checks that remain possible are made. Checks that start from recorded state (local gradients,
the optimizer step, the loss of each rank, a rerun) are unaffected.
"""

from collections.abc import Collection, Sequence

import msgspec

from distcheck.contract import Contract, Wire
from distcheck.errors import UsageError
from distcheck.machine.numerics import unit_roundoff
from distcheck.records import AcceptedChanges, Case, FindingKind

_WIRES: dict[str, Wire] = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16",
    "fp32": "float32", "float32": "float32",
}  # fmt: skip
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_RANGES = {"quantized": (2, 16), "low-rank": (1, 1024), "local-sgd": (1, 10_000)}
KINDS = (
    "low-precision:bf16", "low-precision:fp16", "low-precision:fp32", "quantized:BITS",
    "low-rank:RANK", "low-rank:RANK:no-feedback", "local-sgd:PERIOD",
)  # fmt: skip


class AcceptedDeviation(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed kind. `amount` is the number of bits, the matrix rank, or the number of steps."""

    family: str
    amount: int = 0
    wire: Wire | None = None
    feedback: bool = True

    @property
    def requires_mean(self) -> bool:
        """Return True if gradients must be the mean over the ranks, within some bound."""
        return self.family in ("low-precision", "quantized")

    def __str__(self) -> str:
        if self.wire is not None:
            return f"{self.family}:{_SHORT[self.wire]}"
        return f"{self.family}:{self.amount}" + ("" if self.feedback else ":no-feedback")


DTYPES = ("float32", "float64")  # dtypes in which accepted deviations have a bound


def parse_deviation(text: str | None) -> AcceptedDeviation | None:
    """Parse a kind of deviation. Raises UsageError for a kind without a bound."""
    if text is None:
        return None
    family, _, rest = text.partition(":")
    if family == "low-precision" and rest in _WIRES:
        return AcceptedDeviation(family=family, wire=_WIRES[rest])
    amount, _, more = rest.partition(":")
    if family in _RANGES and amount.isascii() and amount.isdecimal():
        least, most = _RANGES[family]
        plain = more == "" or (family, more) == ("low-rank", "no-feedback")
        if plain and not rest.endswith(":"):
            if not least <= int(amount) <= most:
                raise UsageError(
                    f"--accept {text} is out of range; {family} takes {least} to {most}"
                )
            return AcceptedDeviation(family=family, amount=int(amount), feedback=not more)
    raise UsageError(f"--accept {text} is not supported; choose from {', '.join(KINDS)}")


def canonical_spelling(text: str | None) -> str | None:
    return None if text is None else str(parse_deviation(text))


def check_acceptance(
    text: str | None, *, dtype: str | None, steps: int, workloads: Sequence[str]
) -> None:
    """Raise UsageError for conflicts that can be found before anything is loaded."""
    accepted = parse_deviation(text)
    if accepted is None:
        return
    if dtype not in (None, *DTYPES):
        raise UsageError(
            f"--accept {text} is judged only in float32 and float64, not in {dtype}; remove --dtype"
        )
    if accepted.family == "local-sgd" and steps < 2 * accepted.amount:
        raise UsageError(
            f"--accept {text} requires at least two periods; pass --steps {2 * accepted.amount} "
            "or more"
        )
    if "exact" in workloads and not keeps_exact_sums(text):
        raise UsageError(
            f"workload exact only checks exact sums, which --accept {text} excludes; pass a "
            "different --workload"
        )


def check_promise(case: Case, contract: Contract) -> None:
    """Raise UsageError if the strategy promises the accepted deviation, or its opposite."""
    accepted = parse_deviation(case.accept)
    if accepted is None:
        return
    if contract.order is not None or contract.wire is not None:
        promised = "an order" if contract.order is not None else f'wire="{contract.wire}"'
        raise UsageError(
            f"--accept {case.accept} is for code without promises about its synchronization; "
            f"{case.strategy} promises {promised}, which is checked: remove --accept"
        )
    whole = contract.sync != "out-of-sight" and contract.optimizer_state == "replicated"
    whole = whole and contract.gradients == "every rank"
    if accepted.family == "local-sgd" and not whole:
        raise UsageError(
            f"--accept {case.accept} is for replicated state, but {case.strategy} shards it; "
            "remove --accept"
        )


def contract_for_case(case: Case, contract: Contract) -> Contract:
    """Return the contract to judge a case by; an accepted dtype acts like a promised one."""
    accepted = parse_deviation(case.accept)
    if accepted is None or accepted.wire is None:
        return contract
    return msgspec.structs.replace(contract, wire=accepted.wire)


def requires_full_batch(text: str | None) -> bool:
    """Return True if gradients must be the full batch's, within a bound of that layer."""
    accepted = parse_deviation(text)
    return accepted is None or accepted.requires_mean


def keeps_scalars(text: str | None) -> bool:
    """Return True if the deviation supports scalar (0-d) parameters: torch's PowerSGD does not."""
    accepted = parse_deviation(text)
    return accepted is None or accepted.family != "low-rank"


def keeps_exact_sums(text: str | None) -> bool:
    """Return True if workload `exact` still applies, because sums are exact or rounded."""
    accepted = parse_deviation(text)
    return accepted is None or accepted.family == "low-precision"


def why_nothing_was_accepted(case: Case, kinds: Collection[FindingKind]) -> str:
    """Return the reason that a low-rank run compressed nothing, by its findings, or ""."""
    accepted = parse_deviation(case.accept)
    if accepted is None or accepted.family != "low-rank" or FindingKind.COMPRESSED in kinds:
        return ""
    return (
        f"no tensor was compressed in any of {case.steps} steps: --accept {case.accept} was not "
        "exercised; run more steps, or start compression earlier (PowerSGD's start_powerSGD_iter)"
    )


def describe_acceptance(case: Case) -> AcceptedChanges | None:
    accepted = parse_deviation(case.accept)
    if accepted is None:
        return None
    widened, not_owed = {
        "low-precision": _low_precision,
        "quantized": _note_on_quantization,
        "low-rank": _low_rank,
        "local-sgd": _local_sgd,
    }[accepted.family](accepted, case.world)
    return AcceptedChanges(kind=str(accepted), widened=widened, not_owed=not_owed)


def _low_precision(accepted: AcceptedDeviation, world: int) -> tuple[str, tuple[str, ...]]:
    assert accepted.wire is not None
    roundings, unit = world + 2, unit_roundoff(accepted.wire)
    share = 100 * roundings * unit / (1 - roundings * unit)
    return (
        f"widens the rounding bound to {roundings} roundings to {accepted.wire} with equal shards "
        f"({share:.2g}% of the summed magnitudes of an element), and the bounds of whole "
        "tensors likewise",
        ("smaller errors in an element", "exact sums"),
    )


def _note_on_quantization(accepted: AcceptedDeviation, world: int) -> tuple[str, tuple[str, ...]]:
    share = 100 / (2**accepted.amount - 2)
    return (
        f"widens the rounding bound by half a quantum ({share:.2g}% of the largest element on "
        "any rank, because all elements may share one grid), and the bounds of whole tensors "
        "likewise",
        (
            "gradients smaller than half a quantum (zero passes for them)",
            "exact sums (excluded)",
        ),
    )


def _low_rank(accepted: AcceptedDeviation, world: int) -> tuple[str, tuple[str, ...]]:
    carried = "the mean gradient"
    carried += " plus the error feedback of earlier steps" * accepted.feedback
    return (
        f"makes the rounding bound expect, for a matrix, the orthogonal projection of {carried} "
        f"onto at most {accepted.amount} directions; uncompressed tensors must be the mean",
        (
            "the share of a gradient that is kept",
            "the gradient of the global batch in float32 and float64",
            "exact sums (excluded)",
        ),
    )


def _local_sgd(accepted: AcceptedDeviation, world: int) -> tuple[str, tuple[str, ...]]:
    steps = f"once in {accepted.amount} steps" if accepted.amount > 1 else "after every step"
    between = ", and of parameters between averages" if accepted.amount > 1 else ""
    return (
        f"requires bit-identical local gradients and updates on each rank, and {steps} the plain "
        "mean of all ranks' parameters within the rounding bound",
        (
            "gradients averaged over the ranks",
            f"agreement of gradients and of the optimizer's state{between}",
            "the gradient and the loss of the global batch in float32 and float64",
            "exact sums (excluded)",
        ),
    )
