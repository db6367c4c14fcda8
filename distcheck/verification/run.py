"""The steps of a verification:

1  plan       the request becomes cases                          plan/cases.py
2  prepare    data files are read once, into shared memory       preparation.py
3  inspect    strategies, workloads and the machine              inspection.py
4  calibrate  reduction orders are confirmed on this machine     oracles/calibration.py
5  run        worlds train and record; judges compare            session.py
6  report     checks become verdicts, verdicts a report          verdicts.py, reports/
"""

import atexit
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import msgspec

from distcheck import registry
from distcheck.errors import (
    CannotRunError,
    DistcheckError,
    HelperError,
    MembershipError,
    RankLostError,
)
from distcheck.plan import source_files
from distcheck.plan.provenance import Provenance, changes_affecting_bits, provenance_of
from distcheck.plan.thorough import NO_EXTRAS, ThoroughExtras
from distcheck.records import Case, CaseReport, Origin, Report, RunPlan, set_report_renderers
from distcheck.reports import terminal
from distcheck.store.origin import origin_here
from distcheck.store.run_folder import RunStore
from distcheck.verification import followups, limits, preparation, verdicts
from distcheck.verification.case_run import CaseRun, is_separate
from distcheck.verification.followups import FollowUp
from distcheck.verification.guesses import Guesses
from distcheck.verification.report_builder import (
    GivenUpError,
    Interrupted,
    ReportBuilder,
    abandoned_report,
    attach_report,
    report_without_results,
)
from distcheck.verification.session import Listener, Session, SilentListener
from distcheck.workloads.datasets import FILE_DATASETS, SYNTHETIC
from distcheck.worlds import turns
from distcheck.worlds.local import late_compiler
from distcheck.worlds.pool import Pool
from distcheck.worlds.surroundings import HASH_SEED, HASH_SEEDS

# Source text that needs torch's compiler in every rank. A wrong match costs only time: later ranks
# are forked with the modules that earlier ones imported.
_USES_COMPILER = (
    r"DistributedDataParallel|DDP\(|\bfsdp|FSDP|fully_shard|DTensor|distributed\.tensor"
    r"|torch\.compile|utils\.checkpoint|distributed\.optim"
)

set_report_renderers(
    failure=terminal.render_failure,
    screen=terminal.terminal_text,
    page=terminal.html_for_notebook,
    document=terminal.json_document,
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run.

    keep       store of cases, traces and the report
    listener   receives progress
    download   True to fetch missing files of a data set
    made       provenance of earlier runs, by case id
    whole      the plan that the cases are part of
    follow_up  True to run failures again that `followups` may explain
    left_out   reasons for cases of the plan that are not run
    extras     searches, and worlds that may be left out
    """

    keep: RunStore | None = None
    listener: Listener | None = None
    download: bool = False
    made: Mapping[str, Provenance] = field(default_factory=dict)
    whole: RunPlan | None = None
    follow_up: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    extras: ThoroughExtras = NO_EXTRAS


_USUAL = RunOptions()


def verify_cases(cases: Sequence[Case], options: RunOptions = _USUAL) -> Report:
    """Run and judge cases on this process's pool, with follow-ups; test processes take turns."""
    with _pool_lock, turns.wait_for_turn():
        pool = shared_pool()
        try:
            return run_cases(cases, pool, replace(options, follow_up=True))
        except DistcheckError:
            raise
        except BaseException:
            pool.close()  # it may be interrupted within a message
            raise


def run_cases(cases: Sequence[Case], pool: Pool, options: RunOptions = _USUAL) -> Report:
    """Run and judge cases; return the report. Raises Interrupted, with a partial report, on Ctrl-C
    and SIGTERM, and GivenUpError if the helper or a process that provides ranks has ended.
    """
    origin, whole = origin_here(), options.whole
    try:
        return _run_cases(cases, pool, options, origin)
    except (Interrupted, GivenUpError):
        raise
    except KeyboardInterrupt:
        early = report_without_results(
            cases, "not judged: interrupted", whole, origin, unfinished=True
        )
        raise Interrupted(msgspec.structs.replace(early, interrupted=True)) from None
    except (HelperError, RankLostError) as error:
        lost = report_without_results(cases, str(error), whole, origin, unfinished=True)
        raise GivenUpError(abandoned_report(lost, error)) from error


def _run_cases(cases: Sequence[Case], pool: Pool, options: RunOptions, origin: Origin) -> Report:
    listener, keep, extras = options.listener or SilentListener(), options.keep, options.extras
    made = options.made
    listener.preparing("importing torch")
    if any(
        source_files.matches_in_sources(_USES_COMPILER, spec)
        for spec in {c.strategy for c in cases}
    ):
        pool.will_need([late_compiler.NAME])
    pool.open()
    if any(is_separate(case) for case in cases):
        pool.open_interpreters()
    _write_cases(keep, cases, {})
    try:
        pool.wait_ready()
    except MembershipError as error:
        return report_without_results(cases, str(error), options.whole, origin)
    data_name = next((c.data for c in cases if c.data in FILE_DATASETS), SYNTHETIC)
    listener.preparing(f"preparing data {data_name}")
    where = cases[0].data_dir
    with preparation.load_shared_dataset(pool, data_name, where, download=options.download) as data:
        listener.preparing("inspecting strategies and workloads")
        facts = preparation.inspect(pool, cases, data)
        # PYTHONHASHSEED of the first world, and of the rerun's interpreters
        hash_seeds = [HASH_SEED, *(HASH_SEEDS if any(map(is_separate, cases)) else ())]
        environment = {"hash_seeds": hash_seeds, **facts.environment, **pool.describe()}
        here = {case.id: provenance_of(case, environment) for case in cases}
        _write_cases(keep, cases, here)
        earlier = {} if keep is None else keep.finished(cases, here)
        about = dict(zip([case.id for case in cases], facts.cases, strict=True))
        left = [case for case in cases if case.id not in earlier]
        listener.preparing("calibrating reduction orders")
        known = [about[case.id] for case in left]
        runs, out = preparation.plan_runs(pool, left, known, data, extras.spare)
        if keep is not None:
            keep.check_space(sum(limits.trace_bytes(run.case, run.layout) for run in runs))
        listener.planned([run.case for run in runs], before=len(earlier))
        for run in runs:
            if run.case.id in made:
                run.notes += _changes_since(made[run.case.id], here[run.case.id], run.case)
        builder = ReportBuilder(pool, runs, here, environment, keep, earlier)
        out = {**options.left_out, **out}
        builder.plan, builder.left_out, builder.settles = options.whole, out, options.follow_up
        if extras.required:
            builder.left_out, builder.unknown = {}, _unknown(left, out, origin)
        builder.made = origin
        session = Session(pool, data, listener)
        session.after_hang = extras.after_hang
        with attach_report(builder):
            _run_all(runs, session, builder, options)
            if options.follow_up:
                _follow_up(session, builder)
            for report in builder.finished:
                if followups.needs_schedule_search(report):
                    builder.amend(followups.with_schedule_check(session, report))
            if extras.searches:
                registry.load("explore").search_thoroughly(
                    pool,
                    extras.searches,
                    builder.finished,
                    builder.reasons_not_counted,
                    keep=keep is not None,
                    show=listener.preparing,
                    enter=builder.add_search,
                )
    return builder.report()


def _run_all(
    runs: Sequence[CaseRun], session: Session, builder: ReportBuilder, options: RunOptions
) -> None:
    """Run planned cases to their end; those with a wrongly guessed form again, in the right one."""
    guesses = Guesses()
    # With --fail-fast, a guess is decided before other strategies run, and before the run ends.
    later: list[CaseRun] = []
    failed: list[Case] = []

    def enter(run: CaseRun) -> str | None:
        if options.follow_up and guesses.keep(run, builder.report_of, session.set_aside):
            if options.extras.fail_fast:
                later.extend(session.set_aside())
            return None
        verdict = builder.enter(run)
        if options.extras.fail_fast and builder.stands(run.case):
            failed.append(run.case)
        if failed and not guesses.open():
            session.end_after(failed[0])
        return verdict

    with closing(guesses):
        left: Sequence[CaseRun] = runs
        while left:
            session.run(left, on_finished=enter)
            for guess in guesses.open():
                left = guess.settle(session, builder, enter)
                session.run(left, on_finished=enter)
            left, later[:] = [*later], []


def _unknown(cases: Sequence[Case], out: Mapping[str, str], origin: Origin) -> list[CaseReport]:
    left = [case for case in cases if case.id in out]
    return [report_without_results([case], out[case.id], None, origin).cases[0] for case in left]


def _write_cases(
    keep: RunStore | None, cases: Sequence[Case], made: Mapping[str, Provenance]
) -> None:
    """Write the cases of a run. Raises CannotRunError if that fails for a run to be kept."""
    try:
        for case in cases if keep is not None else ():
            assert keep is not None
            keep.write_case(case, made.get(case.id))
    except OSError as error:
        assert keep is not None
        if keep.keep_everything:
            raise CannotRunError(f"{keep.folder} cannot be written: {error.strerror}") from error


def _follow_up(session: Session, builder: ReportBuilder) -> None:
    done: list[tuple[FollowUp, CaseReport]] = []
    for each in followups.follow_ups(builder.finished):

        def enter(run: CaseRun, each: FollowUp = each) -> str:
            report = verdicts.build_case_report(run, replay=each.case.command_line)
            done.append((each, report))
            if each.replaces(report):
                builder.replace(run)
            return report.verdict

        if runs := preparation.plan_additional_runs(session.pool, [each.case], session.data):
            session.listener.progress(each.case, "rerun after a failure")
            session.run(runs, on_finished=enter)
    builder.add_follow_ups(done)


def _changes_since(then: Provenance, now: Provenance, case: Case) -> tuple[str, ...]:
    found = changes_affecting_bits(then, now, case)
    return (f"since this case was saved: {'; '.join(map(str, found))}",) if found else ()


_pool: Pool | None = None
_pool_lock = threading.Lock()


def shared_pool() -> Pool:
    """Return this process's pool. A forked child creates a new one."""
    global _pool
    if _pool is None or not _pool.usable:
        _pool = Pool()
        atexit.register(_pool.close)
    return _pool
