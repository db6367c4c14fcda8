"""Which use of a tensor is wrong while a call is in flight, and which is not."""

from collections.abc import Callable, Iterator

import pytest
import torch

from distcheck.addons.simulated.calls import SimulatedCall, calling_stack, is_repr_by_library
from distcheck.addons.simulated.in_flight import InFlight

Use = Callable[[torch.Tensor], object]


class AccusedError(Exception):
    """Raised in place of what ends a world."""


def accuse(what: str) -> None:
    raise AccusedError(what)


def a_call(*, sends: list[torch.Tensor], leaves: list[torch.Tensor]) -> SimulatedCall:
    return SimulatedCall(
        kind="all_reduce" if leaves else "send", name="all_reduce" if leaves else "send", rank=0,
        group="0", number=1, peer=None if leaves else 1, inputs=sends, outputs=leaves,
        stack=calling_stack(),
    )  # fmt: skip


@pytest.fixture
def seen() -> Iterator[InFlight]:
    seen = InFlight(0, accuse)
    yield seen
    for call in seen.not_waited_for():
        seen.end(call)  # no mode may be left to other tests


def used(seen: InFlight, use: Use, tensor: torch.Tensor) -> bool:
    """Whether a use was accused."""
    try:
        use(tensor)
    except AccusedError:
        return True
    return False


@pytest.mark.parametrize(
    ("use", "wrong"),
    [
        (lambda t: t.add_(1), True),
        (lambda t: t + 1, True),
        (lambda t: t[1:].zero_(), True),
        (lambda t: t.view(2, 4).sum(), True),
        (lambda t: t.view(2, 4), False),
        (lambda t: (t[1:], t.unsqueeze(0), t.detach()), False),
        (torch.zeros_like, False),
        (lambda t: torch.ones(8) + 1, False),
    ],
)
def test_a_tensor_that_a_call_writes_may_not_be_used(seen: InFlight, use: Use, wrong: bool) -> None:
    tensor = torch.ones(8)
    call = a_call(sends=[tensor], leaves=[tensor])
    seen.begin(call)
    assert used(seen, use, tensor) == wrong
    seen.end(call)
    assert not used(seen, use, tensor)


@pytest.mark.parametrize(
    ("use", "wrong"), [(lambda t: t + 1, False), (lambda t: t.sum(), False), (torch.relu_, True)]
)
def test_a_tensor_that_is_only_sent_may_be_read(seen: InFlight, use: Use, wrong: bool) -> None:
    tensor = torch.ones(8)
    seen.begin(a_call(sends=[tensor], leaves=[]))
    assert used(seen, use, tensor) == wrong


@pytest.mark.parametrize(
    ("held", "other", "wrong"),
    [
        (slice(0, 4), slice(4, 8), False),
        (slice(0, 5), slice(4, 8), True),
        (slice(0, 8, 2), slice(1, 8, 2), False),
        (slice(0, 8, 2), slice(2, 8, 4), True),
    ],
)
def test_overlap_is_judged_by_bytes(seen: InFlight, held: slice, other: slice, wrong: bool) -> None:
    whole = torch.ones(8)
    seen.begin(a_call(sends=[whole[held]], leaves=[whole[held]]))
    assert used(seen, torch.Tensor.zero_, whole[other]) == wrong


def test_calls_of_torchs_own_code_are_not_watched(seen: InFlight) -> None:
    tensor = torch.ones(8)
    call = a_call(sends=[tensor], leaves=[tensor])
    call.stack = [(compile("", torch.__file__, "exec"), 0)]
    seen.begin(call)
    assert not used(seen, torch.Tensor.zero_, tensor)
    assert seen.not_waited_for() == []


def test_a_method_that_reads_memory_by_itself(seen: InFlight) -> None:
    tensor, other = torch.ones(4), torch.ones(4)
    seen.begin(a_call(sends=[], leaves=[tensor]))
    seen.read(other, "tolist")
    with pytest.raises(AccusedError, match=r"read a tensor of \[4\] by tolist at "):
        seen.read(tensor, "tolist")


@pytest.mark.parametrize(
    ("file", "shown"), [("/x/site-packages/_pytest/saferepr.py", True), ("/x/train.py", False)]
)
def test_what_a_library_shows_is_not_what_the_code_reads(file: str, shown: bool) -> None:
    found: list[bool] = []
    names = {"found": found, "ask": is_repr_by_library}
    exec(compile("found.append(ask())", file, "exec"), names)
    assert found == [shown]
