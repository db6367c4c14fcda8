"""In the pytest process: the ranks' subtests, each reported once, as pytest reports its own."""

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

from distcheck.records import Outcome
from distcheck.records.ends import RankEnd
from distcheck.testing import failures
from distcheck.testing.failures import Ended
from distcheck.testing.messages import Subtest


@dataclass
class _One:
    """One subtest: what each rank reported of it."""

    name: str
    told: dict[int, Subtest] = field(default_factory=dict)

    @property
    def failed(self) -> list[int]:
        return [rank for rank, subtest in sorted(self.told.items()) if subtest.failure]


def pass_on(item: pytest.Function, ended: Ended) -> list[str]:
    """Reports the subtests of all ranks. Returns a phrase for each that failed on some."""
    captures: Any = item.config.pluginmanager.getplugin("capturemanager")
    failed = []
    for one in _by_subtest(ended):
        report = _report_of(one, item, ended.size)
        quiet = captures.global_and_fixture_disabled() if captures else contextlib.nullcontext()
        with quiet:
            item.ihook.pytest_runtest_logreport(report=report)
        if one.failed:
            failed.append(f"{one.name} on {failures.name_of(one.failed, ended.size)}")
    return failed


def _by_subtest(ended: Ended) -> list[_One]:
    """Ranks' reports of the same subtest together: the first called so on each, the second, ..."""
    seen: dict[tuple[int, str], int] = {}
    found: dict[tuple[int, str], _One] = {}
    for rank, subtest in ended.subtests:
        number = seen[rank, subtest.name] = seen.get((rank, subtest.name), 0) + 1
        one = found.setdefault((number, subtest.name), _One(subtest.name))
        one.told[rank] = subtest
    return list(found.values())


def _report_of(one: _One, item: pytest.Function, size: int) -> pytest.TestReport:
    """One report for all ranks: of the failure, where any has failed."""
    ranks = one.failed or sorted(one.told)
    hook = item.config.hook
    made = {}
    for rank in ranks:
        data = copy.deepcopy(one.told[rank].report)  # pytest takes it apart
        made[rank] = hook.pytest_report_from_serializable(config=item.config, data=data)
        context = data.get("_subtest.context")
        if context is not None:  # pytest has taken the repr() of what was one already
            made[rank].context.kwargs.update(context["kwargs"])
    report: pytest.TestReport = made[ranks[0]]
    report.location = item.location
    report.sections = [
        (f"{title} of rank {rank}", text) for rank in ranks for title, text in made[rank].sections
    ]
    where: Any = report.longrepr
    if isinstance(where, list):  # of a skip, which pytest wants as a tuple
        report.longrepr = where[0], where[1], where[2]
    if one.failed:
        report.longrepr = failures.longrepr_of(
            Ended(
                size=size,
                outcomes=[Outcome(rank=rank, outcome=RankEnd.RAISED) for rank in one.failed],
                reports={rank: one.told[rank].as_failure() for rank in one.failed},
                outputs={},
            ),
            item.config,
        )
    return report
