"""Every mutant is caught by exactly the checks that it is listed with."""

import pytest

import distcheck
from distcheck.checks import ORDER
from tests.mutants import ALL, Mutant, failures, missing_sync, order, scale, stale, state, workloads

MODULES = (failures, missing_sync, order, scale, stale, state, workloads)


def _name(mutant: Mutant) -> str:
    return mutant.spec.rpartition(":")[2]


@pytest.mark.parametrize("mutant", ALL, ids=_name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    spec, workload = mutant.spec, mutant.workload
    if mutant.kind == "workload":
        spec, workload = "allreduce", mutant.spec
    report = distcheck.verify(
        spec,
        world=mutant.world,
        workload=workload,
        steps=mutant.steps,
        dtype=mutant.dtype,
        deadline_s=3.0,
    )
    results = [result for case in report.cases for result in case.checks]
    failed = {(r.check, r.layer) for r in results if r.verdict == "fail"}
    assert failed == mutant.caught
    assert int(report.exit_code) == mutant.exit_code
    if mutant.exit_code == 1:
        firsts = [r.first for r in results if r.verdict == "fail"]
        assert min(first.step for first in firsts if first is not None) == mutant.step
        unknown = [r for r in results if r.verdict == "unknown"]
        assert not unknown


def test_every_check_has_a_mutant_that_it_alone_catches() -> None:
    alone = {next(iter(m.caught))[0] for m in ALL if len({check for check, _ in m.caught}) == 1}
    assert alone == {name.replace("_", " ") for name in ORDER}


def test_every_layer_has_a_mutant_that_it_alone_catches() -> None:
    layers = [{layer for _, layer in m.caught} for m in ALL]
    alone = {next(iter(found)) for found in layers if len(found) == 1}
    assert alone >= {"lattice", "X", "R", "S32", "S64"}
