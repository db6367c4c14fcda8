"""broadcast, all_gather (list and tensor), gather and scatter."""

from distcheck.backend_probe.scene import Buffer, Buffers, Operation, ProbeScene


def _broadcast(scene: ProbeScene) -> Buffers:
    sent = scene.part(scene.root)
    before = sent if scene.rank == scene.root else None
    return {"tensor": [Buffer(scene.rows, before, list(sent))]}


def _own(scene: ProbeScene) -> Buffer:
    part = scene.part(scene.rank)
    return Buffer(scene.rows, part, list(part))


def _of_everybody(scene: ProbeScene) -> list[Buffer]:
    return [Buffer(scene.rows, None, list(scene.part(rank))) for rank in range(scene.world)]


def _all_gather(scene: ProbeScene) -> Buffers:
    return {"output": _of_everybody(scene), "input": [_own(scene)]}


def _all_gather_into_tensor(scene: ProbeScene) -> Buffers:
    whole = [v for rank in range(scene.world) for v in scene.part(rank)]
    output = Buffer(scene.rows * scene.world, None, list(whole))
    return {"output": [output], "input": [_own(scene)]}


def _gather(scene: ProbeScene) -> Buffers:
    output = _of_everybody(scene) if scene.rank == scene.root else []
    return {"output": output, "input": [_own(scene)]}


def _scatter(scene: ProbeScene) -> Buffers:
    parts = [scene.part(scene.root, part) for part in range(scene.world)]
    given = [Buffer(scene.rows, part, list(part)) for part in parts]
    return {
        "output": [Buffer(scene.rows, None, list(parts[scene.rank]))],
        "input": given if scene.rank == scene.root else [],
    }


OPERATIONS = (
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
)
