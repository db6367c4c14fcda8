"""The job that judges: oracles and checks over a recorded trace, in a process of their own."""

import os
import traceback

import msgspec

from distcheck.errors.defects import is_defect
from distcheck.errors.masking import masked
from distcheck.judge import checks
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.tally import Tally
from distcheck.judge.jobs import JUDGE, JudgeRequest
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.judge.oracles.lattice import HeadroomError
from distcheck.judge.oracles.references import References
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine import devices, seeds
from distcheck.machine.numerics import NotBoundedError
from distcheck.records import CheckResult
from distcheck.training.building import Ingredients, open_ingredients
from distcheck.training.traces.reader import TraceReader
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.local.child import Reporter


@JUDGE.does
def judge(job: JudgeRequest, fds: Descriptors, reporter: Reporter) -> list[CheckResult]:
    """Runs the planned checks."""
    os.nice(5)  # the ranks of the rerun go first, and leave gaps
    seeds.pin_determinism()
    device = devices.enter(job.case.judged_on, 0)
    trace = TraceReader(fds["trace"], job.layout, device=device)
    rerun = None
    if "rerun" in fds:
        rerun = TraceReader(fds["rerun"], job.layout, baseline=trace, device=device)
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
    """Every planned check over the job's steps. A check that crashes is unknown, never a pass."""
    # What is expected follows from the ranks that have data, as if they were all that there are.
    among = trace.of_ranks(ingredients.case.with_data)
    references = References(ingredients, job.contract, among)
    expectations = [
        StepExpectation(ingredients, job.contract, among, references, step)
        for step in sorted(job.steps)
    ]
    evidence = Evidence(ingredients, job.contract, trace, expectations, rerun)
    results = []
    for name, layer in job.planned:
        if reporter is not None:
            reporter.progress(job.steps[0] if job.steps else 0, f"check {name}")
        tally = Tally(name, layer)
        try:
            checks.load(name).compare(evidence, tally)
        except (HeadroomError, NotBoundedError, NotRecordedError) as error:
            results.append(_not_judged(tally, str(error)))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            reason = f"the check itself failed: {type(error).__name__}: {error} ({where})"
            whole = traceback.format_exc()
            defect = masked(whole) if is_defect(type(error).__name__, whole) else ""
            results.append(msgspec.structs.replace(_not_judged(tally, reason), defect=defect))
        else:
            results.append(tally.result())
    return results


def _not_judged(tally: Tally, reason: str) -> CheckResult:
    tally.remark(reason)
    so_far = tally.result()
    verdict = so_far.verdict if so_far.verdict == "fail" else "unknown"
    return msgspec.structs.replace(so_far, verdict=verdict)
