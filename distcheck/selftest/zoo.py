"""The first job of a self-test: load the mutants and the strategies, tell what there is.

It runs in a forked process, as everything that imports torch or code under test does.
"""

import importlib
from collections.abc import Iterator

from distcheck.selftest.records import LIST, Planted, Zoo
from distcheck.training.loading import load_strategy, strategy_names
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.reporter import Reporter

PACKAGE = "distcheck_mutants"
_BUILT_IN = "distcheck_strategies"  # others are a user's, and may be as wrong as they like


@LIST.does
def list_zoo(nothing: bytes, fds: Descriptors, reporter: Reporter) -> Zoo:
    """Every mutant, and every built-in strategy that runs on gloo and the CPU."""
    planted = [*_planted(PACKAGE), *_planted(f"{PACKAGE}.subtle")]
    here, elsewhere = [], []
    for name, point in sorted(strategy_names().items()):
        if point.module.partition(".")[0] != _BUILT_IN:
            continue
        contract = load_strategy(name).contract
        if contract.device not in (None, "cpu"):
            elsewhere.append((name, f"needs device {contract.device}"))
        elif contract.backend not in (None, "gloo"):
            elsewhere.append((name, f"needs backend {contract.backend}"))
        elif contract.parallel:
            elsewhere.append((name, "divides a model's layers; give it to distcheck verify"))
        else:
            here.append(name)
    return Zoo(mutants=tuple(planted), strategies=tuple(here), elsewhere=tuple(elsewhere))


def _planted(package: str) -> Iterator[Planted]:
    """Mutants that are listed with the checks that must fail; or subtle ones, each as the one case
    that shows it, and any check may do so.
    """
    subtle = package != PACKAGE
    causes = importlib.import_module(f"{package}.causes")
    for mutant in importlib.import_module(package).everything():
        if mutant.asked is None:
            continue
        place = mutant.spec.partition(":")[0].rpartition(".")[2]
        yield Planted(
            name=mutant.name,
            file=f"subtle.{mutant.group}" if subtle else place,
            asked=mutant.asked,
            caught=() if subtle else tuple(sorted(mutant.caught)),
            causes=tuple(sorted(causes.CAUSES[mutant.name])),
            processes=not subtle and mutant.processes,
            when_simulated=tuple(sorted(causes.WHEN_SIMULATED.get(mutant.name, ()))),
        )
