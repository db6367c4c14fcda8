"""send and recv, isend and irecv: every rank sends to the next one of the ring."""

from typing import Any

from distcheck.backend_probe.scene import (
    Buffer,
    Buffers,
    Operation,
    ProbedCall,
    ProbeScene,
    WrongAnswerError,
)

_FORMS = ("plain", "strided", "transposed", "mixed", "empty", "one", "large", "sub-group")


def _messages(scene: ProbeScene, count: int) -> Buffers:
    previous = (scene.rank - 1) % scene.world
    sent = [scene.part(scene.rank, part) for part in range(count)]
    return {
        "output": [Buffer(scene.rows, None, list(scene.part(previous, p))) for p in range(count)],
        "input": [Buffer(scene.rows, part, list(part)) for part in sent],
    }


def _neighbours(call: ProbedCall) -> tuple[int, int]:
    """The global ranks that this one receives from, and sends to."""
    place, members = call.scene.rank, call.members
    return members[place - 1], members[(place + 1) % len(members)]


def _send_recv(dist: Any, t: dict[str, list[Any]], call: ProbedCall) -> None:
    """Ranks at odd places receive first, so that no rank needs a send to return early."""
    previous, following = _neighbours(call)
    if call.scene.rank % 2 == 0:
        dist.send(t["input"][0], dst=following, group=call.group)
    sender = dist.recv(t["output"][0], src=previous, group=call.group)
    if call.scene.rank % 2 == 1:
        dist.send(t["input"][0], dst=following, group=call.group)
    if sender != previous:
        raise WrongAnswerError(f"recv returned {sender} as the sender, which was {previous}")


def _isend_irecv(dist: Any, t: dict[str, list[Any]], call: ProbedCall) -> None:
    """Two messages at a time: they must arrive in the order in which they were sent."""
    previous, following = _neighbours(call)
    works = [dist.irecv(output, src=previous, group=call.group) for output in t["output"]]
    works += [dist.isend(sent, dst=following, group=call.group) for sent in t["input"]]
    for work in works:
        work.wait()


OPERATIONS = (
    Operation(
        name="send_recv",
        buffers=lambda scene: _messages(scene, 1),
        perform=_send_recv,
        forms=_FORMS,
    ),
    Operation(
        name="isend_irecv",
        buffers=lambda scene: _messages(scene, 2),
        perform=_isend_irecv,
        forms=_FORMS,
    ),
)
