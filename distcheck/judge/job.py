"""The judging job: runs oracles and checks over a recorded trace, in a separate process."""

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from distcheck.errors.defects import is_defect
from distcheck.errors.masking import masked
from distcheck.judge import checks
from distcheck.judge.checks import sensitivity
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.tally import Tally
from distcheck.judge.jobs import JUDGE, JudgeRequest
from distcheck.judge.oracles import compute_expectation
from distcheck.judge.oracles.forms import FullBatchBuffers, GradientForms
from distcheck.judge.oracles.integers import HeadroomError
from distcheck.judge.oracles.references import AtStep, References
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine import devices, seeds
from distcheck.machine.numerics import NotBoundedError
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import CheckResult
from distcheck.records.mistakes import RevealedMistakes
from distcheck.training.adapters.forms import trained_with
from distcheck.training.building import Ingredients, open_ingredients
from distcheck.worlds.jobs import Descriptors, Reporter
from distcheck.worlds.rendezvous import enter_world_of_one

Pair = tuple[str, str]  # a check and its layer


@JUDGE.does
def judge(job: JudgeRequest, fds: Descriptors, reporter: Reporter) -> list[CheckResult]:
    os.nice(5)  # the ranks of the rerun take priority
    seeds.pin_determinism()
    device = devices.enter(job.case.judging_device, 0)
    trace = TraceReader(fds["trace"], job.layout, device=device)
    rerun = None
    if "rerun" in fds:
        rerun = TraceReader(fds["rerun"], job.layout, baseline=trace, device=device)
    if trained_with(job.case.adaptation.form) == job.case.workload:
        enter_world_of_one()  # required by its reference
    ingredients = open_ingredients(job.case, job.description, fds.get("data"), device)
    seeds.pin_default_dtype(job.case.dtype)
    judged = rerun if job.of_rerun and rerun is not None else trace
    return judge_trace(job, ingredients, judged, rerun, reporter)


def judge_trace(
    job: JudgeRequest,
    ingredients: Ingredients,
    trace: TraceReader,
    rerun: TraceReader | None,
    reporter: Reporter | None = None,
) -> list[CheckResult]:
    """Run every planned check over the job's steps. A check that crashes is unknown, never a pass.
    Each step's expectations are computed first, then compared, and freed before the next step.
    """
    references = References(ingredients, job.contract, trace)
    evidence = evidence_of(job, references, rerun)
    runs = [CheckRun(p.check, p.layer) for p in job.planned]
    for step in sorted(job.steps):
        if reporter is not None:
            reporter.progress(step, "what is expected")
        expected = expect_step(references, step, [run.pair for run in runs if run.goes_on])
        for run in runs:
            if reporter is not None and run.goes_on:
                reporter.progress(step, f"check {run.pair[0]}")
            run.compare_step(evidence, expected)
    of_run = [CheckRun(p.check, p.layer) for p in job.of_run]
    return [run.conclude(evidence) for run in (*runs, *of_run)]


def evidence_of(job: JudgeRequest, references: References, rerun: TraceReader | None) -> Evidence:
    """Return the input of every check, without the expectations of a step."""
    return Evidence(
        case=job.case,
        facts=job.facts,
        trace=references.whole,
        rerun=rerun,
        holding=references.holding,
        mesh=references.mesh,
    )


def expect_step(
    references: References, step: int, planned: Sequence[Pair]
) -> dict[Pair, Expectation | Exception]:
    """Compute only the expectations that the planned checks need at a step. If that raises an
    error, the error takes the place of the expectation.
    """
    at = references.at(step)
    headers = tuple(at.trace.header(rank, step) for rank in range(at.trace.layout.world))
    found: dict[Pair, Expectation | Exception] = {}
    for pair in planned:
        try:
            found[pair] = Expectation(
                step=step, headers=headers, what=compute_expectation(*pair, at)
            )
        except Exception as error:
            found[pair] = error
    known = {pair: one for pair, one in found.items() if isinstance(one, Expectation)}
    of_gradients = {p: one for p, one in known.items() if isinstance(one.what, GradientForms)}
    try:
        shown = _revealed_mistakes(
            at,
            {layer: one.what for (_, layer), one in of_gradients.items()},
            [one.what for one in known.values() if isinstance(one.what, FullBatchBuffers)],
        )
        return found | {p: replace(one, shown=shown[p[1]]) for p, one in of_gradients.items()}
    except Exception as error:
        return found | dict.fromkeys(of_gradients, error)


def _revealed_mistakes(
    at: AtStep, gradients: Mapping[str, GradientForms], after: Sequence[FullBatchBuffers]
) -> Mapping[str, tuple[RevealedMistakes | None, ...]]:
    if at.references.mesh is None:
        return sensitivity.mistakes_shown_at_step(at.trace, at.step, gradients)
    nothing = (None,) * len(at.specs)
    if not at.communicating_form:  # a gradient there is no mean of separate local ones
        return dict.fromkeys(gradients, nothing)
    moves = any(
        one.counts for forms in after for one in sensitivity.mistakes_shown_by_buffers(forms)
    )
    found = {
        layer: sensitivity.mistakes_shown_by_exchange(at.trace.ranks, forms)
        for layer, forms in gradients.items()
    }
    return {
        layer: nothing if moves and not any(one.counts for one in shown) else shown
        for layer, shown in found.items()
    }


class CheckRun:
    """One check under one layer, over the job's steps."""

    def __init__(self, check: str, layer: str) -> None:
        self.pair = check, layer
        self._tally = Tally(check, layer)
        self._kept: list[Expectation] = []
        self._ended: CheckResult | None = None

    @property
    def goes_on(self) -> bool:
        """Return True unless the check has raised an error."""
        return self._ended is None

    def compare_step(
        self, evidence: Evidence, expected: Mapping[Pair, Expectation | Exception]
    ) -> None:
        """Compare one step. A check over all steps keeps the expectation until the end."""
        if not self.goes_on:
            return
        try:
            expectation = expected[self.pair]
            if isinstance(expectation, Exception):
                raise expectation
            if self._is_over_steps:
                self._kept.append(expectation)
            else:
                self._compare(evidence, [expectation])
        except Exception as error:
            self._ended = self._result_of_error(error)

    def conclude(self, evidence: Evidence) -> CheckResult:
        try:
            if self.goes_on and self._is_over_steps:
                self._compare(evidence, self._kept)
        except Exception as error:
            self._ended = self._result_of_error(error)
        return self._ended or self._tally.result()

    @property
    def _is_over_steps(self) -> bool:
        return bool(getattr(checks.load_check(self.pair[0]), "OVER_STEPS", False))

    def _compare(self, evidence: Evidence, expectations: Sequence[Expectation]) -> None:
        with_these = replace(evidence, expectations=tuple(expectations))
        checks.load_check(self.pair[0]).compare(with_these, self._tally)

    def _result_of_error(self, error: Exception) -> CheckResult:
        if isinstance(error, HeadroomError | NotBoundedError | NotRecordedError):
            return _not_judged(self._tally, str(error))
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        reason = f"the check itself raised an error: {type(error).__name__}: {error} ({where})"
        whole = "".join(traceback.format_exception(error))
        defect = masked(whole) if is_defect(type(error).__name__, whole) else ""
        return msgspec.structs.replace(_not_judged(self._tally, reason), defect=defect)


def _not_judged(tally: Tally, reason: str) -> CheckResult:
    tally.remark(reason)
    so_far = tally.result()
    verdict = so_far.verdict if so_far.verdict == "fail" else "unknown"
    return msgspec.structs.replace(so_far, verdict=verdict)
