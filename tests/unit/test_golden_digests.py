"""Traces that keep digests alone, compared: what they show, and what stays unknown."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from distcheck.compare.records import CompareRequest
from distcheck.compare.records import verdict_on_changes as _judge
from distcheck.compare.traces import compare_traces
from distcheck.contract import Contract, Training
from distcheck.recordings.differing import TraceComparison
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.header import StepHeader
from distcheck.recordings.traces.layout import TraceLayout
from distcheck.recordings.traces.reader import TraceReader
from distcheck.recordings.traces.writer import TraceWriter
from distcheck.records import Case, ModelLayout, TensorSpec

SHAPE = (3,)
WEIGHT = TensorSpec(name="weight", shape=SHAPE, dtype="float32")
LAYOUT = TraceLayout(
    world=2, steps=2, max_shard=2, model=ModelLayout(parameters=(WEIGHT,), buffers=(), optimizer=())
)
Place = tuple[int, Kind, int]  # rank, kind, slot
# The gradient of rank 1 at the last step.
GRADIENT = (1, Kind.GRADIENT, 1)
LOCAL = (1, Kind.LOCAL_GRADIENT, 1)
AN_ULP = torch.tensor([1.0, 2.0, 3.0 + 2**-22])


@pytest.fixture
def record() -> Iterator[Callable[..., int]]:
    """Writes a trace in which the tensors of some places are others, and some losses."""
    made = []

    def write(others: dict[Place, torch.Tensor | None], loss: float = 1.0) -> int:
        fd = os.memfd_create("trace")
        made.append(fd)
        os.ftruncate(fd, LAYOUT.total_bytes)
        for rank in range(LAYOUT.world):
            writer = TraceWriter(fd, LAYOUT, rank)
            for kind in (Kind.PARAMETER, Kind.LOCAL_GRADIENT, Kind.GRADIENT):
                for slot in range(LAYOUT.slots(kind)):
                    plain = torch.tensor([1.0, 2.0, 3.0])
                    writer.put(kind, slot, 0, others.get((rank, kind, slot), plain))
            for step in range(LAYOUT.steps):
                header = StepHeader(
                    ids=(0, 1), loss=loss if step else 1.0, loss_factor=1.0, epoch=0,
                    rng_state=b"state", ready_order=(0,),
                )  # fmt: skip
                writer.put_header(step, header)
        return fd

    yield write
    for fd in made:
        os.close(fd)


def found_in(then: int, now: int, *, tensors: bool, **asked: Any) -> TraceComparison:
    job = CompareRequest(
        case=Case(
            id="a", strategy="ddp", world=2, workload="mlp", steps=2,
            dtype=asked.pop("dtype", "float32"),
        ),
        contracts=(Contract(), Contract()),
        training=Training(**asked),
        layouts=(LAYOUT, LAYOUT),
        tensors=tensors,
    )  # fmt: skip
    return compare_traces(job, *(TraceReader(fd, LAYOUT, tensors=tensors) for fd in (then, now)))


def by_digest(
    record: Callable[..., int], others: dict[Place, torch.Tensor | None], loss: float = 1.0,
    **asked: Any,
) -> TraceComparison:  # fmt: skip
    """The comparison of digests, between traces whose tensors are gone."""
    fds = [record({}), record(others, loss)]
    for fd in fds:
        os.ftruncate(fd, LAYOUT.index_bytes)
        os.ftruncate(fd, LAYOUT.total_bytes)
    found = found_in(*fds, tensors=False, **asked)
    assert (found.by_digest, found.drift) == (True, ())
    return found


def verdict(found: TraceComparison, *, bits: bool = False) -> str:
    return _judge(found, [], ("pass", "pass"), bits=bits)[0]


def test_equal_digests_are_equal_bits(record: Callable[..., int]) -> None:
    found = by_digest(record, {})
    assert (found.first, found.not_judged, verdict(found)) == (None, 0, "pass")
    assert {m.kind: m.tensors for m in found.moments}["gradients"] == 4


@pytest.mark.parametrize(("place", "kind"), [(GRADIENT, "gradients"), (LOCAL, "local gradients")])
def test_a_change_is_located(record: Callable[..., int], place: Place, kind: str) -> None:
    found = by_digest(record, {place: AN_ULP})
    assert found.first is not None
    assert (found.kind, found.first.parameter) == (kind, "weight")
    assert (found.first.rank, found.first.step, found.first.index) == (1, 1, ())
    assert str(found.first.actual).startswith("digest ")
    assert found.first.actual != found.first.expected
    assert (found.judged, found.not_judged, found.beyond) == (0, 1, None)
    assert (verdict(found), verdict(found, bits=True)) == ("unknown", "fail")

    whole = found_in(record({}), record({place: AN_ULP}), tensors=True)
    assert (whole.kind, whole.not_judged, verdict(whole)) == (kind, 0, "pass")
    assert (whole.first is not None, whole.by_digest, len(whole.drift)) == (True, False, 2)


def test_another_initial_state_says_what_to_do(record: Callable[..., int]) -> None:
    found = found_in(record({}), record({(0, Kind.PARAMETER, 0): AN_ULP}), tensors=True)
    verdict, reason = _judge(found, [], ("pass", "pass"), bits=False)
    assert verdict == "unknown"
    assert reason.endswith("from there on; start both from the same parameters")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("pass", "pass"), "pass"),
        (("fail", "pass"), "fail"),
        (("pass", "fail"), "fail"),
        (("unknown", "pass"), "unknown"),
        (("pass", "unknown"), "unknown"),
    ],
)
def test_other_bits_pass_only_where_both_runs_did(
    record: Callable[..., int], said: tuple[str, str], expected: str
) -> None:
    found = found_in(record({}), record({GRADIENT: AN_ULP}), tensors=True)
    verdict, reason = _judge(found, [], said, bits=False)  # type: ignore[arg-type]
    assert verdict == expected
    assert (f"the verdict of the earlier run is {said[0]}" in reason) == (said != ("pass", "pass"))


def test_what_has_no_bound_is_judged_as_with_tensors(record: Callable[..., int]) -> None:
    """Nothing of it would be computed from tensors: the verdict is the same without them."""
    parameter = (0, Kind.PARAMETER, 2)
    for place, asked in (
        (parameter, {}), (LOCAL, {"dtype": "bfloat16"}), (GRADIENT, {"loss_scale": 8.0}),
        (GRADIENT, {"accumulate": 2}),
    ):  # fmt: skip
        found = by_digest(record, {place: AN_ULP}, **asked)
        whole = found_in(record({}), record({place: AN_ULP}), tensors=True, **asked)
        assert found.not_judged == whole.judged == 0, (place, asked)
        assert verdict(found) == verdict(whole) == "pass"
    changed = {LOCAL: AN_ULP, GRADIENT: AN_ULP}
    assert by_digest(record, changed, dtype="bfloat16").not_judged == 0
    assert by_digest(record, {GRADIENT: AN_ULP}, dtype="bfloat16").not_judged == 1


def test_an_unseen_exchange_has_the_whole_batch_bound(record: Callable[..., int]) -> None:
    unseen: dict[Place, torch.Tensor | None] = {
        (rank, Kind.LOCAL_GRADIENT, step): None for rank in range(2) for step in range(2)
    }
    then, now = record(unseen), record({**unseen, GRADIENT: AN_ULP})
    for dtype, bounded in (("float32", True), ("bfloat16", False)):
        assert found_in(then, now, tensors=False, dtype=dtype).not_judged == bounded
        assert found_in(then, now, tensors=True, dtype=dtype).judged == 3 * bounded


def test_losses_are_judged_without_tensors(record: Callable[..., int]) -> None:
    near, far = by_digest(record, {}, 1 + 2**-52), by_digest(record, {}, 1.01)
    assert (near.kind, near.judged, near.beyond, verdict(near)) == ("loss", 2, None, "pass")
    assert far.beyond is not None
    assert verdict(far) == "fail"
    both = by_digest(record, {GRADIENT: AN_ULP}, 1 + 2**-52)
    assert (both.kind, both.not_judged, verdict(both)) == ("loss", 1, "unknown")


@pytest.mark.parametrize("tensors", [True, False])
def test_a_gradient_that_one_run_lacks_is_beyond(record: Callable[..., int], tensors: bool) -> None:
    found = found_in(record({}), record({GRADIENT: None}), tensors=tensors)
    assert found.beyond is not None
    assert (found.beyond.expected, found.beyond.actual) == ("there", "absent")
    assert (found.not_judged, verdict(found)) == (0, "fail")


@pytest.mark.parametrize("tensors", [True, False])
def test_none_differs_from_another_shape(record: Callable[..., int], tensors: bool) -> None:
    then, now = record({GRADIENT: None}), record({GRADIENT: torch.ones(5)})
    found = found_in(then, now, tensors=tensors)
    assert found.first is not None
    assert found.first.actual == "of a different shape or dtype"


def test_a_tensor_that_is_not_there_is_never_read(record: Callable[..., int]) -> None:
    trace = TraceReader(record({GRADIENT: None}), LAYOUT, tensors=False)
    for reader in (trace, trace.of_ranks([0])):
        with pytest.raises(LookupError, match="holds digests and no tensors"):
            reader.tensor(0, Kind.GRADIENT, 0, 0)
    assert trace.tensor(*GRADIENT, 0) is None, "the table says so"
