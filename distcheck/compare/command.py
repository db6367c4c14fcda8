"""`distcheck compare`: reports if an upgrade or a change of the code changed bits, and by how much.

1  read     the saved cases of both runs, and their verdicts
2  run      without a second run, the cases of the first run here and now
3  pair     cases by id; all other fields of a pair must be equal
4  compare  traces, in a process with torch
5  judge    identical bits pass; changed bits must be within bounds, and both runs correct
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from distcheck.compare.records import (
    COMPARE,
    CaseComparison,
    CompareRequest,
    RunsComparison,
    compared_case,
)
from distcheck.compare.screen import KnownCase, comparison_document, render, render_page
from distcheck.errors import CannotRunError, ExitCode, UsageError
from distcheck.plan.cases import check_case
from distcheck.plan.costs import estimated_s
from distcheck.plan.provenance import changes_affecting_bits
from distcheck.recordings.differing import BY_VALUE, TraceComparison
from distcheck.records import Case, VerdictName
from distcheck.reports import json_report
from distcheck.reports.documents import read_report
from distcheck.reports.files import check_outputs, write_document, write_text
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for
from distcheck.store.origin import origin_here
from distcheck.store.run_folder import RunStore, SavedCase, SavedTrace, read_trace, saved_traces
from distcheck.store.trust import require_trust
from distcheck.verification.run import RunOptions, run_cases
from distcheck.worlds.launch import run_job
from distcheck.worlds.pool import Pool

SCHEMA = "distcheck.comparison/1"
# fields that do not affect the computation
_MAY_DIFFER = ("id", "deadline_s", "data_dir", "rerun", "separate", "initial")


@dataclass(frozen=True)
class SavedRun:
    """Contents of a run directory: traces of its cases, if any, and all verdicts by case id."""

    folder: Path
    cases: dict[str, SavedTrace]
    verdicts: dict[str, VerdictName]


def compare_command(
    then: str,
    now: str | None,
    *,
    bits: bool,
    files: Mapping[str, str],
    trusted: bool,
    quiet: bool,
    scores: bool = False,
) -> int:
    """Compare two runs, print the result and write files; return the exit code."""
    check_outputs(files)
    origin = origin_here()
    if scores:
        comparison, known = _compare_scores(then, now, bits=bits)
    elif _is_job(then) or (now is not None and _is_job(now)):
        comparison, known = _compare_jobs(then, now, bits=bits)
    else:
        comparison, known = _compare_runs(then, now, bits=bits, trusted=trusted, quiet=quiet)
    comparison = msgspec.structs.replace(comparison, made=origin)
    if "-" not in files.values():
        render(comparison, console_for(), quiet=quiet)
    if "json" in files:
        write_text(files["json"], render_json(comparison))
    words = [
        "distcheck",
        "compare",
        then,
        *([now] if now else []),
        *(["--bits"] * bits),
        *(["--scores"] * scores),
    ]
    if "html" in files:
        write_text(
            files["html"], render_page(comparison, command=shlex.join(words)), option="--html"
        )
    if others := {name: path for name, path in files.items() if name not in ("json", "html")}:
        document = comparison_document(comparison, known, made=origin, command=shlex.join(words))
        write_document(others, document)
    codes = {"pass": ExitCode.PASS, "fail": ExitCode.MISMATCH, "unknown": ExitCode.UNKNOWN}
    return int(codes[comparison.verdict])


Compared = tuple[RunsComparison, dict[str, KnownCase]]


def _is_job(folder: str) -> bool:
    return any(Path(folder).glob("rank-*/rank.json"))


def _compare_jobs(then: str, now: str | None, *, bits: bool) -> Compared:
    """Compare two jobs, without running any: a job's command is not distcheck's to run."""
    if now is None:
        raise UsageError(
            f"{then} is the recording of a job, which compare does not rerun; pass the folder of "
            "the second recording: distcheck compare A B"
        )
    from distcheck.compare.jobs import compare_jobs  # imports torch

    compared, known = compare_jobs(Path(then), Path(now), bits=bits)
    return RunsComparison(then=then, now=now, cases=(compared,)), {compared.id: known}


def _compare_scores(then: str, now: str | None, *, bits: bool) -> Compared:
    if now is None:
        raise UsageError("compare --scores needs two files: distcheck compare A B --scores")
    from distcheck.compare.scores import compare_scores  # imports torch

    compared, known = compare_scores(Path(then), Path(now), bits=bits)
    return RunsComparison(then=then, now=now, cases=(compared,)), {compared.id: known}


def _compare_runs(
    then: str, now: str | None, *, bits: bool, trusted: bool, quiet: bool
) -> Compared:
    """Compare two runs of cases, or one with the results of the same cases here and now."""
    earlier = saved_run(Path(then))
    if now is None:
        cases = _checked_cases(earlier)
        made = {name: trace.saved.made for name, trace in earlier.cases.items()}
        require_trust(then, cases, made, doing="comparing with", trusted=trusted)
        keep = RunStore.of_own(keep_everything=True, spare=Path(then))
        folder = keep.folder
    else:
        cases, keep, folder = [], None, Path(now)
    pool = Pool()
    try:
        if keep is not None:
            _run_again(earlier, cases, keep, pool, quiet=quiet)
        later = saved_run(folder)
        pool.wait_ready()
        compared = [
            _compare(pool, name, earlier, later, bits=bits)
            for name in dict.fromkeys([*earlier.cases, *later.cases])
        ]
    except BaseException:
        if keep is not None:
            keep.discard_if_unused()
        raise
    finally:
        pool.close()
    known = {
        name: KnownCase(saved.case, saved.environment, saved.facts.strategy_file,
                        saved.facts.strategy_line)
        for name, trace in {**earlier.cases, **later.cases}.items()
        for saved in (trace.saved,)
    }  # fmt: skip
    return RunsComparison(
        then=then,
        now=now or "here and now",
        cases=tuple(compared),
        saved_to=None if keep is None else str(folder),
    ), known


def _checked_cases(earlier: SavedRun) -> list[Case]:
    """Return the cases of a run. Raises UsageError for an invalid one, perhaps after an edit."""
    try:
        return [check_case(trace.saved.case) for trace in earlier.cases.values()]
    except UsageError as error:
        text = f"{earlier.folder} holds a case that cannot run: {error}"
        raise UsageError(text) from error


def _run_again(
    earlier: SavedRun, cases: Sequence[Case], keep: RunStore, pool: Pool, *, quiet: bool
) -> None:
    cases = [
        msgspec.structs.replace(case, initial=_initial_state(earlier.cases[case.id].folder))
        for case in cases
    ]
    with LiveProgress(Console(stderr=True, quiet=quiet), cost=estimated_s) as listener:
        report = run_cases(cases, pool, RunOptions(keep=keep, listener=listener))
    if report.save_error:
        raise CannotRunError(f"{report.save_error}; free some space, or compare in another folder")


def _initial_state(trace: Path) -> str:
    """Return the file of a trace's initial state, "" if there is none. Both runs start from it, so
    that a different rounding of the initialization does not end their comparison.
    """
    file = trace / "run-1" / "slot-000.safetensors"
    return str(file.absolute()) if file.is_file() else ""


def saved_run(folder: Path) -> SavedRun:
    """Return the contents of a run directory, without tensors. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder; pass a folder that distcheck record, verify --save or "
            "job --save wrote, or --scores for two files of distcheck.scores"
        )
    found = {trace.saved.case.id: trace for trace in saved_traces(folder)}
    reports = read_report(folder / "report.json")["cases"]
    said = {report["case"]["id"]: report["verdict"] for report in reports}
    return SavedRun(folder, found, said)


def render_json(comparison: RunsComparison) -> str:
    """Format the comparison as JSON; docs/goldens.md explains every key."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "verdict": comparison.verdict,
        **msgspec.to_builtins(comparison),
    }
    return json_report.render(document)


def _compare(pool: Pool, name: str, then: SavedRun, now: SavedRun, *, bits: bool) -> CaseComparison:
    if name not in then.cases or name not in now.cases:
        there, missing = (then, now) if name in then.cases else (now, then)
        return _unknown_case(name, f"{there.folder} has this case; {missing.folder} does not")
    traces = then.cases[name], now.cases[name]
    one, two = (trace.saved for trace in traces)
    other = [
        f"{field} was {getattr(one.case, field)}, but is {getattr(two.case, field)}"
        for field in one.case.__struct_fields__
        if field not in _MAY_DIFFER and getattr(one.case, field) != getattr(two.case, field)
    ]
    if other:
        return _unknown_case(name, f"the cases differ: {'; '.join(other)}")
    found = _compare_traces(pool, *traces)
    changed = changes_affecting_bits(one.made, two.made, two.case)
    said = (then.verdicts.get(name, "unknown"), now.verdicts.get(name, "unknown"))
    unseen = found.not_judged or found.kind not in BY_VALUE
    is_far = found.by_digest and found.first is not None and unseen
    remark = _distance_unknown(one, two) if is_far else ""
    return compared_case(name, found, changed, said, bits=bits, remark=remark)


def _distance_unknown(one: SavedCase, two: SavedCase) -> str:
    """Return the remedy for a distance that digests do not give."""
    lacking = [name for name, run in (("earlier", one), ("later", two)) if not run.tensors]
    which = f"the {lacking[0]} run" if len(lacking) == 1 else "both runs"
    where = "on its machine" if len(lacking) == 1 else "each on its machine"
    return (
        f"digests do not show the size of a difference; to measure it, record {which} without "
        "--digests, "
        f"{where}, and compare again"
    )


def _compare_traces(pool: Pool, then: SavedTrace, now: SavedTrace) -> TraceComparison:
    one, two = then.saved, now.saved
    fds: list[int] = []
    try:
        firsts = []
        for trace in (then, now):
            own = read_trace(pool, trace, digests_suffice=True)
            fds += own
            firsts.append(own[0])
        job = CompareRequest(
            case=two.case,
            contracts=(one.facts.contract, two.facts.contract),
            training=one.facts.training,
            layouts=(one.layout, two.layout),
            tensors=one.tensors and two.tensors,
        )
        return run_job(pool, COMPARE, job, dict(zip(COMPARE.descriptors, firsts, strict=True)))
    finally:
        for fd in fds:
            os.close(fd)


def _unknown_case(name: str, reason: str) -> CaseComparison:
    return CaseComparison(id=name, verdict="unknown", bits="not compared", reason=reason)
