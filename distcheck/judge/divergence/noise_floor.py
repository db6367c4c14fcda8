"""Measures the noise floor of a job by rerunning it with perturbed parameters.

The command runs twice more, and in every step each rank perturbs every parameter by one ULP while
it computes gradients (`job/inside/perturb.py`). The results are at some distance from the job's.
Two correct runs that round differently, for example with two versions of torch or two world sizes,
diverge about as far. So the bound at a step is

    8 max_d |x_d - x| + gamma(W + 1) |x| + u |X|

for a loss or gradient x, where x_d is that of perturbed run d and X are all gradients: the bound of
a job against its reference (`job/checks/reference.py`). In contrast, perturbed runs are not reset
to the job's state at each step, since the recording to compare was not reset either. Both drift for
the same reasons. For parameters and buffers the last two terms are gamma(16 (k + 1)) |x|: k + 1
updates of about ten rounded operations each. u is that of the less precise dtype, and W the larger
world.

A distance may be small by chance, such as that of a scalar. The largest relative change of a tensor
so far therefore applies to all later steps.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from distcheck import private
from distcheck.machine.numerics import gamma
from distcheck.recordings.jobs.reading import STEMS, JobRecording
from distcheck.recordings.jobs.records import read_record
from distcheck.recordings.jobs.sketches import SLOTS, project
from distcheck.recordings.jobs.watched import WatchedStep
from distcheck.recordings.recording import Kind

FILE = "noise_floor.json"
NOISE_FACTOR = 8.0  # Heuristic: as for a job against its reference
PERTURBED_RUNS = 2
Size = Annotated[float, msgspec.Meta(ge=0)]
STEM_OF = {**STEMS, Kind.PARAMETER: "after", Kind.BUFFER: "buffer"}


class Perturbation(msgspec.Struct, frozen=True):
    """Distance of the perturbed run that is farther away, and norm of the unperturbed value."""

    distance: Size
    size: Size

    @property
    def share(self) -> float:
        return self.distance / self.size if self.size else 0.0


class NoiseFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Noise floor by step and name (`loss`, `step/<parameter>`, `after/<parameter>`, ...). `why` is
    the reason that it ends before the last step or does not exist.
    """

    steps: tuple[dict[str, Perturbation], ...] = ()
    why: str = ""

    def spread(self, name: str, step: int) -> float | None:
        """Return the noise floor at a step, by relative changes so far; None: not measured."""
        if not 0 <= step < len(self.steps) or name not in self.steps[step]:
            return None
        here = self.steps[step][name]
        share = max(one[name].share for one in self.steps[: step + 1] if name in one)
        return max(here.distance, share * here.size)

    def drift(self, step: int) -> float | None:
        """Return the relative distance of parameters after a step."""
        if not 0 <= step < len(self.steps):
            return None
        found = [one for name, one in self.steps[step].items() if name.startswith("after/")]
        size = math.hypot(*(one.size for one in found))
        return math.hypot(*(one.distance for one in found)) / size if size else 0.0


def tolerance(spread: float, norm: float, whole_norm: float, *, world: int, unit: float) -> float:
    """Return the tolerance of the L2 distance between two right gradients."""
    measured = 0.0 if math.isnan(spread) else NOISE_FACTOR * spread
    return measured + gamma(world + 1, unit) * norm + unit * whole_norm


def measure_noise_floor(job: JobRecording, perturbed: Sequence[JobRecording]) -> NoiseFloor:
    """Return the distances of perturbed runs from the job, up to the first different choice."""
    steps: list[dict[str, Perturbation]] = []
    for place, step in enumerate(job.steps):
        why = next(filter(None, (why_choice_differs(job, one, place) for one in perturbed)), "")
        if why:
            return NoiseFloor(steps=tuple(steps), why=why)
        found: dict[str, Perturbation] = {}
        for one in perturbed:
            for name, distance, size in _distances(job, one, step):
                if math.isfinite(distance) and math.isfinite(size):
                    before = found.get(name, Perturbation(0.0, size))
                    found[name] = Perturbation(max(before.distance, distance), size)
        steps.append(found)
    return NoiseFloor(steps=tuple(steps))


def why_choice_differs(job: JobRecording, perturbed: JobRecording, place: int) -> str:
    """Return the reason that two runs of the same command differ in a choice, or ""."""
    step = job.steps[place]
    if step not in perturbed.steps or perturbed.world != job.world:
        return f"the perturbed run made no step {step}"
    for rank in range(job.world):
        own, other = job.header(rank, place), perturbed.header(rank, perturbed.steps.index(step))
        if own.ids != other.ids or own.rng_digest != other.rng_digest:
            return (
                f"at step {step} the same command has different samples or random numbers when "
                "it runs "
                "again: seed all random streams of the script"
            )
        if own.optimizer != other.optimizer:
            return f"at step {step} the same command has different settings when it runs again"
        if job.records[rank, step].skipped != perturbed.records[rank, step].skipped:
            return f"step {step} is skipped by one of two runs of the same command"
    return ""


def _distances(
    job: JobRecording, perturbed: JobRecording, step: int
) -> Iterator[tuple[str, float, float]]:
    for rank in range(job.world):
        pair = [unscaled_loss(one, rank, step) for one in (job, perturbed)]
        yield "loss", abs(pair[0] - pair[1]), abs(pair[0])
    for kind, stem in STEM_OF.items():
        ranks = range(job.world) if kind is Kind.LOCAL_GRADIENT else range(1)
        for rank in ranks:
            for name in job.names(kind):
                one, two = (
                    recorded_tensor(side, kind, rank, step, name) for side in (job, perturbed)
                )
                if one is not None and two is not None:
                    yield f"{stem}/{name}", distance_between(one, two), norm_of(one)
    for rank in range(job.world):
        seen = [side.modules(rank, step) for side in (job, perturbed)]
        if seen[0] is not None and seen[1] is not None:
            yield from _module_distances(seen[0], seen[1])


def _module_distances(one: WatchedStep, two: WatchedStep) -> Iterator[tuple[str, float, float]]:
    """Yield distances and sizes of module inputs and outputs and their gradients."""
    places, others = one.places(), two.places()
    for name in (name for name in places if name in others):
        mine, other = places[name], others[name]
        if one.watched.tensors[mine].shape == two.watched.tensors[other].shape:
            distance_between = (one.sums[mine] - two.sums[other]).norm(dim=-1)
            for kind, size in enumerate(one.sums[mine].norm(dim=-1)):
                yield (
                    module_tensor_name(name, gradient=bool(kind)),
                    float(distance_between[kind]),
                    float(size),
                )


def module_tensor_name(name: str, *, gradient: bool) -> str:
    return f"module/{name}{'/gradient' * gradient}"


def unscaled_loss(job: JobRecording, rank: int, step: int) -> float:
    """Return the loss of a rank's step without its loss scale; NaN if unknown."""
    record = job.records[rank, step]
    if not record.trained:
        return math.nan
    return sum(one.loss or 0.0 for one in record.trained) / (record.scale or 1.0)


def recorded_tensor(
    job: JobRecording, kind: Kind, rank: int, step: int, name: str
) -> torch.Tensor | None:
    """Return a rank's tensor at a step, whole or as 64 projections; None if not recorded."""
    if kind in STEMS:
        return job.gradient(kind, rank, step, name)
    stem = f"{STEM_OF[kind]}/{name}"
    kept = job.tensors(rank, step)
    return kept[stem] if stem in kept else kept.get(f"sums/{stem}")


def norm_of(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def distance_between(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the L2 norm of a difference; inf for different shapes."""
    if one.shape != two.shape:
        sums = [t.shape == (SLOTS,) and t.dtype == torch.float64 for t in (one, two)]
        if sums.count(True) != 1:
            return math.inf
        one, two = (
            t if is_sums else project(t) for t, is_sums in zip((one, two), sums, strict=True)
        )
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - two.to(wide)).norm())


def write_noise_floor(noise_floor: NoiseFloor, folder: Path) -> None:
    private.write(folder / FILE, msgspec.json.encode(noise_floor))


def read_noise_floor(folder: Path) -> NoiseFloor:
    """Read a noise floor, empty if none was saved. Raises UsageError if it is damaged."""
    file = folder / FILE
    if not file.exists():
        return NoiseFloor(why="the recording was kept without one")
    return read_record(file, NoiseFloor)
