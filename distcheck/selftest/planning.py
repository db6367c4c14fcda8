"""What of a zoo is run."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from distcheck import backends
from distcheck.errors import CannotRunError, UsageError
from distcheck.machine import devices
from distcheck.selftest.records import Planted, Zoo

WORLDS = (2, 3)
WORKLOADS = ("lattice", "mlp")  # whose cases cost a second each
BACKENDS = ("gloo", "simulated")
_QUICK_STRATEGIES = ("allreduce", "ddp")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Mutants, and strategies each of which is run as several cases.

    `dtype` is that of the correct cases; None is verify's own choice, which adds float64.
    """

    backend: str = "gloo"
    device: str = "cpu"

    mutants: tuple[Planted, ...]
    strategies: tuple[str, ...]
    elsewhere: tuple[tuple[str, str], ...]
    dtype: str | None = None

    @property
    def cases_each(self) -> int:
        """Correct cases of one strategy: lattice runs in float32 only."""
        return len(WORLDS) * (2 if self.dtype else 3)


def check_place(backend: str, device: str) -> None:
    """Raises UsageError for a backend over which the mutants are not listed, and for an unknown
    device; CannotRunError for one that is not here.
    """
    backends.check_name(backend)
    if backend not in BACKENDS:
        raise UsageError(
            f"--backend {backend}: what must catch each mutant is known for gloo's order of "
            f"additions; expected {' or '.join(BACKENDS)}"
        )
    if device not in devices.DEVICES:
        raise UsageError(f"unknown --device {device!r}; known are {' and '.join(devices.DEVICES)}")
    if why := devices.missing(device, backend):
        raise CannotRunError(why)


def plan_selftest(
    zoo: Zoo,
    *,
    patterns: Sequence[str] = (),
    quick: bool = False,
    backend: str = "gloo",
    device: str = "cpu",
) -> Plan:
    """Chooses by name and by `quick`. Raises UsageError for a pattern that nothing matches."""
    names = [f"{m.file}.{m.name}" for m in zoo.mutants]
    names += [f"correct.{strategy}" for strategy in zoo.strategies]
    for pattern in patterns:
        if not any(_is_meant(name, [pattern]) for name in names):
            first = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise UsageError(
                f"-k {pattern}: no mutant and no correct strategy has such a name; names begin "
                f"with {first}, as in {names[0]}"
            )
    mutants = tuple(m for m in zoo.mutants if _is_meant(f"{m.file}.{m.name}", patterns))
    strategies = tuple(s for s in zoo.strategies if _is_meant(f"correct.{s}", patterns))
    if quick:
        mutants = representatives(mutants)
        quickest = tuple(s for s in strategies if s in _QUICK_STRATEGIES)
        strategies = quickest or strategies[:1]
    return Plan(
        backend=backend,
        device=device,
        mutants=mutants,
        strategies=strategies,
        elsewhere=zoo.elsewhere,
        dtype="float32" if quick else None,
    )


def representatives(mutants: Sequence[Planted]) -> tuple[Planted, ...]:
    """For every (check, layer) that any of them is listed with, one that has it and few others.

    Rare ones are chosen for first, so that the mutants chosen for them serve common ones too.
    """
    having: dict[tuple[str, str], list[Planted]] = {}
    for mutant in mutants:
        for pair in mutant.caught:
            having.setdefault(pair, []).append(mutant)
    chosen: list[Planted] = []
    for pair in sorted(having, key=lambda p: (len(having[p]), p)):
        if not any(pair in mutant.caught for mutant in chosen):
            chosen.append(min(having[pair], key=_cost))
    return tuple(mutant for mutant in mutants if mutant in chosen)


def _cost(mutant: Planted) -> tuple[int, bool, int]:
    """Narrow before wide; and a hang is waited for."""
    return len(mutant.caught), "hang" in mutant.causes, mutant.asked["world"]


def _is_meant(name: str, patterns: Sequence[str]) -> bool:
    lowered = [pattern.lower() for pattern in patterns]
    return not patterns or any(fnmatchcase(name.lower(), f"*{pattern}*") for pattern in lowered)
