"""What a person should know about a case in a model-parallel layout. No torch."""

from collections.abc import Iterator, Sequence

from distcheck.contract import Training
from distcheck.records import EXACT_DTYPES, Case
from distcheck.records.generated_words import PREFIX
from distcheck.records.mesh import MESH, Mesh
from distcheck.training.jobs import CaseFacts
from distcheck.workloads.cells import CELLS

BUFFERS = (
    "buffers, such as BatchNorm's running statistics, are compared before the first step and "
    "between the two runs, and not with one process"
)
_NOT_DIVIDED = ("lattice", "composite", "twelve_steps")  # of the default run


def notes_on(mesh: Mesh, sizes: Sequence[Sequence[int]]) -> Iterator[str]:
    """What a person should know before reading the verdict."""
    if mesh.data == mesh.world:
        yield (
            "the code exchanges in its forward pass, so no rank has a part of the gradient by "
            "itself: the float32 and float64 references judge, with all samples in one process"
        )
    else:
        yield _of_layers(mesh)
    uneven = next((step for step in sizes if len(set(step)) > 1), None)
    if uneven is not None:
        parts = " + ".join(str(uneven[rank]) for rank in mesh.readers)
        yield f"unequal shards ({parts}): each must be weighted by its number of samples"


def _of_layers(mesh: Mesh) -> str:
    return (
        f"{MESH}{mesh}: {mesh.world // mesh.data} ranks train one model together, on the same "
        "samples. Sums that are split over ranks are rounded in another order than in one process, "
        "so outputs, gradients and losses are judged by the float32 and float64 references, and "
        "not by the bitwise and rounding-bound layers"
    )


def why_left_out(case: Case, facts: CaseFacts) -> str:
    """Why a case shows nothing of a layout; empty where it does."""
    workload = case.workload
    generated = workload.startswith(PREFIX)
    if workload in CELLS or generated:
        return "a layout divides the layers of the models that it was written for"
    if workload.partition(":")[0] in _NOT_DIVIDED:
        return (
            "a layout divides the layers of the models that it was written for; name one in "
            '@strategy(workload="mlp") or by --workload, and it also runs in float64'
        )
    if case.dtype not in EXACT_DTYPES:
        return f"no reference has a bound for sums that are split over ranks in {case.dtype}"
    if facts.draws_random_numbers:
        return (
            "the forward pass draws random numbers, and no reference can repeat those of ranks "
            "that compute one sample together"
        )
    clips = facts.training.clip_norm is not None
    if clips and not facts.own_clip:
        return (
            "the loop would clip by the norm of what a rank holds; give the strategy "
            "clip(model, max_norm), which takes the norm of the whole model"
        )
    if facts.training != Training(clip_norm=facts.training.clip_norm):
        return (
            "in a layout the loop does not accumulate, scale the loss or resume, as this "
            "workload asks; a strategy's own backward and step may"
        )
    return ""
