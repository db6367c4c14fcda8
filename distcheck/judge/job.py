"""The judging job: oracles and checks over a recorded trace, in a separate process."""

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from distcheck.errors.defects import is_defect
from distcheck.errors.masking import masked
from distcheck.judge import checks
from distcheck.judge.checks import sensitivity
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.tally import Tally
from distcheck.judge.jobs import JUDGE, JudgeRequest
from distcheck.judge.oracles import expect
from distcheck.judge.oracles.forms import AfterBatch, GradientForms
from distcheck.judge.oracles.lattice import HeadroomError
from distcheck.judge.oracles.references import References
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine import devices, seeds
from distcheck.machine.numerics import NotBoundedError
from distcheck.recordings.traces.header import StepHeader
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import CheckResult
from distcheck.records.mistakes import Shown
from distcheck.training.adapters.forms import trained_with
from distcheck.training.building import Ingredients, open_ingredients
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.rendezvous import enter_world_of_one
from distcheck.worlds.reporter import Reporter

Pair = tuple[str, str]  # a check and its layer


@JUDGE.does
def judge(job: JudgeRequest, fds: Descriptors, reporter: Reporter) -> list[CheckResult]:
    os.nice(5)  # the ranks of the rerun take priority
    seeds.pin_determinism()
    device = devices.enter(job.case.judged_on, 0)
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
    Step by step, expectations for the checks' layers are computed first, then compared; those of a
    step are freed before the next one.
    """
    references = References(ingredients, job.contract, trace)
    evidence = evidence_of(job, ingredients, references, rerun)
    sittings = [_Sitting(*pair) for pair in job.planned]
    for step in sorted(job.steps):
        if reporter is not None:
            reporter.progress(step, "what is expected")
        expected = expect_step(
            references, step, [(s.check, s.layer) for s in sittings if s.goes_on]
        )
        for sitting in sittings:
            if reporter is not None and sitting.goes_on:
                reporter.progress(step, f"check {sitting.check}")
            sitting.hear(evidence, expected)
    of_run = [_Sitting(*pair) for pair in job.of_run]
    return [sitting.conclude(evidence) for sitting in (*sittings, *of_run)]


def evidence_of(
    job: JudgeRequest, ingredients: Ingredients, references: References, rerun: TraceReader | None
) -> Evidence:
    """Return the input of every check, without the expectations of a step."""
    return Evidence(
        case=ingredients.case,
        contract=job.contract,
        trace=references.whole,
        rerun=rerun,
        train_size=ingredients.samples.size(train=True),
        own_sampler=ingredients.loaded.sampler is not None,
        draws_random_numbers=job.draws_random_numbers,
        training=ingredients.training,
        must_happen=ingredients.must_happen,
        averages=references.averages,
        holding=references.holding,
        mesh=references.mesh,
    )


@dataclass(frozen=True)
class Expected:
    """The expectations at one step, or the errors that prevented them."""

    step: int
    headers: tuple[StepHeader, ...]
    what: Mapping[Pair, Any]
    shown: Mapping[str, tuple[Shown | None, ...]]
    errors: Mapping[Pair, Exception]

    def of(self, check: str, layer: str) -> Expectation:
        """Return the expectation for one check and layer, or raise the error that prevented it."""
        pair = (check, layer)
        if pair in self.errors:
            raise self.errors[pair]
        what = self.what[pair]
        shown = self.shown[layer] if isinstance(what, GradientForms) else ()
        return Expectation(step=self.step, headers=self.headers, what=what, shown=shown)


def expect_step(references: References, step: int, planned: Sequence[Pair]) -> Expected:
    """Compute the expectations that the planned checks need at a step, and no more."""
    at = references.at(step)
    headers = tuple(at.trace.header(rank, step) for rank in range(at.trace.layout.world))
    what: dict[Pair, Any] = {}
    errors: dict[Pair, Exception] = {}
    for pair in planned:
        try:
            what[pair] = expect(*pair, at)
        except Exception as error:
            errors[pair] = error
    shown: dict[str, tuple[Shown | None, ...]] = {}
    gradients = {
        layer: forms for (_, layer), forms in what.items() if isinstance(forms, GradientForms)
    }
    try:
        if references.mesh is None:
            shown = sensitivity.of_step(at.trace, step, gradients)
        elif at.exchanges_itself:
            after = [forms for forms in what.values() if isinstance(forms, AfterBatch)]
            moves = any(one.counts for forms in after for one in sensitivity.of_buffers(forms))
            for layer, forms in gradients.items():
                found = sensitivity.of_exchange(at.trace.ranks, forms)
                silent = moves and not any(one.counts for one in found)
                shown[layer] = (None,) * len(found) if silent else found
        else:  # a gradient there is no mean of separate local ones
            shown = dict.fromkeys(gradients, (None,) * len(at.specs))
    except Exception as error:
        errors |= {pair: error for pair, forms in what.items() if isinstance(forms, GradientForms)}
    return Expected(step, headers, what, shown, errors)


class _Sitting:
    """One check under one layer, over the job's steps."""

    def __init__(self, check: str, layer: str) -> None:
        self.check, self.layer = check, layer
        self._tally = Tally(check, layer)
        self._kept: list[Expectation] = []
        self._ended: CheckResult | None = None

    @property
    def goes_on(self) -> bool:
        """True unless the check itself has raised an error."""
        return self._ended is None

    def hear(self, evidence: Evidence, expected: Expected) -> None:
        """Compare one step; checks over all steps keep the expectation until the end."""
        if not self.goes_on:
            return
        try:
            expectation = expected.of(self.check, self.layer)
            module = checks.load(self.check)
            if getattr(module, "OVER_STEPS", False):
                self._kept.append(expectation)
            else:
                module.compare(replace(evidence, expectations=(expectation,)), self._tally)
        except Exception as error:
            self._ended = self._failed(error)

    def conclude(self, evidence: Evidence) -> CheckResult:
        if self.goes_on:
            try:
                module = checks.load(self.check)
                if getattr(module, "OVER_STEPS", False):
                    kept = replace(evidence, expectations=tuple(self._kept))
                    module.compare(kept, self._tally)
            except Exception as error:
                self._ended = self._failed(error)
        return self._ended or self._tally.result()

    def _failed(self, error: Exception) -> CheckResult:
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
