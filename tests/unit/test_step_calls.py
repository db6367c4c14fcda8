"""Through which lines gradients went, and which of them a cause is about."""

from collections.abc import Iterator

import msgspec
import pytest
import torch

from distcheck.judge.diagnosis.measurements import (
    LineMeasurements,
    Measurements,
    NonFiniteGradient,
    StepFacts,
)
from distcheck.judge.diagnosis.source_lines import line_of_first_wrong
from distcheck.records import CallSite, CheckResult, Diagnosis, Difference
from distcheck.worlds import step_calls
from distcheck.worlds.step_calls import CallLines, StepCalls, storage_range

HERE = __file__


@pytest.fixture
def calls() -> Iterator[StepCalls]:
    yield step_calls.start_recording_calls(0, past_python=False)
    step_calls.HEARING.clear()


def call(kind: str, *tensors: torch.Tensor) -> str:
    """Makes a call of this line of the code under test, and says which."""
    step_calls.record_call_of_rank(0, kind, (list(tensors),), 0)
    return f"{HERE}:{call.__code__.co_firstlineno + 2}"


def other(kind: str, *tensors: torch.Tensor) -> str:
    """The same of another line."""
    step_calls.record_call_of_rank(0, kind, (list(tensors),), 0)
    return f"{HERE}:{other.__code__.co_firstlineno + 2}"


def ways(calls: StepCalls, **tensors: torch.Tensor) -> CallLines:
    lie = {name: (storage_range(one),) for name, one in tensors.items()}
    found = calls.ways(lie, {name: one.numel() for name, one in tensors.items()}, lambda: ())
    assert found is not None
    return found


def test_a_gradient_goes_through_the_call_that_was_given_it(calls: StepCalls) -> None:
    flat, alone = torch.ones(10), torch.ones(3)
    line = call("all_reduce", flat[2:6])
    found = ways(calls, a=flat[4:8], b=flat[6:], c=alone)
    assert found.given == {"a": {line}, "b": set(), "c": set()}
    assert found.perhaps == {"a": set(), "b": set(), "c": set()}
    assert found.reducing == {line}


def test_copies_may_carry_all_gradients_and_counts_only_some(calls: StepCalls) -> None:
    line = call("all_reduce", torch.ones(10))
    count = other("all_reduce", torch.ones(1))
    found = ways(calls, a=torch.ones(2), scale=torch.ones(1))
    assert found.perhaps == {"a": {line}, "scale": {line, count}}


def test_copies_of_all_gradients_go_through_the_call_that_got_them(calls: StepCalls) -> None:
    line = call("all_reduce", torch.ones(2))
    assert call("all_reduce", torch.ones(3)) == line
    assert ways(calls, a=torch.ones(2), b=torch.ones(3)).given == {"a": {line}, "b": {line}}
    assert ways(calls, a=torch.ones(2), b=torch.ones(4)).given == {"a": set(), "b": set()}
    call("all_gather", torch.ones(1))
    assert ways(calls, a=torch.ones(2), b=torch.ones(4)).given == {"a": set(), "b": set()}


def test_memory_that_was_freed_is_not_taken_for_what_lies_there_now(calls: StepCalls) -> None:
    gone = torch.ones(1 << 16)
    address = gone.data_ptr()
    call("all_reduce", gone)
    del gone
    again = [torch.ones(1 << 16) for _ in range(4)]
    found = ways(calls, **{str(n): one for n, one in enumerate(again)})
    assert not any(found.given.values())
    assert address  # which one of them may well have


def test_a_line_that_also_calls_something_else_does_not_only_reduce(calls: StepCalls) -> None:
    tensor = torch.ones(3)
    for kind in ("all_reduce", "broadcast"):
        line = call(kind, tensor)
    found = ways(calls, a=tensor)
    assert (found.given["a"], found.reducing) == ({line}, set())


def test_calls_past_python_have_no_line() -> None:
    counted = [3]
    calls = StepCalls(lambda: counted[0])
    calls.begin()
    counted[0] += 1
    assert ways(calls, a=torch.ones(2)).perhaps == {"a": {""}}
    calls.begin()
    assert ways(calls, a=torch.ones(2)).perhaps == {"a": set()}


def test_no_tensor_is_kept(calls: StepCalls) -> None:
    tensor = torch.ones(1 << 16)
    storage = storage_range(tensor)
    call("all_reduce", tensor)
    del tensor
    assert storage is not None
    assert storage[0].expired()


def way(
    given: str, perhaps: str = "", reducing: str = "", never: tuple[int, ...] = ()
) -> LineMeasurements:
    one, two, three = (tuple(text.split()) for text in (given, perhaps, reducing))
    unheard = tuple("" if line == "?" else line for line in two)
    return LineMeasurements(
        step=1, parameter="w", given=one, perhaps=unheard, reducing=three, never_on=never
    )


def site(
    *causes: str, found: LineMeasurements, left: float | None = 1.0,
    bad: NonFiniteGradient | None = None,
) -> CallSite | None:  # fmt: skip
    step = StepFacts(
        step=1, shares=(0.5, 0.5), gamma=0.0, unit=0.0, parameters=(), total=1, fits=(),
        left_norms=(), left_factors=(left, left), left_elements=1, mean_of_left=False, matches=(),
        alike=(), unchanged=(), missing=(), not_finite=bad,
    )  # fmt: skip
    place = Difference(
        parameter="w", rank=0, step=1, index=(0,), actual=1.0, expected=2.0, error=1.0, bound=0.0
    )
    result = CheckResult(check="gradients", layer="rounding", verdict="fail", first=place)
    named = [Diagnosis(cause=cause, evidence="", suggestion="") for cause in causes]
    return line_of_first_wrong(named, [result], Measurements(world=2, steps=(step,), ways=(found,)))


A = CallSite(file="/a.py", line=3)


@pytest.mark.parametrize(
    ("cause", "found", "expected"),
    [
        ("missing-division", way("/a.py:3", "", "/a.py:3"), A),
        ("missing-division", way("/a.py:3 /a.py:4", "", "/a.py:3"), A),
        ("missing-division", way("/a.py:3 /a.py:4", "", "/a.py:3 /a.py:4"), None),
        ("missing-division", way("", "/a.py:3", "/a.py:3"), A),
        ("missing-division", way("/a.py:3", "?", "/a.py:3"), None),
        ("single-rank-gradient", way("/a.py:3"), A),
        ("single-rank-gradient", way("/a.py:3", "/a.py:4", "/a.py:3"), None),
        ("missing-sync", way("", never=(0, 1)), CallSite()),
        ("missing-sync", way("", never=(1,)), None),
        ("missing-sync", way("", "/a.py:3"), None),
        ("partial-sync", way("/a.py:3"), A),
        ("partial-sync", way("/a.py:3", "/a.py:4"), None),
        ("nonfinite", way("/a.py:3", "", "/a.py:3"), A),
        ("unexplained", way("a.py"), None),
    ],
)
def test_single_line_named(cause: str, found: LineMeasurements, expected: CallSite | None) -> None:
    assert site(cause, found=found) == expected


def test_a_factor_that_backward_left_is_of_no_call() -> None:
    found = way("/a.py:3", "", "/a.py:3")
    assert site("missing-division", found=found, left=2.0) is None
    assert site("missing-division", found=found, left=None) is None


def test_infinities_that_backward_left_are_of_no_call() -> None:
    found = way("/a.py:3", "", "/a.py:3")
    made = NonFiniteGradient(rank=0, parameter="w", count=1, before=())
    assert site("nonfinite", found=found, bad=made) == A
    assert site("nonfinite", found=found, bad=msgspec.structs.replace(made, before=(1,))) is None
    assert site("nonfinite", found=found, bad=msgspec.structs.replace(made, hidden=True)) is None


def test_several_causes_have_a_line_where_it_is_the_same() -> None:
    one = way("/a.py:3", "", "/a.py:3")
    assert site("single-rank-gradient", "missing-division", found=one) == A
    assert site("single-rank-gradient", "missing-division", found=one, left=2.0) is None
    two = way("/a.py:3 /a.py:4", "", "/a.py:3")
    assert site("single-rank-gradient", "missing-division", found=two) is None
    assert site("single-rank-gradient", "wrong-output", found=one) is None


def test_a_call_that_torch_makes_itself_has_no_line(calls: StepCalls) -> None:
    """As DistributedDataParallel makes some: a line of its files is no line of the code."""
    gradient = torch.ones(3)
    made = compile("hear(0, 'all_reduce', ([gradient],), 0)", torch.__file__, "exec")
    exec(made, {"hear": step_calls.record_call_of_rank, "gradient": gradient})
    assert ways(calls, a=gradient).given == {"a": {""}}
