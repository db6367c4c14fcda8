"""In the pytest process: starts a world for a test, waits for it, and decides what came of it."""

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

from distcheck import backends
from distcheck.errors import DistcheckError, HelperError, NotSimulatedError
from distcheck.judge.schedules import found_by, timelines
from distcheck.machine import devices
from distcheck.plan.scheduled import how_many
from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.records.schedules import Searched
from distcheck.testing import (
    blas,
    examples,
    failures,
    fixtures,
    pytest_compat,
    rank,
    reused_worlds,
    threads,
    timeouts,
)
from distcheck.testing.failures import Ended
from distcheck.testing.leaks import LeakWarning
from distcheck.testing.marker import WorldOptions
from distcheck.testing.messages import RUN, RankReport, RankWarning, Subtest
from distcheck.testing.rank import Prepared
from distcheck.testing.reused_rank import BODY
from distcheck.testing.waiting import listen, ranks_of, wait
from distcheck.worlds import turns
from distcheck.worlds.launch import search_schedules, start_world
from distcheck.worlds.local.helper_process import ForkedHelper
from distcheck.worlds.pool import Pool


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
    for place, subtest in ended.subtests:
        number = seen[place, subtest.name] = seen.get((place, subtest.name), 0) + 1
        one = found.setdefault((number, subtest.name), _One(subtest.name))
        one.told[place] = subtest
    return list(found.values())


def _report_of(one: _One, item: pytest.Function, size: int) -> pytest.TestReport:
    """One report for all ranks: of the failure, where any has failed."""
    ranks = one.failed or sorted(one.told)
    hook = item.config.hook
    made = {}
    for place in ranks:
        data = copy.deepcopy(one.told[place].report)  # pytest takes it apart
        made[place] = hook.pytest_report_from_serializable(config=item.config, data=data)
        context = data.get("_subtest.context")
        if context is not None:  # pytest has taken the repr() of what was one already
            made[place].context.kwargs.update(context["kwargs"])
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


# Pools of worlds that are over. A helper takes milliseconds to leave the memory that it shares
# with this process; the next world need not wait for that.
_leaving: list[Pool] = []
_SECTION = "output of rank"
_LOG = "log of rank"


def call(item: pytest.Function, options: WorldOptions) -> None:
    """Runs a test in a world; with hypothesis, every example in a world of its own."""
    __tracebackhide__ = True
    if item.config.getoption("trace", False):  # it would quit at the end of an empty input: passed
        _refuse("--trace: a rank has no terminal that a debugger could use")
    if options.is_simulated:
        threads.prepare(item)
    args = {name: item.funcargs[name] for name in pytest_compat.argument_names(item)}
    function = item.obj
    handle = getattr(function, "hypothesis", None)
    body = function if handle is None else handle.inner_test
    for kind, is_one in (
        ("coroutine", inspect.iscoroutinefunction),
        ("generator", inspect.isgeneratorfunction),
    ):
        if is_one(body):
            _refuse(f"{item.name} is a {kind} function: a test in a world is a plain one")
    if handle is None:
        run_in_world(Prepared(item=item, options=options, body=body, args=(), kwargs=args))
        return

    search = timeouts.ExampleSearch(item)

    @functools.wraps(body)
    def in_world(*given: Any, **drawn: Any) -> None:
        __tracebackhide__ = True
        examples.refuse([*given, *drawn.values()])
        with search.example(drawn):
            reports = run_in_world(
                Prepared(item=item, options=options, body=body, args=given, kwargs=drawn)
            )
            examples.hold_to(deadline, [report.body_s for report in reports.values()])

    setattr(in_world, BODY, body)
    handle.inner_test = in_world
    try:
        with search.whole(), examples.own_deadline(function) as deadline:
            function(**args)
    except BaseException as found:
        examples.leave_out_explanation(found)
        raise
    finally:
        handle.inner_test = body


def run_in_world(prepared: Prepared) -> dict[int, RankReport]:
    """One body, once, on all ranks. Returns what they reported if it passed; raises what pytest, or
    hypothesis, understands.
    """
    __tracebackhide__ = True
    item, options = prepared.item, prepared.options
    if why := devices.missing(options.device, options.backend):
        _skip(why)
    _make_ready_to_fork(options)
    if why := backends.missing_for(options.backend, options.size):
        _skip(why)
    fixtures.make_folders_base(item, kept=options.is_shared)
    refused = ""
    with turns.turn():
        try:
            if options.reuse:
                ended = reused_worlds.run(prepared)
            else:
                with _pool(prepared) as pool:
                    ended = _run_in(pool, prepared)
        except NotSimulatedError as error:
            instead = 'leave backend="simulated" away'
            refused = str(error).replace("give --backend gloo", instead)
        except DistcheckError as error:
            lost = isinstance(error, HelperError)
            what = "the world was lost" if lost else "no world could be made"
            raise pytest.fail.Exception(f"{what}: {error}", pytrace=False) from None
    if refused:
        _refuse(refused)
    failed_subtests = pass_on(item, ended)
    try:
        _tell(item, ended)
    except Warning:  # as -W error has it
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
    """What every rank will need is imported here, once; what cannot be inherited is refused."""
    import torch
    import torch.distributed as dist

    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")
    blas.look()
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


def _run_in(pool: Pool, prepared: Prepared) -> Ended:
    world = start_world(pool, ranks_of(prepared.options, RUN))
    return wait(pool, world, listen(world, prepared.item))


def _try_schedules(prepared: Prepared) -> None:
    __tracebackhide__ = True
    with turns.turn(), _pool(prepared) as pool:
        search(
            pool,
            prepared.item,
            prepared.options,
            lambda options: _run_in(pool, replace(prepared, options=options)),
        )


@contextmanager
def _pool(prepared: Prepared) -> Iterator[Pool]:
    """A pool whose processes are forks of this one, and know the test."""
    rank.prepare(prepared)
    pool = Pool(ForkedHelper())
    try:
        yield pool
    finally:
        rank.prepare(None)
        pool.let_go()
        settle()
        _leaving.append(pool)


def settle() -> None:
    """Waits for the helpers of worlds that are over."""
    while _leaving:
        _leaving.pop().close()


def _tell(item: pytest.Function, ended: Ended) -> None:
    """Passes on what ranks printed, logged, recorded, warned of, left open and had to import."""
    pytest_compat.drop_sections(item, (_SECTION, _LOG))
    logs = {number: report.log for number, report in ended.reports.items()}
    for kind, texts in ((_SECTION, ended.outputs), (_LOG, logs)):
        for numbers, text in _alike(texts):
            item.add_report_section("call", f"{kind} {numbers}", text)
    for _, report in sorted(ended.reports.items()):
        new = [pair for pair in report.properties if pair not in item.user_properties]
        item.user_properties += new
    examples.pass_on(report.said for _, report in sorted(ended.reports.items()))
    seen: dict[RankWarning, RankWarning] = {}
    for _, report in sorted(ended.reports.items()):
        for warning in report.warnings:
            alike = re.sub(r"\b0x[0-9a-f]+", "", warning.text)  # but for an object's address
            seen.setdefault(msgspec.structs.replace(warning, text=alike), warning)
    with warnings.catch_warnings():
        # Those of its rank have passed it, and may have been the test's own.
        warnings.simplefilter("always")
        for warning in seen.values():
            _warn_again(warning)
    left = {number: "; ".join(report.left) for number, report in ended.reports.items()}
    for numbers, text in _alike(left):
        warnings.warn(LeakWarning(f"{item.nodeid} left on rank {numbers}: {text}"), stacklevel=1)
    for name in {name for report in ended.reports.values() for name in report.preloads}:
        importlib.import_module(name)  # once here, so that no later rank has to


def _alike(texts: dict[int, str]) -> list[tuple[str, str]]:
    """Ranks by text, the empty one left out: [("0, 2", text), ...]."""
    found: dict[str, list[int]] = {}
    for number in sorted(texts):
        if texts[number]:
            found.setdefault(texts[number], []).append(number)
    return [(", ".join(map(str, numbers)), text) for text, numbers in found.items()]


def _warn_again(warning: RankWarning) -> None:
    category = failures.resolve(warning.category)
    if category is None or not issubclass(category, Warning):
        category = UserWarning
    try:
        again = category(warning.text)
    except TypeError:  # a class that is not made from a text
        again = UserWarning(warning.text)
    warnings.warn_explicit(again, type(again), warning.filename, warning.line)


def _decide(item: pytest.Function, ended: Ended) -> None:
    __tracebackhide__ = True
    ends = {number: report.end for number, report in ended.reports.items()}
    reasons = {end: ended.reports[number].reason for number, end in sorted(ends.items())[::-1]}
    if "exit" in reasons:
        pytest.exit(reasons["exit"])
    if all(outcome.outcome == RankEnd.FINISHED for outcome in ended.outcomes) and not ended.timeout:
        if len(ends) < ended.size:
            raise AssertionError(f"{len(ends)} of {ended.size} ranks reported: nothing is shown")
        if set(ends.values()) == {"passed"}:
            return
        if set(ends.values()) == {"skipped"}:
            _skip(reasons["skipped"])
        if set(ends.values()) == {"rejected"}:
            examples.reject(reasons["rejected"])
        _refuse(failures.divided(ended))
    if "xfailed" in reasons and not any(_failed_otherwise(o, ends) for o in ended.outcomes):
        pytest.xfail(reasons["xfailed"])
    raise failures.failure_of(ended, item.config)


def _left_out_by_all(ended: Ended) -> bool:
    """Whether every rank has come to its end, and found nothing to test."""
    ends = [report.end for report in ended.reports.values()]
    finished = all(outcome.outcome == RankEnd.FINISHED for outcome in ended.outcomes)
    whole = finished and not ended.timeout and len(ends) == ended.size
    return whole and set(ends) in ({"skipped"}, {"rejected"})


def _failed_otherwise(outcome: Outcome, ends: Mapping[int, str]) -> bool:
    """Whether a rank failed for a reason of its own, in a world in which another one xfailed."""
    if outcome.outcome in (RankEnd.FINISHED, RankEnd.ENDED) or ends.get(outcome.rank) == "xfailed":
        return False
    return not outcome.lost_peer


def _skip(reason: str) -> NoReturn:
    """At the test, as the marker `skip` has it: the frames here are pluggy's and ours."""
    raise pytest.skip.Exception(reason, _use_item_location=True)


def _refuse(text: str) -> NoReturn:
    """No frame for a traceback to hide: pytest remarks on a failure of which every one is."""
    pytest.fail(text, pytrace=False)


# -- schedules of a simulated world ----------------------------------------------------------------


def search(
    pool: Pool,
    item: pytest.Function,
    options: WorldOptions,
    run_again: Callable[[WorldOptions], Ended],
) -> None:
    """Fails the test if it fails under another schedule; `run_again` gives the report of one."""
    __tracebackhide__ = True
    try:
        found = search_schedules(
            pool,
            ranks_of(options, RUN),
            schedules=how_many(options.schedules, options.preemptions),
            preemptions=options.preemptions,
            look=lambda: timeouts.check(item),
        )
    except DistcheckError as error:
        raise pytest.fail.Exception(f"schedules could not be run: {error}", pytrace=False) from None
    if why := _why_not_compared(found):
        _refuse(why)
    if found.other is not None:
        _fail(found, item, options, run_again)


def _why_not_compared(found: Searched) -> str:
    """Why schedules show nothing, although the test has passed; empty where they do."""
    for run in (found.usual, found.again):
        if run.end != "finished":
            return (
                f"the test passed, and ended in a {run.end} when it was run again under the same "
                f"schedule ({run.what}): it depends on something that no schedule controls, such "
                "as the clock, or the system's random numbers"
            )
    if found.other is not None and not found.repeats:
        return (
            f"the test passed, and ended in a {found.other.end} under schedule "
            f"{found.other.schedule} ({found.other.what}), but not each time: it depends on "
            "something that no schedule controls, such as the clock, or the system's random numbers"
        )
    if found.other is None and found.late:
        return (
            f"{len(found.late)} of {found.ran} schedules did not end in time (first "
            f"{found.late[0]}); give a longer deadline_s"
        )
    return ""


def _fail(
    found: Searched,
    item: pytest.Function,
    options: WorldOptions,
    run_again: Callable[[WorldOptions], Ended],
) -> None:
    __tracebackhide__ = True
    other = found.other
    assert other is not None
    marker = f'@pytest.mark.world({options.size}, backend="{options.backend}", '
    said = (
        f"passed under the usual schedule, and failed under schedule {other.schedule} "
        f"({found_by(found)})"
    )
    text = "\n".join(
        [
            said,
            f'run it again: {marker}schedule="{other.schedule}")',
            *timelines(found.usual, other),
        ]
    )
    ended = run_again(replace(options, schedule=other.schedule, schedules=0, preemptions=0))
    if all(outcome.outcome == RankEnd.FINISHED for outcome in ended.outcomes):
        _refuse(f"{text}\nit ended in a {other.end} ({other.what}), and passed when run again")
    failure = failures.failure_of(ended, item.config)
    assert failure.longrepr is not None
    failure.longrepr.addsection("schedule", text)
    raise failure
