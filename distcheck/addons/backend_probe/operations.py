"""Defines the probed operations: their inputs, their calls and their expected results.

Some operations have a form with a list of tensors and a form with a single tensor. The single
tensor contains the tensors of the list in order.
"""

import time
from typing import Any

from distcheck.addons.backend_probe.scene import (
    Buffer,
    Buffers,
    Operation,
    ProbedCall,
    ProbeScene,
    WrongAnswerError,
)

_OF_MESSAGES = ("plain", "strided", "transposed", "mixed", "empty", "one", "large", "sub-group")
_UNEVEN_FORMS = ("plain", "async", "strided", "transposed", "mixed", "large", "sub-group")
_LATE_S = 0.1  # time for an incorrect barrier to be detected; a correct one always passes


def _input_of(scene: ProbeScene, part: int = 0) -> Buffer:
    """Return the input buffer of a rank. The operation must not change it."""
    values = scene.part(scene.rank, part)
    return Buffer(scene.rows, values, list(values))


def _expected_from(scene: ProbeScene, sender: int, part: int = 0) -> Buffer:
    return Buffer(scene.rows, None, list(scene.part(sender, part)))


def _concatenate(buffers: list[Buffer]) -> Buffer:
    before = None if buffers[0].before is None else [v for b in buffers for v in b.before or ()]
    return Buffer(sum(b.rows for b in buffers), before, [v for b in buffers for v in b.after or ()])


def _messages(scene: ProbeScene, count: int) -> Buffers:
    previous = (scene.rank - 1) % scene.world
    return {
        "output": [_expected_from(scene, previous, part) for part in range(count)],
        "input": [_input_of(scene, part) for part in range(count)],
    }


def _neighbors(call: ProbedCall) -> tuple[int, int]:
    """Return the global ranks of the ring neighbors: the rank that sends to this rank, and the rank
    that receives from it.
    """
    place, members = call.scene.rank, call.members
    return members[place - 1], members[(place + 1) % len(members)]


def _send_recv(dist: Any, t: dict[str, list[Any]], call: ProbedCall) -> None:
    """Send to one ring neighbor and receive from the other. Odd ranks receive first, so the probe
    does not depend on buffered sends.
    """
    previous, following = _neighbors(call)
    if call.scene.rank % 2 == 0:
        dist.send(t["input"][0], dst=following, group=call.group)
    sender = dist.recv(t["output"][0], src=previous, group=call.group)
    if call.scene.rank % 2 == 1:
        dist.send(t["input"][0], dst=following, group=call.group)
    if sender != previous:
        raise WrongAnswerError(f"recv returned {sender} as the sender, but it was {previous}")


def _isend_irecv(dist: Any, t: dict[str, list[Any]], call: ProbedCall) -> None:
    """Send two messages to the same rank with `isend`; they must arrive in order."""
    previous, following = _neighbors(call)
    works = [dist.irecv(output, src=previous, group=call.group) for output in t["output"]]
    works += [dist.isend(sent, dst=following, group=call.group) for sent in t["input"]]
    for work in works:
        work.wait()


def _broadcast(scene: ProbeScene) -> Buffers:
    sent = scene.part(scene.root)
    before = sent if scene.rank == scene.root else None
    return {"tensor": [Buffer(scene.rows, before, list(sent))]}


def _all_gather(scene: ProbeScene) -> Buffers:
    output = [_expected_from(scene, rank) for rank in range(scene.world)]
    return {"output": output, "input": [_input_of(scene)]}


def _all_gather_into_tensor(scene: ProbeScene) -> Buffers:
    whole = _all_gather(scene)
    return {**whole, "output": [_concatenate(whole["output"])]}


def _gather(scene: ProbeScene) -> Buffers:
    whole = _all_gather(scene)
    return whole if scene.rank == scene.root else {**whole, "output": []}


def _scatter(scene: ProbeScene) -> Buffers:
    parts = range(scene.world) if scene.rank == scene.root else ()
    return {
        "output": [_expected_from(scene, scene.root, scene.rank)],
        "input": [_input_of(scene, part) for part in parts],
    }


def _all_reduce(scene: ProbeScene) -> Buffers:
    return {"tensor": [Buffer(scene.rows, scene.part(scene.rank), scene.reduced())]}


def _reduce(scene: ProbeScene) -> Buffers:
    """Return the buffers of a reduce, whose result is defined on the root only."""
    after = scene.reduced() if scene.rank == scene.root else None
    return {"tensor": [Buffer(scene.rows, scene.part(scene.rank), after)]}


def _reduce_scatter(scene: ProbeScene) -> Buffers:
    return {
        "output": [Buffer(scene.rows, None, scene.reduced(scene.rank))],
        "input": [_input_of(scene, part) for part in range(scene.world)],
    }


def _reduce_scatter_tensor(scene: ProbeScene) -> Buffers:
    whole = _reduce_scatter(scene)
    return {**whole, "input": [_concatenate(whole["input"])]}


def _rows(scene: ProbeScene, sender: int, receiver: int) -> int:
    """Return the number of rows that `sender` sends to `receiver` in the forms with unequal parts:
    1 to `rows`.
    """
    return 1 + (sender + 2 * receiver) % scene.rows


def _outgoing_buffers(scene: ProbeScene, rank: int, *, uneven: bool) -> list[Buffer]:
    found = []
    for receiver in range(scene.world):
        rows = _rows(scene, rank, receiver) if uneven else scene.rows
        part = scene.part(rank, receiver, rows=rows)
        found.append(Buffer(rows, part, list(part)))
    return found


def _lists(scene: ProbeScene, *, uneven: bool) -> Buffers:
    sent = [_outgoing_buffers(scene, rank, uneven=uneven) for rank in range(scene.world)]
    received = [parts[scene.rank] for parts in sent]
    return {
        "output": [Buffer(part.rows, None, part.after) for part in received],
        "input": sent[scene.rank],
    }


def _single_buffers(scene: ProbeScene, *, uneven: bool) -> Buffers:
    return {name: [_concatenate(parts)] for name, parts in _lists(scene, uneven=uneven).items()}


def _call_lists(dist: Any, t: dict[str, list[Any]], call: ProbedCall) -> Any:
    return dist.all_to_all(t["output"], t["input"], **call.options)


def _call_uneven(dist: Any, t: dict[str, list[Any]], call: ProbedCall) -> Any:
    scene = call.scene
    ranks = range(scene.world)
    return dist.all_to_all_single(
        t["output"][0],
        t["input"][0],
        output_split_sizes=[_rows(scene, rank, scene.rank) for rank in ranks],
        input_split_sizes=[_rows(scene, scene.rank, rank) for rank in ranks],
        **call.options,
    )


def _barrier(dist: Any, t: dict[str, list[Any]], call: ProbedCall) -> Any:
    """Enter a barrier. The root enters last, after the store shows that all other ranks have
    reached it.

    The root sets a key in the store before it enters. A rank that returns from the barrier without
    finding the key was not blocked. With a correct barrier the key is always set, however slow the
    machine is.
    """
    store, turn, scene = call.store, call.turn, call.scene
    if call.is_root:
        store.wait(
            [f"{turn}/at barrier/{rank}" for rank in range(scene.world) if rank != scene.root]
        )
        time.sleep(_LATE_S)
        store.set(f"{turn}/last one", "has come")
    else:
        store.set(f"{turn}/at barrier/{scene.rank}", "")
    return dist.barrier(**call.options)


def _was_kept_waiting(call: ProbedCall) -> None:
    if not call.store.check([f"{call.turn}/last one"]):
        raise WrongAnswerError(f"left the barrier before rank {call.root} had entered it")


_OPERATIONS = (
    Operation(
        name="send_recv",
        buffers=lambda scene: _messages(scene, 1),
        perform=_send_recv,
        forms=_OF_MESSAGES,
    ),
    Operation(
        name="isend_irecv",
        buffers=lambda scene: _messages(scene, 2),
        perform=_isend_irecv,
        forms=_OF_MESSAGES,
    ),
    Operation(
        name="broadcast",
        rooted=True,
        buffers=_broadcast,
        perform=lambda dist, t, call: dist.broadcast(t["tensor"][0], src=call.root, **call.options),
    ),
    Operation(
        name="all_gather",
        buffers=_all_gather,
        perform=lambda dist, t, call: dist.all_gather(t["output"], t["input"][0], **call.options),
    ),
    Operation(
        name="all_gather_into_tensor",
        buffers=_all_gather_into_tensor,
        perform=lambda dist, t, call: dist.all_gather_into_tensor(
            t["output"][0], t["input"][0], **call.options
        ),
    ),
    Operation(
        name="gather",
        rooted=True,
        buffers=_gather,
        perform=lambda dist, t, call: dist.gather(
            t["input"][0], t["output"] if call.is_root else None, dst=call.root, **call.options
        ),
    ),
    Operation(
        name="scatter",
        rooted=True,
        buffers=_scatter,
        perform=lambda dist, t, call: dist.scatter(
            t["output"][0], t["input"] if call.is_root else None, src=call.root, **call.options
        ),
    ),
    Operation(
        name="all_reduce",
        reduces=True,
        buffers=_all_reduce,
        perform=lambda dist, t, call: dist.all_reduce(t["tensor"][0], op=call.op, **call.options),
    ),
    Operation(
        name="reduce",
        reduces=True,
        rooted=True,
        buffers=_reduce,
        perform=lambda dist, t, call: dist.reduce(
            t["tensor"][0], dst=call.root, op=call.op, **call.options
        ),
    ),
    Operation(
        name="reduce_scatter",
        reduces=True,
        buffers=_reduce_scatter,
        perform=lambda dist, t, call: dist.reduce_scatter(
            t["output"][0], t["input"], op=call.op, **call.options
        ),
    ),
    Operation(
        name="reduce_scatter_tensor",
        reduces=True,
        buffers=_reduce_scatter_tensor,
        perform=lambda dist, t, call: dist.reduce_scatter_tensor(
            t["output"][0], t["input"][0], op=call.op, **call.options
        ),
    ),
    Operation(
        name="all_to_all",
        buffers=lambda scene: _lists(scene, uneven=False),
        perform=_call_lists,
    ),
    Operation(
        name="all_to_all_uneven",
        buffers=lambda scene: _lists(scene, uneven=True),
        perform=_call_lists,
        forms=_UNEVEN_FORMS,
    ),
    Operation(
        name="all_to_all_single",
        buffers=lambda scene: _single_buffers(scene, uneven=False),
        perform=lambda dist, t, call: dist.all_to_all_single(
            t["output"][0], t["input"][0], **call.options
        ),
    ),
    Operation(
        name="all_to_all_single_uneven",
        buffers=lambda scene: _single_buffers(scene, uneven=True),
        perform=_call_uneven,
        forms=_UNEVEN_FORMS,
    ),
    Operation(
        name="barrier",
        rooted=True,
        buffers=lambda scene: {},
        perform=_barrier,
        witness=_was_kept_waiting,
        dtypes=("",),
        forms=("plain", "async", "sub-group"),
    ),
)
OPERATIONS = {operation.name: operation for operation in _OPERATIONS}
