"""What a person accepts of code that differs by design (`--accept KIND`), and what is expected of
it then.

    low-precision:bf16 gradients are rounded to that dtype (or fp16, fp32); the rounding bound, full
    batch float32 and float64
                                are widened as for a promised `wire`        oracles/rounding.py
    quantized:BITS              gradients are rounded to a grid of 2^BITS steps over the range of
                                a rank's or of all; the rounding bound, full batch float32 and
                                float64 are widened
                                                                            oracles/quantum.py
    low-rank:RANK               what is exchanged of a matrix is its projection on RANK directions,
                                and the rest is carried over (PowerSGD)     oracles/low_rank.py
    low-rank:RANK:no-feedback   the same, and the rest is dropped
    local-sgd:PERIOD            ranks train by themselves, and average their parameters after every
                                PERIOD-th step (1: after every one)         oracles/averaging.py

Nothing is left out that can still be checked: what starts from recorded state (local gradients, the
optimizer's step, the loss of each rank, a second run) is judged as without it. No torch.
"""

from collections.abc import Collection, Sequence

import msgspec

from distcheck.contract import Contract, Wire
from distcheck.errors import UsageError
from distcheck.machine.numerics import unit_roundoff
from distcheck.records import Allowance, Case, FindingKind

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


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A kind, read: `amount` is the number of bits, of ranks of a matrix, or of steps."""

    family: str
    amount: int = 0
    wire: Wire | None = None
    feedback: bool = True

    @property
    def requires_mean(self) -> bool:
        """Whether gradients must be the mean over the ranks, within some bound."""
        return self.family in ("low-precision", "quantized")

    def __str__(self) -> str:
        if self.wire is not None:
            return f"{self.family}:{_SHORT[self.wire]}"
        return f"{self.family}:{self.amount}" + ("" if self.feedback else ":no-feedback")


DTYPES = ("float32", "float64")  # in which what is accepted has a bound


def read(text: str | None) -> Accepted | None:
    """What was asked for. Raises UsageError for anything that has no bound of its own."""
    if text is None:
        return None
    family, _, rest = text.partition(":")
    if family == "low-precision" and rest in _WIRES:
        return Accepted(family=family, wire=_WIRES[rest])
    amount, _, more = rest.partition(":")
    if family in _RANGES and amount.isascii() and amount.isdecimal():
        least, most = _RANGES[family]
        plain = more == "" or (family, more) == ("low-rank", "no-feedback")
        if plain and not rest.endswith(":"):
            if not least <= int(amount) <= most:
                raise UsageError(
                    f"--accept {text} is out of range; {family} takes {least} to {most}"
                )
            return Accepted(family=family, amount=int(amount), feedback=not more)
    raise UsageError(f"--accept {text} is not supported; choose from {', '.join(KINDS)}")


def spelled(text: str | None) -> str | None:
    return None if text is None else str(read(text))


def check_asked(
    text: str | None, *, dtype: str | None, steps: int, workloads: Sequence[str]
) -> None:
    """Raises UsageError for what can be seen before anything is loaded."""
    accepted = read(text)
    if accepted is None:
        return
    if dtype not in (None, *DTYPES):
        raise UsageError(
            f"--accept {text} is judged in float32 and float64, not in {dtype}; leave out --dtype"
        )
    if accepted.family == "local-sgd" and steps < 2 * accepted.amount:
        raise UsageError(
            f"--accept {text} needs two periods to be seen; give --steps {2 * accepted.amount} "
            "or more"
        )
    if "lattice" in workloads and not keeps_lattice(text):
        raise UsageError(
            f"workload lattice has exact sums only, and --accept {text} leaves none; give another "
            "workload"
        )


def check_promise(case: Case, contract: Contract) -> None:
    """Raises UsageError where a strategy promises what would be accepted, or the opposite of it."""
    accepted = read(case.accept)
    if accepted is None:
        return
    if contract.order is not None or contract.wire is not None:
        promised = "an order" if contract.order is not None else f'wire="{contract.wire}"'
        raise UsageError(
            f"--accept {case.accept} is for code that promises nothing about its exchange; "
            f"{case.strategy} promises {promised}, which is checked: leave --accept out"
        )
    whole = contract.sync != "out-of-sight" and contract.optimizer_state == "replicated"
    whole = whole and contract.gradients == "every rank"
    if accepted.family == "local-sgd" and not whole:
        raise UsageError(
            f"--accept {case.accept} is for ranks that hold everything, and {case.strategy} "
            "divides it among them"
        )


def contract_under(case: Case, contract: Contract) -> Contract:
    """The contract that a case is judged by: an accepted dtype is one that was promised."""
    accepted = read(case.accept)
    if accepted is None or accepted.wire is None:
        return contract
    return msgspec.structs.replace(contract, wire=accepted.wire)


def requires_full_batch(text: str | None) -> bool:
    """Whether gradients must be the whole batch's, within some bound: full batch float32 and
    float64.
    """
    accepted = read(text)
    return accepted is None or accepted.requires_mean


def keeps_scalars(text: str | None) -> bool:
    """Whether what is accepted takes parameters without dimensions: torch's PowerSGD does not."""
    accepted = read(text)
    return accepted is None or accepted.family != "low-rank"


def keeps_lattice(text: str | None) -> bool:
    """Whether the lattice has anything to show: sums that are exact, or rounded by a dtype."""
    accepted = read(text)
    return accepted is None or accepted.family == "low-precision"


def why_nothing_was_accepted(case: Case, kinds: Collection[FindingKind]) -> str:
    """Says of a run under low-rank that nothing of it was compressed, by what the check of the
    gradients found; empty where something was.
    """
    accepted = read(case.accept)
    if accepted is None or accepted.family != "low-rank" or FindingKind.COMPRESSED in kinds:
        return ""
    return (
        f"no tensor was compressed in any of {case.steps} steps: what --accept {case.accept} is "
        "for was not seen; run more steps, or let it begin earlier (PowerSGD's "
        "start_powerSGD_iter)"
    )


def describe(case: Case) -> Allowance | None:
    accepted = read(case.accept)
    if accepted is None:
        return None
    widened, not_owed = {
        "low-precision": _low_precision,
        "quantized": _quantized,
        "low-rank": _low_rank,
        "local-sgd": _local_sgd,
    }[accepted.family](accepted, case.world)
    return Allowance(kind=str(accepted), widened=widened, not_owed=not_owed)


def _low_precision(accepted: Accepted, world: int) -> tuple[str, tuple[str, ...]]:
    assert accepted.wire is not None
    roundings, unit = world + 2, unit_roundoff(accepted.wire)
    share = 100 * roundings * unit / (1 - roundings * unit)
    return (
        f"widens the rounding bound to {roundings} roundings to {accepted.wire} with equal shards "
        f"({share:.2g} % of what an element adds up), and those of whole tensors alike",
        ("smaller errors than that in an element", "exact sums"),
    )


def _quantized(accepted: Accepted, world: int) -> tuple[str, tuple[str, ...]]:
    share = 100 / (2**accepted.amount - 2)
    return (
        f"widens the rounding bound by half a quantum ({share:.2g} % of the largest element that "
        "any rank holds, as all may share one grid), and those of whole tensors alike",
        (
            "gradients smaller than half a quantum: there zero passes",
            "exact sums, left out",
        ),
    )


def _low_rank(accepted: Accepted, world: int) -> tuple[str, tuple[str, ...]]:
    carried = "the mean gradient, with what earlier steps had left over" if accepted.feedback else (
        "the mean gradient"
    )  # fmt: skip
    return (
        "has the rounding bound take, of a matrix, its orthogonal projection on at most "
        f"{accepted.amount} directions in place of the mean ({carried}); what is not compressed "
        "must be the mean",
        (
            "how much of a gradient is kept",
            "the gradient of the whole batch in float32 and float64",
            "exact sums, left out",
        ),
    )


def _local_sgd(accepted: Accepted, world: int) -> tuple[str, tuple[str, ...]]:
    steps = f"once in {accepted.amount} steps" if accepted.amount > 1 else "after every step"
    between = ", and of parameters between averages" if accepted.amount > 1 else ""
    return (
        f"requires of each rank its own gradients and update, bit-identical, and {steps} the plain "
        "mean of all ranks' parameters, within the rounding bound",
        (
            "gradients averaged over the ranks",
            f"agreement of gradients and of the optimizer's state{between}",
            "the gradient and the loss of the whole batch in float32 and float64",
            "exact sums, left out",
        ),
    )
