"""Determines how the ranks of a job are arranged: the axes of the script's mesh and their kinds.

The sources are torch objects (a DeviceMesh of all ranks, the placements of DTensors if axis names
say nothing, pipeline stages) and Megatron-core. Hand-written groups leave no such trace; the user
then passes `--mesh`.
"""

import gc
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from distcheck.job.inside.parameters import Parameters
from distcheck.machine import compat
from distcheck.recordings.jobs.records import SHARING, MeshAxis
from distcheck.records.mesh import parse_mesh

# Kinds of axes by common names; a name is split at underscores.
_WORDS = {
    "data": ("dp", "ddp", "data", "batch", "fsdp", "hsdp", "replicate", "replica", "shard"),
    "tensor": ("tp", "tensor", "mp", "model"),
    "sequence": ("cp", "context", "sp", "sequence", "seq", "ring", "ulysses"),
    "pipeline": ("pp", "pipe", "pipeline", "stage"),
    "expert": ("ep", "expert", "experts", "moe"),
}


def axes_of(parameters: Parameters, world: int, asked: str) -> tuple[MeshAxis, ...]:
    """Return the axes with more than one rank; empty if no mesh is known."""
    if asked:
        try:
            mesh = parse_mesh(asked, world)
        except ValueError:  # reported when the job is judged
            return ()
        found = [MeshAxis(name=name, kind=name, size=size) for name, size in mesh.axes]
    else:
        found = _mesh_axes(parameters, world)
        if not any(axis.kind == "pipeline" for axis in found):
            found = _pipeline_axes(world) or found
        found = _megatron_axes(world) or found
    return tuple(axis for axis in found if axis.size > 1)


def _megatron_axes(world: int) -> list[MeshAxis]:
    """Return Megatron-core's axes in the order that Megatron-core uses, the last axis first."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return []

    def size_of(kind: str) -> int:  # releases without such groups have one rank there
        return int(getattr(state, f"get_{kind}_parallel_world_size", lambda: 1)())

    data, experts = size_of("data"), size_of("expert_model")
    if data % experts:  # experts span other axes than data, and form no separate axis
        experts = 1
    sizes = (
        ("pp", size_of("pipeline_model")), ("dp", data // experts), ("ep", experts),
        ("cp", size_of("context")), ("tp", size_of("tensor_model")),
    )  # fmt: skip
    axes = [MeshAxis(name=name, kind=kind_of_axis(name), size=size) for name, size in sizes]  # type: ignore[arg-type]
    is_divided = any(axis.size > 1 for axis in axes if axis.kind != "data")
    return axes if is_divided and math.prod(axis.size for axis in axes) == world else []


def kind_of_axis(name: str) -> str:
    """Return the kind of an axis with this name, or ""."""
    for word in name.lower().replace("-", "_").split("_"):
        kinds = [kind for kind, words in _WORDS.items() if word in words]
        if kinds:
            return kinds[0]
    return ""


def _mesh_axes(parameters: Parameters, world: int) -> list[MeshAxis]:
    """Return the axes of a mesh of all ranks in row-major order; if there are several meshes, those
    of the most informative one.
    """
    if world < 2 or "torch.distributed.device_mesh" not in sys.modules:
        return []
    from torch.distributed.device_mesh import DeviceMesh

    meshes: dict[Any, list[MeshAxis]] = {}
    for one in gc.get_objects():
        if type(one) is not DeviceMesh:
            continue
        root = compat.root_mesh(one)
        for mesh in (one, root):
            ranks = mesh.mesh.flatten().tolist()
            if ranks == list(range(world)):
                key = (tuple(mesh.mesh.shape), mesh.mesh_dim_names)
                meshes.setdefault(key, _axes_of_mesh(mesh, parameters))
    return max(meshes.values(), key=_informativeness, default=[])


def _informativeness(axes: Sequence[MeshAxis]) -> tuple[int, int]:
    return sum(axis.kind in SHARING for axis in axes), len(axes)


def _axes_of_mesh(mesh: Any, parameters: Parameters) -> list[MeshAxis]:
    names = mesh.mesh_dim_names or [f"axis {number}" for number in range(mesh.mesh.dim())]
    found = []
    for number, (name, size) in enumerate(zip(names, mesh.mesh.shape, strict=True)):
        kind: Any = kind_of_axis(name) or _kind_by_use(mesh, number, parameters)
        found.append(MeshAxis(name=name, kind=kind, size=size))
    return found


def _kind_by_use(mesh: Any, number: int, parameters: Parameters) -> str:
    """Return "tensor" for an axis that shards parameters outside fully_shard, else "data"."""
    own = mesh.mesh.movedim(number, -1).reshape(-1, mesh.mesh.shape[number]).tolist()
    wholes = parameters.of_fsdp2()
    for name, parameter in parameters.by_name.items():
        used: Any = wholes.get(name, parameter)
        places = getattr(used, "placements", ())
        for axis, place in enumerate(places):
            ranks = used.device_mesh.mesh.movedim(axis, -1)
            several = ranks.reshape(-1, ranks.shape[-1]).tolist()
            if not place.is_replicate() and len(several[0]) > 1 and several[0] in own:
                return "tensor"
    return "data"


def _pipeline_axes(world: int) -> list[MeshAxis]:
    """Return the axes of a pipeline whose ranks are consecutive or maximally strided."""
    if world < 2 or "torch.distributed.pipelining.stage" not in sys.modules:
        return []
    kind = compat.pipeline_stage()
    stages: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    if not stages:
        return []
    group = stages[0].group or torch.distributed.group.WORLD
    ranks = torch.distributed.get_process_group_ranks(group)
    others = world // len(ranks)
    pipeline = MeshAxis(name="pipeline", kind="pipeline", size=len(ranks))
    data = MeshAxis(name="data", kind="data", size=others)
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return [data, pipeline]
    return [pipeline, data]
