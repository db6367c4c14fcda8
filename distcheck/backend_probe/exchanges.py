"""all_to_all, with lists and with one tensor, in equal and in unequal parts."""

from typing import Any

from distcheck.backend_probe.scene import Buffer, Buffers, Operation, ProbedCall, ProbeScene


def _rows(scene: ProbeScene, sender: int, receiver: int) -> int:
    """How many rows go from one rank to another where parts are unequal: one to `rows` of them."""
    return 1 + (sender + 2 * receiver) % scene.rows


def _sent(scene: ProbeScene, rank: int, *, uneven: bool) -> list[Buffer]:
    found = []
    for receiver in range(scene.world):
        rows = _rows(scene, rank, receiver) if uneven else scene.rows
        part = scene.part(rank, receiver, rows=rows)
        found.append(Buffer(rows, part, list(part)))
    return found


def _received(scene: ProbeScene, *, uneven: bool) -> list[Buffer]:
    parts = [_sent(scene, rank, uneven=uneven)[scene.rank] for rank in range(scene.world)]
    return [Buffer(part.rows, None, part.after) for part in parts]


def _joined(buffers: list[Buffer]) -> Buffer:
    before = None if buffers[0].before is None else [v for b in buffers for v in b.before or ()]
    return Buffer(sum(b.rows for b in buffers), before, [v for b in buffers for v in b.after or ()])


def _lists(scene: ProbeScene, *, uneven: bool) -> Buffers:
    return {
        "output": _received(scene, uneven=uneven),
        "input": _sent(scene, scene.rank, uneven=uneven),
    }


def _single(scene: ProbeScene, *, uneven: bool) -> Buffers:
    return {name: [_joined(parts)] for name, parts in _lists(scene, uneven=uneven).items()}


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


_UNEVEN_FORMS = ("plain", "async", "strided", "transposed", "mixed", "large", "sub-group")

OPERATIONS = (
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
        buffers=lambda scene: _single(scene, uneven=False),
        perform=lambda dist, t, call: dist.all_to_all_single(
            t["output"][0], t["input"][0], **call.options
        ),
    ),
    Operation(
        name="all_to_all_single_uneven",
        buffers=lambda scene: _single(scene, uneven=True),
        perform=_call_uneven,
        forms=_UNEVEN_FORMS,
    ),
)
