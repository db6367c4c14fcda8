"""The first job of a self-test: load the mutants and the strategies, tell what there is.

It runs in a forked process, as everything that imports torch or code under test does.
"""

import importlib

import msgspec

from distcheck.loading import load_strategy, strategy_names
from distcheck.selftest.records import Planted, Zoo
from distcheck.worlds.child import Reporter

PACKAGE = "distcheck_mutants"
LIST = "distcheck.selftest.zoo:list_zoo"  # the job's name, as in `distcheck.jobs`
_BUILT_IN = "distcheck_strategies"  # others are a user's, and may be as wrong as they like


def list_zoo(payload: bytes, fds: list[int], reporter: Reporter) -> bytes:
    """Every mutant, and every built-in strategy that runs on gloo and the CPU."""
    mutants = importlib.import_module(PACKAGE).everything()
    causes = importlib.import_module(f"{PACKAGE}.causes").CAUSES
    planted = [
        Planted(
            name=mutant.name,
            file=mutant.spec.partition(":")[0].rpartition(".")[2],
            asked=mutant.asked,
            caught=tuple(sorted(mutant.caught)),
            causes=tuple(sorted(causes[mutant.name])),
        )
        for mutant in mutants
    ]
    here, elsewhere = [], []
    for name, point in sorted(strategy_names().items()):
        if point.module.partition(".")[0] != _BUILT_IN:
            continue
        contract = load_strategy(name).contract
        if contract.device not in (None, "cpu"):
            elsewhere.append((name, f"needs device {contract.device}"))
        elif contract.backend not in (None, "gloo"):
            elsewhere.append((name, f"needs backend {contract.backend}"))
        else:
            here.append(name)
    found = Zoo(mutants=tuple(planted), strategies=tuple(here), elsewhere=tuple(elsewhere))
    return msgspec.msgpack.encode(found)
