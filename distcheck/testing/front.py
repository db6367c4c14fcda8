"""In the pytest process: starts a world for a test, and decides the test's outcome."""

import contextlib
import copy
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import msgspec
import pytest

from distcheck import backends, registry
from distcheck.errors import DistcheckError, HelperError, NotSimulatedError
from distcheck.machine import devices
from distcheck.plan.scheduled import number_of_schedules
from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.records.odd_ranks import grouped
from distcheck.records.schedules import ScheduleSearchResult
from distcheck.testing import (
    blas,
    examples,
    failures,
    fixtures,
    pytest_compat,
    rank,
    reused_worlds,
    timeouts,
)
from distcheck.testing.failures import WorldEnd
from distcheck.testing.leaks import LeakWarning
from distcheck.testing.marker import WorldOptions
from distcheck.testing.messages import RUN, RankReport, RankWarning, Subtest
from distcheck.testing.rank import PreparedTest
from distcheck.testing.reused_rank import BODY
from distcheck.testing.waiting import collect_rank_messages, ranks_of, wait
from distcheck.worlds import turns
from distcheck.worlds.launch import start_world
from distcheck.worlds.local.helper_process import ForkedHelper
from distcheck.worlds.pool import Pool


@dataclass
class _One:
    """One subtest, with the report of each rank."""

    name: str
    told: dict[int, Subtest] = field(default_factory=dict)

    @property
    def failed(self) -> list[int]:
        return [rank for rank, subtest in sorted(self.told.items()) if subtest.failure]


def report_subtests(item: pytest.Function, ended: WorldEnd) -> list[str]:
    """Report the subtests of all ranks; return a phrase for each that failed on some."""
    captures: Any = item.config.pluginmanager.getplugin("capturemanager")
    failed = []
    for one in _group_by_subtest(ended):
        report = _report_of(one, item, ended.size)
        quiet = captures.global_and_fixture_disabled() if captures else contextlib.nullcontext()
        with quiet:
            item.ihook.pytest_runtest_logreport(report=report)
        if one.failed:
            failed.append(f"{one.name} on {failures.ranks_phrase(one.failed, ended.size)}")
    return failed


def _group_by_subtest(ended: WorldEnd) -> list[_One]:
    """Group ranks' reports by subtest: the first with a name on each rank, the second, ..."""
    seen: dict[tuple[int, str], int] = {}
    found: dict[tuple[int, str], _One] = {}
    for place, subtest in ended.subtests:
        number = seen[place, subtest.name] = seen.get((place, subtest.name), 0) + 1
        one = found.setdefault((number, subtest.name), _One(subtest.name))
        one.told[place] = subtest
    return list(found.values())


def _report_of(one: _One, item: pytest.Function, size: int) -> pytest.TestReport:
    """Return one report for all ranks: of the failure, if any rank failed."""
    ranks = one.failed or sorted(one.told)
    hook = item.config.hook
    made = {}
    for place in ranks:
        data = copy.deepcopy(one.told[place].report)  # pytest modifies it
        made[place] = hook.pytest_report_from_serializable(config=item.config, data=data)
        context = data.get("_subtest.context")
        if context is not None:  # pytest applies repr() to values that are repr() results
            made[place].context.kwargs.update(context["kwargs"])
    report: pytest.TestReport = made[ranks[0]]
    report.location = item.location
    report.sections = [
        (f"{title} of rank {rank}", text) for rank in ranks for title, text in made[rank].sections
    ]
    where: Any = report.longrepr
    if isinstance(where, list):  # of a skip, for which pytest needs a tuple
        report.longrepr = where[0], where[1], where[2]
    if one.failed:
        report.longrepr = failures.longrepr_of(
            WorldEnd(
                size=size,
                outcomes=[Outcome(rank=rank, outcome=RankEnd.RAISED) for rank in one.failed],
                reports={rank: one.told[rank].as_failure() for rank in one.failed},
                outputs={},
            ),
            item.config,
        )
    return report


# Pools of finished worlds. A helper needs milliseconds to release the memory that it shares with
# this process; the next world need not wait for that.
_leaving: list[Pool] = []
_SECTION = "output of rank"
_LOG = "log of rank"


def run_test_in_worlds(item: pytest.Function, options: WorldOptions) -> None:
    """Run a test in a world; with Hypothesis, run every example in a new world."""
    __tracebackhide__ = True
    if item.config.getoption("trace", False):  # pdb would quit, and the test pass
        _refuse("--trace is not supported: a rank has no terminal for a debugger")
    if options.is_simulated:
        registry.load("simulated").rank_threads_module().prepare_test(item)
    args = {name: item.funcargs[name] for name in pytest_compat.argument_names(item)}
    function = item.obj
    handle = getattr(function, "hypothesis", None)
    body = function if handle is None else handle.inner_test
    for kind, is_one in (
        ("coroutine", inspect.iscoroutinefunction),
        ("generator", inspect.isgeneratorfunction),
    ):
        if is_one(body):
            _refuse(f"{item.name} is a {kind} function; a test in a world must be a plain function")
    if handle is None:
        run_in_world(PreparedTest(item=item, options=options, body=body, args=(), kwargs=args))
        return

    fail_under_other_schedules = timeouts.ExampleSearch(item)

    @functools.wraps(body)
    def in_world(*given: Any, **drawn: Any) -> None:
        __tracebackhide__ = True
        examples.check_example_arguments([*given, *drawn.values()])
        with fail_under_other_schedules.example(drawn):
            reports = run_in_world(
                PreparedTest(item=item, options=options, body=body, args=given, kwargs=drawn)
            )
            examples.enforce_deadline(deadline, [report.body_s for report in reports.values()])

    setattr(in_world, BODY, body)
    handle.inner_test = in_world
    try:
        with (
            fail_under_other_schedules.whole(),
            examples.without_hypothesis_deadline(function) as deadline,
        ):
            function(**args)
    except BaseException as found:
        examples.leave_out_explanation(found)
        raise
    finally:
        handle.inner_test = body


def run_in_world(prepared: PreparedTest) -> dict[int, RankReport]:
    """Run one body, once, on all ranks. Return the ranks' reports if it passed; otherwise raise an
    exception of pytest or Hypothesis.
    """
    __tracebackhide__ = True
    item, options = prepared.item, prepared.options
    if why := devices.why_device_unavailable(options.device, options.backend):
        _skip(why)
    _make_ready_to_fork(options)
    if why := backends.missing_for(options.backend, options.size):
        _skip(why)
    fixtures.make_folders_base(item, kept=options.is_shared)
    refused = ""
    with turns.wait_for_turn():
        try:
            if options.reuse:
                ended = reused_worlds.run(prepared)
            else:
                with _pool(prepared) as pool:
                    ended = _run_in(pool, prepared)
        except NotSimulatedError as error:
            instead = 'remove backend="simulated"'
            refused = str(error).replace("pass --backend gloo", instead)
        except DistcheckError as error:
            lost = isinstance(error, HelperError)
            what = "the world was lost" if lost else "no world could be created"
            raise pytest.fail.Exception(f"{what}: {error}", pytrace=False) from None
    if refused:
        _refuse(refused)
    failed_subtests = report_subtests(item, ended)
    try:
        _forward_reports(item, ended)
    except Warning:  # with -W error
        if not _left_out_by_all(ended):
            _decide(item, ended)
        raise
    _decide(item, ended)
    if failed_subtests:
        count = len(failed_subtests)
        text = ", ".join(failed_subtests)
        _refuse(f"contains {count} failed subtest{'s' * (count > 1)}: {text}")
    if options.schedules or options.preemptions:
        _try_schedules(prepared)
    return ended.reports


def _make_ready_to_fork(options: WorldOptions) -> None:
    """Import modules that every rank needs once, here; refuse state that cannot be inherited."""
    import torch
    import torch.distributed as dist

    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")
    blas.find_blas_libraries()
    if options.device == "cuda" and torch.cuda.is_initialized():
        _refuse(
            "the pytest process itself has used CUDA, which ranks cannot inherit. A test without "
            "the marker `world`, or a module on import, did it; run that in a world, or "
            "separately"
        )
    if dist.is_available() and dist.is_initialized():
        _refuse(
            "the pytest process itself is in a process group, which ranks cannot inherit. A test "
            "without the marker `world` opened it, and must call destroy_process_group()"
        )


def _run_in(pool: Pool, prepared: PreparedTest) -> WorldEnd:
    world = start_world(pool, ranks_of(prepared.options, RUN))
    return wait(pool, world, collect_rank_messages(world, prepared.item))


def _try_schedules(prepared: PreparedTest) -> None:
    __tracebackhide__ = True
    with turns.wait_for_turn(), _pool(prepared) as pool:
        fail_under_other_schedules(
            pool,
            prepared.item,
            prepared.options,
            lambda options: _run_in(pool, replace(prepared, options=options)),
        )


@contextmanager
def _pool(prepared: PreparedTest) -> Iterator[Pool]:
    """Yield a pool whose processes are forks of this one, with the test in memory."""
    rank.set_test_for_ranks(prepared)
    pool = Pool(ForkedHelper())
    try:
        yield pool
    finally:
        rank.set_test_for_ranks(None)
        pool.let_go()
        wait_for_helpers()
        _leaving.append(pool)


def wait_for_helpers() -> None:
    while _leaving:
        _leaving.pop().close()


def _forward_reports(item: pytest.Function, ended: WorldEnd) -> None:
    """Forward ranks' output, logs, properties, events, warnings, leaks and imports."""
    pytest_compat.drop_sections(item, (_SECTION, _LOG))
    logs = {number: report.log for number, report in ended.reports.items()}
    for kind, texts in ((_SECTION, ended.outputs), (_LOG, logs)):
        for numbers, text in _group_ranks_by_text(texts):
            item.add_report_section("call", f"{kind} {numbers}", text)
    for _, report in sorted(ended.reports.items()):
        new = [pair for pair in report.properties if pair not in item.user_properties]
        item.user_properties += new
    examples.pass_on_to_hypothesis(report.said for _, report in sorted(ended.reports.items()))
    seen: dict[RankWarning, RankWarning] = {}
    for _, report in sorted(ended.reports.items()):
        for warning in report.warnings:
            alike = re.sub(r"\b0x[0-9a-f]+", "", warning.text)  # ignore an object's address
            seen.setdefault(msgspec.structs.replace(warning, text=alike), warning)
    with warnings.catch_warnings():
        # They have passed the rank's filters, which the test may have set.
        warnings.simplefilter("always")
        for warning in seen.values():
            _warn_again(warning)
    left = {number: "; ".join(report.left) for number, report in ended.reports.items()}
    for numbers, text in _group_ranks_by_text(left):
        warnings.warn(LeakWarning(f"{item.nodeid} left on rank {numbers}: {text}"), stacklevel=1)
    for name in {name for report in ended.reports.values() for name in report.preloads}:
        importlib.import_module(name)  # once here, so that no later rank has to


def _group_ranks_by_text(texts: dict[int, str]) -> list[tuple[str, str]]:
    """Group ranks by text, without the empty one: [("0, 2", text), ...]."""
    found = grouped([number for number in sorted(texts) if texts[number]], texts.__getitem__)
    return [(", ".join(map(str, numbers)), text) for text, numbers in found.items()]


def _warn_again(warning: RankWarning) -> None:
    category = failures.exception_class(warning.category)
    if category is None or not issubclass(category, Warning):
        category = UserWarning
    try:
        again = category(warning.text)
    except TypeError:  # a class with other arguments
        again = UserWarning(warning.text)
    warnings.warn_explicit(again, type(again), warning.filename, warning.line)


def _decide(item: pytest.Function, ended: WorldEnd) -> None:
    __tracebackhide__ = True
    ends = {number: report.end for number, report in ended.reports.items()}
    reasons = {end: ended.reports[number].reason for number, end in sorted(ends.items())[::-1]}
    if "exit" in reasons:
        pytest.exit(reasons["exit"])
    if all(outcome.outcome == RankEnd.FINISHED for outcome in ended.outcomes) and not ended.timeout:
        if len(ends) < ended.size:
            raise AssertionError(
                f"{len(ends)} of {ended.size} ranks reported, so there is no result"
            )
        if set(ends.values()) == {"passed"}:
            return
        if set(ends.values()) == {"skipped"}:
            _skip(reasons["skipped"])
        if set(ends.values()) == {"rejected"}:
            examples.reject_example(reasons["rejected"])
        _refuse(failures.why_ranks_disagree(ended))
    if "xfailed" in reasons and not any(_failed_otherwise(o, ends) for o in ended.outcomes):
        pytest.xfail(reasons["xfailed"])
    raise failures.failure_of(ended, item.config)


def _left_out_by_all(ended: WorldEnd) -> bool:
    """Return True if every rank finished, and skipped or rejected the test."""
    ends = [report.end for report in ended.reports.values()]
    finished = all(outcome.outcome == RankEnd.FINISHED for outcome in ended.outcomes)
    whole = finished and not ended.timeout and len(ends) == ended.size
    return whole and set(ends) in ({"skipped"}, {"rejected"})


def _failed_otherwise(outcome: Outcome, ends: Mapping[int, str]) -> bool:
    """Return True if a rank has a primary failure in a world in which another one xfailed."""
    if outcome.outcome in (RankEnd.FINISHED, RankEnd.ENDED) or ends.get(outcome.rank) == "xfailed":
        return False
    return not outcome.lost_peer


def _skip(reason: str) -> NoReturn:
    """Skip with the test's location, like the marker `skip`; the frames here are pluggy's."""
    raise pytest.skip.Exception(reason, _use_item_location=True)


def _refuse(text: str) -> NoReturn:
    """Fail without a traceback: pytest warns if every frame of a failure is hidden."""
    pytest.fail(text, pytrace=False)


# -- schedules of a simulated world ----------------------------------------------------------------


def fail_under_other_schedules(
    pool: Pool,
    item: pytest.Function,
    options: WorldOptions,
    run_again: Callable[[WorldOptions], WorldEnd],
) -> None:
    """Fail the test if it fails under another schedule; `run_again` returns its report."""
    __tracebackhide__ = True
    try:
        found = registry.load("simulated").search_schedules(
            pool,
            ranks_of(options, RUN),
            schedules=number_of_schedules(options.schedules, options.preemptions),
            preemptions=options.preemptions,
            look=lambda: timeouts.fail_if_time_is_up(item),
        )
    except DistcheckError as error:
        raise pytest.fail.Exception(f"schedules could not be run: {error}", pytrace=False) from None
    if why := _why_not_compared(found):
        _refuse(why)
    if found.other is not None:
        _fail(found, item, options, run_again)


def _why_not_compared(found: ScheduleSearchResult) -> str:
    """Return why the schedules prove nothing although the test passed; empty if they do."""
    for run in (found.usual, found.again):
        if run.end != "finished":
            return (
                f"the test passed, and ended in a {run.end} when it was run again under the same "
                f"schedule ({run.what}): it depends on something that no schedule controls, such "
                "as the clock or system randomness"
            )
    if found.other is not None and not found.repeats:
        return (
            f"the test passed, and ended in a {found.other.end} under schedule "
            f"{found.other.schedule} ({found.other.what}), but not each time: it depends on "
            "something that no schedule controls, such as the clock or system randomness"
        )
    if found.other is None and found.late:
        return (
            f"{len(found.late)} of {found.ran} schedules did not finish in time (first "
            f"{found.late[0]}); pass a longer deadline_s"
        )
    return ""


def _fail(
    found: ScheduleSearchResult,
    item: pytest.Function,
    options: WorldOptions,
    run_again: Callable[[WorldOptions], WorldEnd],
) -> None:
    __tracebackhide__ = True
    other, simulated = found.other, registry.load("simulated")
    assert other is not None
    marker = f'@pytest.mark.world({options.size}, backend="{options.backend}", '
    said = (
        f"passed under the usual schedule, and failed under schedule {other.schedule} "
        f"({simulated.describe_search(found)})"
    )
    text = "\n".join(
        [
            said,
            f'run it again: {marker}schedule="{other.schedule}")',
            *simulated.differing_calls(found.usual, other),
        ]
    )
    ended = run_again(replace(options, schedule=other.schedule, schedules=0, preemptions=0))
    if all(outcome.outcome == RankEnd.FINISHED for outcome in ended.outcomes):
        _refuse(f"{text}\nit ended in a {other.end} ({other.what}), and passed when run again")
    failure = failures.failure_of(ended, item.config)
    assert failure.longrepr is not None
    failure.longrepr.addsection("schedule", text)
    raise failure
