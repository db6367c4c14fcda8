"""Which send meets which receive in a simulated world, and what it takes to find out."""

from typing import Any

import pytest
import torch

from distcheck.addons.simulated import collectives
from distcheck.addons.simulated.calls import SimulatedCall
from distcheck.addons.simulated.world import GroupCalls

LOOKS = 0


class Looked(SimulatedCall):
    """A call that counts how often its peer is looked at."""

    @property
    def peer(self) -> Any:  # type: ignore[override]
        global LOOKS
        LOOKS += 1
        return self._peer

    @peer.setter
    def peer(self, rank: Any) -> None:
        self._peer = rank


def message(
    kind: str, rank: int, peer: int | None, *, tag: int = 0, value: float = 0.0
) -> SimulatedCall:
    tensor = torch.tensor([value])
    return Looked(
        kind=kind, name=kind, rank=rank, group="0", number=1, peer=peer, tag=tag, counts=(1,),
        inputs=[tensor] if kind == "send" else [], outputs=[] if kind == "send" else [tensor],
    )  # fmt: skip


def got(channel: GroupCalls, receive: SimulatedCall) -> list[float]:
    """What a receive takes, of what has been sent before."""
    channel.post_message(receive)
    return [float(result) for result in receive.results]


def test_messages_meet_in_the_order_in_which_they_were_sent() -> None:
    channel = GroupCalls("0", range(4), "gloo")
    for rank, tag, value in ((1, 0, 1.0), (2, 0, 2.0), (2, 7, 3.0), (2, 0, 4.0), (3, 0, 5.0)):
        channel.post_message(message("send", rank, 0, tag=tag, value=value))
    channel.post_message(message("send", 2, 1, value=6.0))
    assert got(channel, message("recv", 0, 2)) == [2.0]
    assert got(channel, message("recv", 0, None)) == [1.0]
    assert got(channel, message("recv", 0, 2, tag=7)) == [3.0]
    assert got(channel, message("recv", 0, 1)) == []
    assert got(channel, message("recv", 0, None)) == [4.0]
    assert got(channel, message("recv", 1, 2)) == [6.0]
    waiting, late = message("recv", 3, None), message("recv", 3, 1)
    assert got(channel, waiting) == got(channel, late) == []
    channel.post_message(message("send", 1, 3, value=8.0))
    assert [float(one) for one in waiting.results] == [8.0]
    assert late.results == []
    assert channel.missing(late) == [1]


@pytest.mark.parametrize("count", [2, 9])
def test_few_and_many_tensors_are_written_alike(count: int) -> None:
    sizes = [(2, 1 + place % 3) for place in range(count)]
    outputs = [torch.zeros(columns, rows).t() for rows, columns in sizes]  # with gaps
    call = SimulatedCall(
        kind="all_to_all", name="all_to_all", rank=0, group="0", number=1, inputs=[],
        outputs=outputs,
    )  # fmt: skip
    call.results = [torch.rand(rows * columns) for rows, columns in sizes]
    expected = [r.view(size) for r, size in zip(call.results, sizes, strict=True)]
    versions = [output._version for output in outputs]
    collectives.write_call_results(call)
    assert all(a.equal(b) for a, b in zip(outputs, expected, strict=True))
    assert [output._version for output in outputs] == versions
    assert call.delivered
    assert call.outputs == call.results == []


def looks_in_a_ring(world: int) -> int:
    """How often calls are looked at where every rank sends to the next, and all receive then."""
    global LOOKS
    channel, LOOKS = GroupCalls("0", range(world), "gloo"), 0
    for rank in range(world):
        channel.post_message(message("send", rank, (rank + 1) % world))
    for rank in range(world):
        assert got(channel, message("recv", rank, (rank - 1) % world)) == [0.0]
    return LOOKS


def test_messages_of_other_ranks_are_not_looked_at() -> None:
    assert looks_in_a_ring(64) == 4 * looks_in_a_ring(16)
