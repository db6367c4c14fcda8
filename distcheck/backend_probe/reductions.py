"""all_reduce, reduce, reduce_scatter and reduce_scatter_tensor."""

from distcheck.backend_probe.scene import Buffer, Buffers, Operation, ProbeScene


def _all_reduce(scene: ProbeScene) -> Buffers:
    return {"tensor": [Buffer(scene.rows, scene.part(scene.rank), scene.reduced())]}


def _reduce(scene: ProbeScene) -> Buffers:
    """What the tensor holds afterwards is promised to the root only."""
    after = scene.reduced() if scene.rank == scene.root else None
    return {"tensor": [Buffer(scene.rows, scene.part(scene.rank), after)]}


def _reduce_scatter(scene: ProbeScene) -> Buffers:
    parts = [scene.part(scene.rank, part) for part in range(scene.world)]
    return {
        "output": [Buffer(scene.rows, None, scene.reduced(scene.rank))],
        "input": [Buffer(scene.rows, part, list(part)) for part in parts],
    }


def _reduce_scatter_tensor(scene: ProbeScene) -> Buffers:
    whole = [v for part in range(scene.world) for v in scene.part(scene.rank, part)]
    return {
        "output": [Buffer(scene.rows, None, scene.reduced(scene.rank))],
        "input": [Buffer(scene.rows * scene.world, whole, list(whole))],
    }


OPERATIONS = (
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
)
