"""Causes outside the gradients: data, initial state, buffers, RNG, optimizer, reruns."""

from collections.abc import Iterator, Mapping, Sequence

from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.judge.diagnosis.wording import Failures, place_of_divergence, positions_text
from distcheck.judge.rerun_bisection import BisectionResult
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult, Diagnosis, FindingKind
from distcheck.records.causes import name_cause
from distcheck.records.layers import BITWISE, ROUNDING
from distcheck.records.odd_ranks import ranks_in_words


def explain(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    """Return every cause outside the gradients that failed checks and measurements support."""
    found = _initial(failed, facts)
    if data := _result_of("data", failed):
        found += _data(facts) or _repeated_samples_cause(data)
    found += _buffers(failed, facts)
    found += _optimizer(failed, facts)
    return found


# Heuristic, relative to a gradient: far above differences of summation order.
_NO_ROUNDING = 1e-2


# Causes of a difference in words; the table of causes has the advice.
_FACTORS = {
    "memory": "the addresses of objects (id(), data_ptr(), the order of a set of objects)",
    "nodes": "LOCAL_RANK, LOCAL_WORLD_SIZE or GROUP_RANK, which differ on several machines,",
    "environment": "the order of the environment variables",
    "interpreters": "a separate interpreter for the ranks (its PYTHONHASHSEED, and so hash() of a "
    "string and the order of a set of them)",
}


def causes_of_nondeterminism(
    failed: Failures, separation: BisectionResult | None, *, alone: bool
) -> list[Diagnosis]:
    """Name nondeterminism: the two runs differ although seeds are equal. Further worlds show if the
    result depends on process state.
    """
    result = _result_of("rerun", failed)
    if result is None:
        return []
    if separation is not None and separation.depends:
        return [
            cause_in_process_state(
                separation, f"it first diverges at {place_of_divergence(result)}", passed=alone
            )
        ]
    return [_nondeterministic(result, failed, separation, alone=alone)]


def cause_in_process_state(
    separation: BisectionResult, how: str, *, passed: bool = True
) -> Diagnosis:
    """Name the process state. `how` describes the rerun's difference; `passed` is True if the first
    world passed every check.
    """
    factors = separation.factors
    only = len(factors) == 1
    which = "no single factor causes the difference"
    if only:
        which = f"only {_FACTORS[factors[0]]} causes the difference"
    found = "; ".join(separation.lines)
    lines = (
        f"lines that may depend on it: {found}"
        if found
        else (
            "no line that reads such state was found in the strategy's file and the modules next "
            "to it"
        )
    )
    first = "the first world, in which ranks share their process state, passed every check, and "
    return name_cause(
        "depends-on-process-state",
        f"{first if passed else ''}the rerun in separate interpreters differed: {how}. A repeat "
        f"of the first world matched the first, and {which} ({separation.worlds} more "
        f"worlds were run); {lines}",
        *(factors if only else _FACTORS),
    )


def _nondeterministic(
    result: CheckResult, failed: Failures, separation: BisectionResult | None, *, alone: bool
) -> Diagnosis:
    agreed = "everything matched the single-process reference, but two" if alone else "two"
    evidence = f"{agreed} runs with the same seeds differ: {place_of_divergence(result)}"
    late = separation is not None and separation.factors == ("delays",)
    if late:
        evidence += "; a world with ranks delayed by some milliseconds differs as well"
    if gradients_raced(failed):
        evidence += ", by more than rounding"
        parameters = failed.get(("parameters", BITWISE))
        if parameters is not None and parameters.first is not None:
            evidence += (
                "; the update does not correspond to the reduced gradients either: they were "
                "modified after the all-reduce returned"
            )
    if separation is not None and separation.lines:
        evidence += (
            f"; lines whose result may differ between processes: {'; '.join(separation.lines)}"
        )
    races = late or gradients_raced(failed)
    return name_cause("nondeterministic", evidence, "race" if races else "usual")


def gradients_raced(failed: Failures) -> bool:
    """Return True if failed gradients differ by more than rounding in the second run. The values of
    the first run are then one of several possible results.
    """
    rerun, wrong = _result_of("rerun", failed), failed.get(("gradients", ROUNDING))
    if rerun is None or wrong is None or rerun.first is None or wrong.first is None:
        return False
    there = rerun.first
    if not there.parameter.endswith(f"({Kind.GRADIENT.label})") or there.step > wrong.first.step:
        return False
    is_same_place = there.parameter.startswith(f"{wrong.first.parameter} (") and (
        (there.step, there.index) == (wrong.first.step, wrong.first.index)
    )
    if is_same_place and wrong.first.bound and wrong.first.expected:
        # Any order of the same summands is within the bound of the mean; a multiple of it within as
        # many bounds.
        times = abs(float(wrong.first.actual) / float(wrong.first.expected))
        return float(there.error) > 2.0 * max(1.0, times) * float(wrong.first.bound)
    numbers = [abs(float(value)) for value in (there.actual, there.expected) if value != ""]
    return len(numbers) == 2 and float(there.error) > _NO_ROUNDING * max(numbers)


def causes_of_shared_rng(facts: Measurements) -> list[Diagnosis]:
    """Name ranks that draw equal random numbers, so that their dropout masks are equal."""
    if not facts.same_randomness:
        return []
    groups = "; ".join(ranks_in_words(group) for group in facts.same_randomness)
    return [
        name_cause(
            "shared-rng-seed",
            f"{groups} began a forward pass with the same RNG state, which distcheck had seeded "
            "differently, and the workload draws from it: their masks or noise are identical "
            "copies. (This alone fails no check.)",
        )
    ]


def warn_of_shared_rng(results: Sequence[CheckResult]) -> Iterator[Diagnosis]:
    """Yield the cause of a shared RNG as a warning, if no check failed because of it."""
    for result in results:
        if result.verdict == "pass" and FindingKind.DREW_ALIKE in result.kinds:
            yield name_cause("shared-rng-seed", result.reason)


def _result_of(check: str, failed: Mapping[tuple[str, str], CheckResult]) -> CheckResult | None:
    return next((result for (name, _), result in failed.items() if name == check), None)


def _initial(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    result = _result_of("initial state", failed)
    if result is None:
        return []
    where = place_of_divergence(result)
    evidence = f"the initial state differs from the single-process reference: {where}"
    if facts.begins_alike:  # a broadcast cannot help
        evidence += "; it is the same on all ranks"
        return [name_cause("initial-state-differs", evidence, "alike")]
    return [name_cause("initial-state-differs", evidence)]


def _repeated_samples_cause(result: CheckResult) -> list[Diagnosis]:
    """Name samples that a rank reads again, if ranks share none."""
    if result.first_kind is not FindingKind.READ_AGAIN:
        return []
    evidence = f"ranks share no samples, but read some samples twice: {result.first_reason}"
    return [name_cause("repeated-samples", evidence)]


def _data(facts: Measurements) -> list[Diagnosis]:
    same = [overlap for overlap in facts.overlaps if overlap.whole_steps]
    if same:
        ranks = ranks_in_words(sorted({rank for overlap in same for rank in overlap.ranks}))
        evidence = f"{ranks} read exactly the same samples at every step"
        return [name_cause("same-data", evidence)]
    if facts.overlaps:
        most = max(facts.overlaps, key=lambda overlap: overlap.shared)
        return [
            name_cause(
                "overlapping-data",
                f"ranks share samples within an epoch: ranks {most.ranks[0]} and "
                f"{most.ranks[1]} share {most.shared} of the {most.read} samples that each of "
                f"them read; {len(facts.overlaps)} pairs of ranks share samples",
            )
        ]
    return []


def _buffers(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    result = _result_of("buffers", failed)
    if result is None or {"gradients", "initial state"} & {check for check, _ in failed}:
        return []
    if facts.forward_twice:
        return [
            name_cause(
                "forward-ran-twice",
                "gradients are right, but buffers changed as if each forward pass had run twice "
                f"on its batch: {place_of_divergence(result)}",
            )
        ]
    return [
        name_cause(
            "buffers-differ",
            "gradients are right, but buffers are not those of the local forward pass: "
            f"{place_of_divergence(result)}, actual "
            f"{result.worst.actual if result.worst else ''}, expected "
            f"{result.worst.expected if result.worst else ''}",
        )
    ]


def _optimizer(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    if _result_of("parameters", failed) is None:
        return []
    step = next((step for step in facts.steps if step.unchanged), None)
    if step is None or any(one.not_finite and one.step <= step.step for one in facts.steps):
        return []  # a parameter that is NaN stays NaN
    return [
        name_cause(
            "optimizer-not-stepped",
            f"step {step.step}: no parameter changed on {positions_text(step, step.unchanged)}, "
            "although the gradients there are nonzero and the optimizer would have changed them",
        )
    ]
