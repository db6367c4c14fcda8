"""Causes outside the gradients: data, initial state, buffers, random numbers, optimizer, reruns."""

from collections.abc import Iterator, Mapping, Sequence

from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.judge.diagnosis.wording import Failures, positions_text, where
from distcheck.judge.rerun_bisection import Separation
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult, Diagnosis, FindingKind
from distcheck.records.causes import name_cause
from distcheck.records.layers import BITWISE, ROUNDING
from distcheck.records.odd_ranks import ranks_in_words


def explain(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    """Every such cause that is carried by a check that failed and by what was measured."""
    found = _initial(failed, facts)
    if data := _of("data", failed):
        found += _data(facts) or _repeated(data)
    found += _buffers(failed, facts)
    found += _optimizer(failed, facts)
    return found


# Chosen, of a gradient: far more than orders of summation differ by.
_NO_ROUNDING = 1e-2


# What made a difference, in words; the table of causes has what to do about each.
_FACTORS = {
    "memory": "the addresses of objects (id(), data_ptr(), the order of a set of objects)",
    "nodes": "LOCAL_RANK, LOCAL_WORLD_SIZE or GROUP_RANK, as on several machines,",
    "environment": "the order of the environment variables",
    "interpreters": "a separate interpreter for the ranks (its PYTHONHASHSEED, and so hash() of a "
    "string and the order of a set of them)",
}


def of_rerun(failed: Failures, separation: Separation | None, *, alone: bool) -> list[Diagnosis]:
    """Two runs that differ say by themselves that something is not determined by the seeds; what
    further worlds have shown says whether process state determines it.
    """
    result = _of("rerun", failed)
    if result is None:
        return []
    if separation is not None and separation.depends:
        return [of_process(separation, f"it differs first at {where(result)}", passed=alone)]
    return [_nondeterministic(result, failed, separation, alone=alone)]


def of_process(separation: Separation, how: str, *, passed: bool = True) -> Diagnosis:
    """`how` says how the rerun showed it; `passed`, whether the first world passed every check."""
    factors = separation.factors
    only = len(factors) == 1
    which = "no single one of the things that differ there makes the difference"
    if only:
        which = f"the difference is made by {_FACTORS[factors[0]]} alone"
    found = "; ".join(separation.lines)
    lines = (
        f"lines that may depend on it: {found}"
        if found
        else (
            "no line that reads such state was found in the strategy's file and the modules beside "
            "it"
        )
    )
    first = "the first world, in which ranks share their process state, passed every check, and "
    return name_cause(
        "depends-on-process-state",
        f"{first if passed else ''}the rerun in separate interpreters was another: {how}. "
        f"A repeat of the first world was as the first, and {which} ({separation.worlds} further "
        f"worlds); {lines}",
        *(factors if only else _FACTORS),
    )


def _nondeterministic(
    result: CheckResult, failed: Failures, separation: Separation | None, *, alone: bool
) -> Diagnosis:
    agreed = "everything agreed with one machine, but two" if alone else "two"
    evidence = f"{agreed} runs with the same seeds did not agree with each other: {where(result)}"
    late = separation is not None and separation.factors == ("delays",)
    if late:
        evidence += ", nor does a world in which ranks are some milliseconds late"
    if gradients_raced(failed):
        evidence += ", by more than roundings do"
        parameters = failed.get(("parameters", BITWISE))
        if parameters is not None and parameters.first is not None:
            evidence += (
                "; and the update was not that of the gradients which the exchange had left: "
                "something changed them after it had returned"
            )
    if separation is not None and separation.lines:
        evidence += f"; lines that another process need not repeat: {'; '.join(separation.lines)}"
    races = late or gradients_raced(failed)
    return name_cause("nondeterministic", evidence, "race" if races else "usual")


def gradients_raced(failed: Failures) -> bool:
    """Whether the gradients that failed were others in the second run, and not by their roundings:
    what they are made of in the first is then one of several things that can happen.
    """
    rerun, wrong = _of("rerun", failed), failed.get(("gradients", ROUNDING))
    if rerun is None or wrong is None or rerun.first is None or wrong.first is None:
        return False
    there = rerun.first
    if not there.parameter.endswith(f"({Kind.GRADIENT.label})") or there.step > wrong.first.step:
        return False
    is_same_place = there.parameter.startswith(f"{wrong.first.parameter} (") and (
        (there.step, there.index) == (wrong.first.step, wrong.first.index)
    )
    if is_same_place and wrong.first.bound and wrong.first.expected:
        # Any order of the same parts is within the bound of the mean, a multiple of the mean within
        # as many bounds of its own.
        times = abs(float(wrong.first.actual) / float(wrong.first.expected))
        return float(there.error) > 2.0 * max(1.0, times) * float(wrong.first.bound)
    numbers = [abs(float(value)) for value in (there.actual, there.expected) if value != ""]
    return len(numbers) == 2 and float(there.error) > _NO_ROUNDING * max(numbers)


def same_randomness(facts: Measurements) -> list[Diagnosis]:
    """Ranks that draw alike: dropout masks that are copies of each other."""
    if not facts.same_randomness:
        return []
    groups = "; ".join(ranks_in_words(group) for group in facts.same_randomness)
    return [
        name_cause(
            "shared-rng-seed",
            f"{groups} began a forward pass from one and the same random-number state, "
            "which distcheck had made different, and the workload draws from it: their masks or "
            "noise are copies. (By itself that fails no check.)",
        )
    ]


def drew_alike(results: Sequence[CheckResult]) -> Iterator[Diagnosis]:
    """The same as a remark, of a case in which no check failed for it."""
    for result in results:
        if result.verdict == "pass" and FindingKind.DREW_ALIKE in result.kinds:
            yield name_cause("shared-rng-seed", result.reason)


def _of(check: str, failed: Mapping[tuple[str, str], CheckResult]) -> CheckResult | None:
    return next((result for (name, _), result in failed.items() if name == check), None)


def _initial(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    result = _of("initial state", failed)
    if result is None:
        return []
    evidence = f"ranks did not begin where one machine begins: {where(result)}"
    if facts.begins_alike:  # a broadcast cannot help
        evidence += "; all ranks begin alike"
        return [name_cause("initial-state-differs", evidence, "alike")]
    return [name_cause("initial-state-differs", evidence)]


def _repeated(result: CheckResult) -> list[Diagnosis]:
    """Samples that a rank reads again, where ranks share none."""
    if result.first_kind is not FindingKind.READ_AGAIN:
        return []
    evidence = f"ranks share no samples, and read some again: {result.first_reason}"
    return [name_cause("repeated-samples", evidence)]


def _data(facts: Measurements) -> list[Diagnosis]:
    same = [overlap for overlap in facts.overlaps if overlap.whole_steps]
    if same:
        ranks = ranks_in_words(sorted({rank for overlap in same for rank in overlap.ranks}))
        evidence = f"{ranks} read the very same samples at every step"
        return [name_cause("same-data", evidence)]
    if facts.overlaps:
        most = max(facts.overlaps, key=lambda overlap: overlap.shared)
        return [
            name_cause(
                "overlapping-data",
                f"ranks share samples within an epoch: ranks {most.ranks[0]} and "
                f"{most.ranks[1]} {most.shared} of the {most.read} that each read, "
                f"{len(facts.overlaps)} pairs of ranks share some",
            )
        ]
    return []


def _buffers(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    result = _of("buffers", failed)
    if result is None or {"gradients", "initial state"} & {check for check, _ in failed}:
        return []
    if facts.forward_twice:
        return [
            name_cause(
                "forward-ran-twice",
                "gradients are right, and buffers moved as if each forward pass had run "
                f"twice on its batch: {where(result)}",
            )
        ]
    return [
        name_cause(
            "buffers-differ",
            "gradients are right, but buffers are not those that the shard's own forward "
            f"pass leaves: {where(result)}, actual "
            f"{result.worst.actual if result.worst else ''}, expected "
            f"{result.worst.expected if result.worst else ''}",
        )
    ]


def _optimizer(failed: Failures, facts: Measurements) -> list[Diagnosis]:
    if _of("parameters", failed) is None:
        return []
    step = next((step for step in facts.steps if step.unchanged), None)
    if step is None:
        return []
    return [
        name_cause(
            "optimizer-not-stepped",
            f"step {step.step}: no parameter moved on "
            f"{positions_text(step, step.unchanged)}, "
            "although the gradients there are not zero and the optimizer would have moved them",
        )
    ]
