"""The kinds of `--accept`: settings, effect on the plan, and description. Does not import torch.

A row of `KINDS` names the module in `oracles/` that has the expectations (`oracles/design.py`).

    low-precision   gradients are rounded to a dtype, and reduced in it         oracles/rounding.py
    quantized       gradients are rounded to a grid                             oracles/quantum.py
    low-rank        a matrix is reduced as a projection (PowerSGD)              oracles/low_rank.py
    local-sgd       ranks step locally, and average parameters periodically     oracles/averaging.py
    diloco          the same, and an outer optimizer steps by their mean        oracles/outer.py
    gossip          ranks step locally, and average with neighbors              oracles/mixing.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from distcheck.contract import Wire
from distcheck.machine.numerics import unit_roundoff

Value = int | float | str
Settings = Mapping[str, Value]
Described = tuple[str, tuple[str, ...]]  # the new expectation, and the properties not checked

WIRES: dict[str, Wire] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class DesignSetting:
    """A setting: one of some words (each with its canonical spelling), or a number in a range.

    required  it comes first, without its name
    bare      its words stand without its name
    whole     a number is an integer
    """

    least: float = 0
    most: float = 0
    default: Value = 0
    words: Mapping[str, str] = field(default_factory=dict)
    required: bool = False
    bare: bool = False
    whole: bool = True

    def read(self, text: str) -> Value | None:
        """Return the value of a text, or None."""
        if self.words:
            return self.words.get(text)
        whole, _, part = text.partition(".")
        digits = [whole] if self.whole or not part else [whole, part]
        if not all(one.isascii() and one.isdecimal() for one in digits) or len(text) > 12:
            return None
        return None if self.whole and whole != text else int(text) if self.whole else float(text)

    def is_word(self, text: str) -> bool:
        return self.bare and self.read(text) is not None

    def spell(self, name: str, value: Value) -> str:
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return text if self.required or self.bare else f"{name}={text}"


def words(*known: str) -> dict[str, str]:
    return {word: word for word in known}


def _consistent(settings: Settings) -> str:
    return ""


def _any_world(settings: Settings, world: int) -> str:
    return ""


def _one_step(settings: Settings) -> tuple[int, str]:
    return 1, "one step"


@dataclass(frozen=True, kw_only=True)
class DesignKind:
    """One kind of deviation.

    takes       spelling, for messages and the documentation
    changes     "bound": the mean gradient, within another bound; "gradients": the reduced
                gradient; "parameters": ranks step locally, then combine parameters
    oracle      `module:Class` in `oracles/`, a `Design` with the expectations; "" if only a
                bound changes
    exact_sums, scalars   True if workload `exact`, and scalar (0-d) parameters, are supported
    one_exchange          True if a step may have only one all-reduce of a gradient
    why_contradictory     the reason that settings contradict each other, or ""
    why_not_in_world      the reason that they do not fit a world size, or ""
    least_steps           the least number of steps, and its name
    agree       True if all ranks, or groups of them, hold the same parameters after a combination
    combined    the least and the largest number of `steps` after which a tensor is combined
    """

    takes: str
    changes: Literal["bound", "gradients", "parameters"]
    describe: Callable[[Settings, int], Described]
    settings: Mapping[str, DesignSetting] = field(default_factory=dict)
    oracle: str = ""
    exact_sums: bool = False
    scalars: bool = True
    one_exchange: bool = False
    agree: bool = True
    why_contradictory: Callable[[Settings], str] = _consistent
    why_not_in_world: Callable[[Settings, int], str] = _any_world
    least_steps: Callable[[Settings], tuple[int, str]] = _one_step
    combined: Callable[[Settings, int], tuple[int, int]] = lambda settings, steps: (steps, steps)


def _low_precision(settings: Settings, world: int) -> Described:
    wire = WIRES[str(settings["wire"])]
    roundings, unit = world + 2, unit_roundoff(wire)
    share = 100 * roundings * unit / (1 - roundings * unit)
    return (
        f"widens the rounding bound to {roundings} roundings to {wire} with equal shards "
        f"({share:.2g}% of the summed magnitudes of an element), and the bounds of whole "
        "tensors likewise",
        ("smaller errors in an element", "exact sums"),
    )


def _quantized(settings: Settings, world: int) -> Described:
    share = 100 / (2 ** int(settings["bits"]) - 2)
    return (
        f"widens the rounding bound by half a quantum ({share:.2g}% of the largest element on "
        "any rank, because all elements may share one grid), and the bounds of whole tensors "
        "likewise",
        (
            "gradients smaller than half a quantum (zero passes for them)",
            "exact sums (excluded)",
        ),
    )


def _low_rank(settings: Settings, world: int) -> Described:
    carried = "the mean gradient"
    carried += " plus the error feedback of earlier steps" * (not settings["dropped"])
    return (
        f"makes the rounding bound expect, for a matrix, the orthogonal projection of {carried} "
        f"onto at most {settings['rank']} directions; uncompressed tensors must be the mean",
        (
            "the share of a gradient that is kept",
            "the gradient of the global batch in float32 and float64",
            "exact sums (excluded)",
        ),
    )


_OF_COMPRESSION = (
    "the share of a gradient that is kept",
    "the gradient of the global batch in float32 and float64",
    "exact sums (excluded)",
)


def _sparse(settings: Settings, world: int) -> Described:
    amount = float(settings["amount"])
    number = f"{amount:g} elements" if amount >= 1 else f"{100 * amount:g}% of the elements"
    which = "any" if settings["places"] else "the largest"
    scope = "all parameters together" if settings["whole"] else "each tensor"
    given = "gradient" if settings["dropped"] else "gradient plus the elements not sent before"
    return (
        f"makes the rounding bound expect, for an element, the sum over the ranks that sent it; "
        f"each rank must send {which} {number} of {scope}, of its {given}; complete tensors must "
        "be the mean",
        _OF_COMPRESSION,
    )


def _error_feedback(settings: Settings, world: int) -> Described:
    bits = int(settings["quantized"])
    if bits:
        share = 100 / (2**bits - 2)
        return (
            "makes the rounding bound expect the mean gradient plus the errors of earlier steps, "
            f"within half a quantum ({share:.2g}% of the largest element on any rank)",
            ("gradients smaller than half a quantum", *_OF_COMPRESSION[1:]),
        )
    named = "the signs, times the mean magnitude," if settings["compressor"] else "the compression"
    return (
        f"makes the rounding bound expect the sum of {named} of each rank's gradient plus its "
        "errors of earlier steps; complete tensors must be the mean",
        _OF_COMPRESSION,
    )


def _two_steps_of_memory(settings: Settings) -> tuple[int, str]:
    return 1 if settings.get("dropped") else 2, "two steps, of which the second reads the memory"


def _no_fraction_of_elements(settings: Settings) -> str:
    amount = float(settings["amount"])
    if amount > 1 and not amount.is_integer():
        return f"{amount:g} is neither a number of elements nor a fraction below 1"
    return ""


def _two_compressors(settings: Settings) -> str:
    if settings["quantized"] and (settings["compressor"] or settings["whole"]):
        return "a quantizer is named together with signs; name one compressor"
    return ""


_OF_LOCAL_STEPS = (
    "gradients averaged over the ranks",
    "the gradient and the loss of the global batch in float32 and float64",
    "exact sums (excluded)",
)


def _local_sgd(settings: Settings, world: int) -> Described:
    period, state = int(settings["period"]), settings["state"]
    steps = f"once in {period} steps" if period > 1 else "after every step"
    between = ", and of parameters between averages" if period > 1 else ""
    whose = "all ranks'" if not settings["groups"] else "the group's ranks'"
    first = ""
    if warmup := settings["warmup"]:
        first = f"averaged gradients in the first {warmup} steps, and then "
    also = {"local": "", "mean": " and optimizer state", "reset": " and no optimizer state"}
    return (
        f"requires {first}bit-identical local gradients and updates on each rank, and {steps} the "
        f"plain mean of {whose} parameters{also[str(state)]} within the rounding bound",
        (
            _OF_LOCAL_STEPS[0],
            f"agreement of gradients and of the optimizer's state{between}",
            *_OF_LOCAL_STEPS[1:],
        ),
    )


def _periods(settings: Settings) -> tuple[int, str]:
    period, later = int(settings["period"]), int(settings.get("warmup", 0))
    return later + 2 * period, "at least two periods" + " after the warm-up" * bool(later)


def _combined(settings: Settings, steps: int) -> tuple[int, int]:
    period, phase = int(settings["period"]), int(settings["phase"])
    after = steps - int(settings.get("warmup", 0))
    if phase < 0:
        return after // period, -(-after // period)
    known = len([s for s in range(steps - after, steps) if (s - phase) % period == 0])
    return known, known


def _contradiction_of_periods(settings: Settings) -> str:
    period, phase = int(settings["period"]), int(settings["phase"])
    if phase >= period:
        return f"phase={phase} is not below the period {period}; pass a phase of 0 to {period - 1}"
    groups, all_ranks = int(settings.get("groups", 0)), int(settings.get("global", 0))
    if all_ranks and not groups:
        return "global= needs groups=SIZE, whose ranks average in between"
    if all_ranks % period:
        return f"global={all_ranks} is not a multiple of the period {period}"
    return ""


def _groups_in_world(settings: Settings, world: int) -> str:
    groups = int(settings["groups"])
    if groups and (world % groups or groups >= world):
        return (
            f"does not divide a world of {world} into several groups of {groups}; pass a different "
            "--world"
        )
    return ""


def _diloco(settings: Settings, world: int) -> Described:
    outer = f"SGD of learning rate {settings['lr']:g}"
    if settings["momentum"]:
        kind = "Nesterov momentum" if settings["nesterov"] == "yes" else "momentum"
        outer += f" and {kind} {settings['momentum']:g}"
    return (
        "requires bit-identical local gradients and updates on each rank, and once in "
        f"{settings['period']} steps the outer step of {outer} in a single process by the mean of "
        "the ranks' movements, within its rounding",
        (
            _OF_LOCAL_STEPS[0],
            "agreement of gradients and of the optimizer's state, and of parameters between outer "
            "steps",
            *_OF_LOCAL_STEPS[1:],
        ),
    )


def _contradiction_of_outer(settings: Settings) -> str:
    if int(settings["fragments"]) > 1 and int(settings["phase"]) >= 0:
        return "each fragment has its own phase; remove phase="
    if int(settings["fragments"]) > int(settings["period"]):
        return f"{settings['fragments']} fragments do not fit into a period of {settings['period']}"
    return _contradiction_of_periods(settings)


def _gossip(settings: Settings, world: int) -> Described:
    of = f"the matrix {settings['matrix']}" if settings["matrix"] else "a matrix that is found"
    when = "before" if settings["when"] else "after"
    return (
        f"requires bit-identical local gradients on each rank, and parameters mixed {when} every "
        f"step by {of}, whose rows and columns sum to one, within the rounding bound",
        (
            _OF_LOCAL_STEPS[0],
            "agreement of gradients, parameters and the optimizer's state",
            *_OF_LOCAL_STEPS[1:],
        ),
    )


_RANK_ROW = tuple[float, ...]
GRAPHS = ("ring", "exponential")


def matrix_of(text: str, world: int, step: int) -> tuple[_RANK_ROW, ...] | None:
    """Return the mixing matrix of a text at a step, or None if it is to be found. A single row is
    that of rank 0, shifted for the others. Raises ValueError.

    ring         a third each of the left neighbor, the rank itself and the right one
    exponential  a half each of the rank itself and rank r + 2^k, with k = step mod log2 world
    """
    if not text:
        return None
    if text in GRAPHS:
        row = [0.0] * world
        hops = max(1, (world - 1).bit_length())
        for to in (-1, 0, 1) if text == "ring" else (0, 1 << step % hops):
            row[to % world] += 1 / 3 if text == "ring" else 1 / 2
        rows = [row]
    else:
        rows = [[float(Fraction(one)) for one in row.split(",")] for row in text.split("_")]
    if len(rows) == 1:
        rows = [[rows[0][(to - rank) % len(rows[0])] for to in range(len(rows[0]))]
                for rank in range(len(rows[0]))]  # fmt: skip
    return tuple(tuple(row) for row in rows)


class _MatrixSetting(DesignSetting):
    """The name of a graph, or rows of fractions: `1/2,1/4,1/4` or `1/2,1/2_1/2,1/2`."""

    def read(self, text: str) -> Value | None:
        try:
            return text if text and len(text) <= _MOST_OF_MATRIX and matrix_of(text, 1, 0) else None
        except (ValueError, ZeroDivisionError):
            return None


def _contradiction_of_matrix(settings: Settings) -> str:
    text = str(settings["matrix"])
    matrix = None if text in GRAPHS else matrix_of(text, 1, 0)
    if matrix is None:
        return ""
    if any(len(row) != len(matrix) for row in matrix):
        return f"a matrix of {len(matrix)} rows needs {len(matrix)} weights in each"
    for name, rows in (("row", matrix), ("column", tuple(zip(*matrix, strict=True)))):
        for number, row in enumerate(rows):
            # Derived: above the rounding of a sum of a million weights in float64.
            if min(row) < 0 or abs(sum(row) - 1) > 1e-9:
                return f"{name} {number} of the matrix sums to {sum(row):.4g} instead of 1"
    return ""


def _matrix_in_world(settings: Settings, world: int) -> str:
    text = str(settings["matrix"])
    matrix = None if text in GRAPHS else matrix_of(text, world, 0)
    if matrix is None or len(matrix) == world:
        return ""
    return f"has a matrix for {len(matrix)} ranks; pass --world {len(matrix)}"


_MOST_OF_MATRIX = 10_000
_PERIOD = DesignSetting(1, 10_000, required=True)
_PHASE = DesignSetting(0, 9_999, default=-1)

KINDS: Mapping[str, DesignKind] = {
    "low-precision": DesignKind(
        takes="low-precision:DTYPE (bf16, fp16, fp32)",
        changes="bound",
        describe=_low_precision,
        settings={
            "wire": DesignSetting(
                words={short: short for short in WIRES} | {w: s for s, w in WIRES.items()},
                required=True,
            )
        },
        exact_sums=True,
    ),
    "quantized": DesignKind(
        takes="quantized:BITS[:block=ELEMENTS][:stochastic][:norm]",
        changes="bound",
        describe=_quantized,
        settings={
            "bits": DesignSetting(2, 16, required=True),
            "block": DesignSetting(2, 1 << 24),
            "draws": DesignSetting(words=words("stochastic"), default="", bare=True),
            "scale": DesignSetting(words=words("norm"), default="", bare=True),
        },
        one_exchange=True,
    ),
    "low-rank": DesignKind(
        takes="low-rank:RANK[:no-feedback]",
        changes="gradients",
        describe=_low_rank,
        settings={
            "rank": DesignSetting(1, 1024, required=True),
            "dropped": DesignSetting(words=words("no-feedback"), default="", bare=True),
        },
        oracle="projections:LowRank",
        scalars=False,
        one_exchange=True,
    ),
    "sparse": DesignKind(
        takes="sparse:K[:random][:whole][:no-feedback]",
        changes="gradients",
        describe=_sparse,
        settings={
            # Heuristic: a smaller share of the elements is a typing error.
            "amount": DesignSetting(1e-6, 1e9, required=True, whole=False),
            "places": DesignSetting(words=words("random"), default="", bare=True),
            "whole": DesignSetting(words=words("whole"), default="", bare=True),
            "dropped": DesignSetting(words=words("no-feedback"), default="", bare=True),
        },
        oracle="error_feedback:ErrorFeedback",
        one_exchange=True,
        why_contradictory=_no_fraction_of_elements,
        least_steps=_two_steps_of_memory,
    ),
    "error-feedback": DesignKind(
        takes="error-feedback[:sign[:whole]|:quantized=BITS]",
        changes="gradients",
        describe=_error_feedback,
        settings={
            "compressor": DesignSetting(words=words("sign"), default="", bare=True),
            "whole": DesignSetting(words=words("whole"), default="", bare=True),
            "quantized": DesignSetting(2, 16),
        },
        oracle="error_feedback:ErrorFeedback",
        one_exchange=True,
        why_contradictory=_two_compressors,
        least_steps=_two_steps_of_memory,
    ),
    "local-sgd": DesignKind(
        takes="local-sgd:PERIOD[:phase=STEP][:warmup=STEPS][:state=local|mean|reset]"
        "[:groups=SIZE[:global=PERIOD]]",
        changes="parameters",
        describe=_local_sgd,
        settings={
            "period": _PERIOD,
            "phase": _PHASE,
            "warmup": DesignSetting(1, 10_000),
            "state": DesignSetting(words=words("local", "mean", "reset"), default="local"),
            "groups": DesignSetting(2, 10_000),
            "global": DesignSetting(1, 10_000),
        },
        oracle="averaging:LocalSGD",
        why_contradictory=_contradiction_of_periods,
        why_not_in_world=_groups_in_world,
        least_steps=_periods,
        combined=_combined,
    ),
    "diloco": DesignKind(
        takes="diloco:PERIOD[:lr=RATE][:momentum=FACTOR][:nesterov=yes|no][:fragments=NUMBER]"
        "[:phase=STEP]",
        changes="parameters",
        describe=_diloco,
        settings={
            "period": _PERIOD,
            "lr": DesignSetting(0, 1_000, default=0.7, whole=False),
            "momentum": DesignSetting(0, 0.9999, default=0.9, whole=False),
            "nesterov": DesignSetting(words=words("yes", "no"), default="yes"),
            "fragments": DesignSetting(1, 1_000, default=1),
            "phase": _PHASE,
        },
        oracle="outer:DiLoCo",
        why_contradictory=_contradiction_of_outer,
        least_steps=_periods,
        combined=_combined,
    ),
    "gossip": DesignKind(
        takes="gossip[:ring|exponential|ROW[_ROW...]][:combine-first]",
        changes="parameters",
        describe=_gossip,
        settings={
            "when": DesignSetting(words=words("combine-first"), default="", bare=True),
            "matrix": _MatrixSetting(words=words(*GRAPHS), default="", bare=True),
        },
        oracle="mixing:Gossip",
        agree=False,
        why_contradictory=_contradiction_of_matrix,
        why_not_in_world=_matrix_in_world,
    ),
}
