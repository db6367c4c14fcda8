"""One test for each property that `distcheck verify` checks."""

import functools

import pytest

import distcheck
from distcheck.errors import DistcheckError, LeftOutError
from distcheck.judge import checks
from distcheck.records import CheckResult, Report
from distcheck.reports.wording import describe_place

_WORLDS = (2, 3, 4)
_WORKLOADS = ("exact", "cnn")
# A property of model-parallel layouts only is merged with another one, to avoid skipped tests.
_WITH = {"outputs": "loss"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by strategies, world sizes and workloads of the command line."""
    config = metafunc.config
    strategies = config.getoption("distcheck_strategy", None)
    if strategies is None:
        raise pytest.UsageError(
            "the conformance suite reads options of distcheck's pytest plugin; remove -p "
            "no:distcheck"
        )
    if not strategies:
        raise pytest.UsageError(
            "no strategy was given for the conformance suite; pass --distcheck-strategy NAME, "
            "FILE.py:OBJ or MODULE:OBJ"
        )
    worlds = config.getoption("distcheck_world") or _WORLDS
    workloads = config.getoption("distcheck_workload") or _WORKLOADS
    cells = [
        pytest.param(
            s, w, workload, id=f"{s}-world{w}-{workload}", marks=_xdist_group(s, w, workload)
        )
        for s in strategies
        for w in worlds
        for workload in workloads
    ]
    metafunc.parametrize(("strategy", "world", "workload"), cells)
    properties = [name for name in checks.module_names() if name not in _WITH]
    metafunc.parametrize("prop", properties, ids=lambda n: n.replace(" ", "_"))


def test_property(strategy: str, world: int, workload: str, prop: str) -> None:
    """Pass if every check of this property passes; fail if one fails or is unknown."""
    report = _cached_report(strategy, world, workload)
    if isinstance(report, LeftOutError):
        pytest.skip(str(report))
    if isinstance(report, DistcheckError):
        pytest.fail(str(report), pytrace=False)
    found = [result for case in report.cases for result in case.checks]
    results = [r for r in found if prop in (r.check, _WITH.get(r.check))]
    if not results:
        pytest.skip(f"{workload} has no {prop} to check")
    missed = [_describe(result) for result in results if result.verdict != "pass"]
    if missed:
        causes = [f"{d.cause}: {d.evidence}" for case in report.cases for d in case.diagnosis]
        pytest.fail("\n".join([*missed, *dict.fromkeys(causes)]), pytrace=False)


@functools.cache
def _cached_report(strategy: str, world: int, workload: str) -> Report | DistcheckError:
    """Return the report, or the error; cached for all properties."""
    try:
        return distcheck.verify(strategy, world=world, workload=workload)
    except DistcheckError as error:
        return error


def _describe(result: CheckResult) -> str:
    layer = f" ({result.layer})" if result.layer != "-" else ""
    place = f": {describe_place(result.first)}" if result.first is not None else ""
    reason = f"; {result.reason}" if result.reason else ""
    return f"{result.check}{layer} {result.verdict}{place}{reason}"


def _xdist_group(strategy: str, world: int, workload: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xdist_group(f"{strategy}-{world}-{workload}")]
