"""Deviations by design that the user accepts (`--accept KIND`): spelling, and effect on a plan.
Does not import torch.

`designs.py` has a row for each kind. A kind is followed by its settings, in any order after a
required one: `local-sgd:4:phase=1:state=reset`. All checks that remain possible are made. Checks
that start from recorded state (local gradients, the optimizer step, the loss of each rank, a rerun)
are unaffected.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from distcheck.contract import Contract, Wire
from distcheck.errors import UsageError, did_you_mean
from distcheck.judge.designs import KINDS, WIRES, DesignKind, DesignSetting, Value
from distcheck.records import AcceptedChanges, Case, FindingKind


@dataclass(frozen=True)
class AcceptedDeviation:
    """A parsed kind with all its settings; those that were not given have their defaults."""

    family: str
    settings: Mapping[str, Value]

    def __getitem__(self, name: str) -> Value:
        return self.settings[name]

    def having(self, **settings: Value) -> "AcceptedDeviation":
        """Return the same with other settings."""
        return AcceptedDeviation(self.family, {**self.settings, **settings})

    @property
    def warmup(self) -> int:
        """Return the number of steps that average gradients first."""
        return int(self.settings.get("warmup", 0))

    @property
    def combines_state(self) -> bool:
        """Return True if optimizer state is combined as well, or reset."""
        return self.settings.get("state", "local") != "local"

    def number(self, name: str) -> int:
        return int(self.settings[name])

    @property
    def kind(self) -> DesignKind:
        return KINDS[self.family]

    @property
    def wire(self) -> Wire | None:
        return WIRES.get(str(self.settings.get("wire")))

    @property
    def requires_mean(self) -> bool:
        """Return True if gradients must be the mean over the ranks, within some bound."""
        return self.kind.changes == "bound"

    @property
    def combines_parameters(self) -> bool:
        """Return True if ranks step by local gradients, and then combine parameters."""
        return self.kind.changes == "parameters"

    def __str__(self) -> str:
        words = [
            setting.spell(name, value)
            for name, setting in self.kind.settings.items()
            if (value := self.settings[name]) != setting.default
        ]
        return ":".join([self.family, *words])


DTYPES = ("float32", "float64")  # dtypes in which accepted deviations have a bound


def parse_deviation(text: str | None) -> AcceptedDeviation | None:
    """Parse a kind of deviation. Raises UsageError for a kind without a bound."""
    return None if text is None else _parse(text)


@cache
def _parse(text: str) -> AcceptedDeviation:
    family, *words = text.split(":")
    kind = KINDS.get(family)
    if kind is None:
        raise UsageError(
            f"--accept {text} is not supported{did_you_mean(family, list(KINDS))}; choose from "
            f"{', '.join(one.takes for one in KINDS.values())}"
        )
    given: dict[str, Value] = {}
    for place, word in enumerate(words):
        name, value = _read(text, kind, word, first=place == 0)
        if name in given:
            raise UsageError(f"--accept {text} sets {name} twice; remove one of the two")
        given[name] = value
    missing = [n for n, one in kind.settings.items() if one.required and n not in given]
    if missing:
        raise UsageError(f"--accept {text} is not supported; expected {kind.takes}")
    defaults = {name: setting.default for name, setting in kind.settings.items()}
    accepted = AcceptedDeviation(family, {**defaults, **given})
    if why := kind.why_contradictory(accepted.settings):
        raise UsageError(f"--accept {text} is contradictory: {why}")
    return accepted


def _read(text: str, kind: DesignKind, word: str, *, first: bool) -> tuple[str, Value]:
    """Return a setting and its value: `name=value`, or a value that only one setting can have."""
    name, equals, value = word.partition("=")
    places: dict[str, DesignSetting] = {
        n: one
        for n, one in kind.settings.items()
        if (n == name if equals else one.required and first)
    }
    if not equals:
        value = word
        places = places or {n: one for n, one in kind.settings.items() if one.is_word(word)}
    for found, setting in places.items():
        read = setting.read(value)
        if read is None:
            break
        if setting.words or setting.least <= float(read) <= setting.most:
            return found, read
        raise UsageError(
            f"--accept {text} is out of range; {found} of {kind.takes.partition(':')[0]} takes "
            f"{setting.least:g} to {setting.most:g}"
        )
    raise UsageError(f"--accept {text} is not supported; expected {kind.takes}")


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
    least, why = accepted.kind.least_steps(accepted.settings)
    if steps < least:
        raise UsageError(f"--accept {text} requires {why}; pass --steps {least} or more")
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
    if accepted.combines_parameters and not whole:
        raise UsageError(
            f"--accept {case.accept} is for replicated state, but {case.strategy} shards it; "
            "remove --accept"
        )
    if why := accepted.kind.why_not_in_world(accepted.settings, case.world):
        raise UsageError(f"--accept {case.accept} {why}")


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
    return accepted is None or accepted.kind.scalars


def keeps_exact_sums(text: str | None) -> bool:
    """Return True if workload `exact` still applies, because sums are exact or rounded."""
    accepted = parse_deviation(text)
    return accepted is None or accepted.kind.exact_sums


def why_nothing_was_accepted(case: Case, kinds: Collection[FindingKind]) -> str:
    """Return the reason that a run compressed nothing, by its findings, or ""."""
    accepted = parse_deviation(case.accept)
    compresses = accepted is not None and accepted.kind.changes == "gradients"
    if accepted is None or not compresses or FindingKind.COMPRESSED in kinds:
        return ""
    if accepted.settings.get("quantized"):
        return ""  # every element is compared within half a quantum
    return (
        f"no tensor was compressed in any of {case.steps} steps: --accept {case.accept} was not "
        "exercised; run more steps, or start compression earlier (PowerSGD's start_powerSGD_iter)"
    )


def describe_design(text: str) -> str:
    """Return a sentence on an acceptance by which ranks combine parameters."""
    accepted = _parse(text)
    if accepted.family == "gossip":
        return "after every step holds a mean of neighbors' locally updated parameters"
    every = accepted.number("period")
    steps = "every step" if every == 1 else f"every {every} steps"
    if accepted.family == "diloco":
        return f"after {steps} an outer optimizer steps by the mean of the ranks' movements"
    return f"after {steps} all ranks hold the mean of their locally updated parameters"


def describe_acceptance(case: Case) -> AcceptedChanges | None:
    accepted = parse_deviation(case.accept)
    if accepted is None:
        return None
    widened, not_owed = accepted.kind.describe(accepted.settings, case.world)
    return AcceptedChanges(kind=str(accepted), widened=widened, not_owed=not_owed)
