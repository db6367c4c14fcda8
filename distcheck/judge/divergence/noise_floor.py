"""How far two right runs of one job may part, measured: the same job with moved parameters.

The command runs again, twice, and in every step each rank moves every parameter by one ULP for as
long as it computes gradients (`job/inside/perturb.py`). What it then holds is some distance from
what the job held. Two right runs that round differently, as those of two versions of torch or of
two numbers of ranks, are about as far from each other. So the bound at a step is

    8 max_d |x_d - x| + gamma(W + 1) |x| + u |X|

of a loss or gradient x, where x_d is what a moved run d has and X are all gradients: that of a job
against its reference (`job/checks/reference.py`), with a difference: the moved runs are not put
back to the job's state at each step, since the other recording was not either. Both drift, by the
same sources. Of parameters and buffers the last two terms are gamma(16 (k + 1)) |x|: k + 1 updates,
each of some ten rounded operations. u is that of the coarser dtype, and W the larger world.

A distance may be small by chance, as that of one number: what a tensor has once been moved by,
relative to its norm, it may be moved by at any later step.
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
from distcheck.recordings.jobs.records import read_own
from distcheck.recordings.jobs.sketches import SLOTS, sketch
from distcheck.recordings.jobs.watched import WatchedStep
from distcheck.recordings.recording import Kind

FILE = "noise_floor.json"
NOISE_FACTOR = 8.0  # chosen: as for a job against its reference
PERTURBED_RUNS = 2
Size = Annotated[float, msgspec.Meta(ge=0)]
STEM_OF = {**STEMS, Kind.PARAMETER: "after", Kind.BUFFER: "buffer"}


class Perturbation(msgspec.Struct, frozen=True):
    """How far the farther of the moved runs was, and the norm of what it was far from."""

    distance: Size
    size: Size

    @property
    def share(self) -> float:
        return self.distance / self.size if self.size else 0.0


class NoiseFloor(msgspec.Struct, frozen=True, kw_only=True):
    """By step, what was moved how far: `loss`, `step/<parameter>`, `after/<parameter>`, ...; and
    `why` that ends before the last step, or there is none.
    """

    steps: tuple[dict[str, Perturbation], ...] = ()
    why: str = ""

    def spread(self, name: str, step: int) -> float | None:
        """How far something may move at a step by what it moved until then; None: not measured."""
        if not 0 <= step < len(self.steps) or name not in self.steps[step]:
            return None
        here = self.steps[step][name]
        share = max(one[name].share for one in self.steps[: step + 1] if name in one)
        return max(here.distance, share * here.size)

    def drift(self, step: int) -> float | None:
        """How far the parameters were after a step, over their norm."""
        if not 0 <= step < len(self.steps):
            return None
        found = [one for name, one in self.steps[step].items() if name.startswith("after/")]
        size = math.hypot(*(one.size for one in found))
        return math.hypot(*(one.distance for one in found)) / size if size else 0.0


def tolerance(spread: float, norm: float, whole_norm: float, *, world: int, unit: float) -> float:
    """How far a right gradient may be from another one, as an L2 norm."""
    measured = 0.0 if math.isnan(spread) else NOISE_FACTOR * spread
    return measured + gamma(world + 1, unit) * norm + unit * whole_norm


def measure(job: JobRecording, perturbed: Sequence[JobRecording]) -> NoiseFloor:
    """The distance of moved runs from the job, as long as they choose what it chose."""
    steps: list[dict[str, Perturbation]] = []
    for place, step in enumerate(job.steps):
        why = next(filter(None, (chose_other(job, one, place) for one in perturbed)), "")
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


def chose_other(job: JobRecording, perturbed: JobRecording, place: int) -> str:
    """Why a run of the same command is not the job any more; empty where it is."""
    step = job.steps[place]
    if step not in perturbed.steps or perturbed.world != job.world:
        return f"the moved run made no step {step}"
    for rank in range(job.world):
        own, other = job.header(rank, place), perturbed.header(rank, perturbed.steps.index(step))
        if own.ids != other.ids or own.rng_digest != other.rng_digest:
            return (
                f"at step {step} the same command has other samples or random numbers when it runs "
                "again: seed all random streams of the script"
            )
        if own.optimizer != other.optimizer:
            return f"at step {step} the same command has other settings when it runs again"
        if job.records[rank, step].skipped != perturbed.records[rank, step].skipped:
            return f"step {step} is skipped by one of two runs of the same command"
    return ""


def _distances(
    job: JobRecording, perturbed: JobRecording, step: int
) -> Iterator[tuple[str, float, float]]:
    for rank in range(job.world):
        pair = [loss_of(one, rank, step) for one in (job, perturbed)]
        yield "loss", abs(pair[0] - pair[1]), abs(pair[0])
    for kind, stem in STEM_OF.items():
        ranks = range(job.world) if kind is Kind.LOCAL_GRADIENT else range(1)
        for rank in ranks:
            for name in job.names(kind):
                one, two = (held(side, kind, rank, step, name) for side in (job, perturbed))
                if one is not None and two is not None:
                    yield f"{stem}/{name}", distance_between(one, two), norm_of(one)
    for rank in range(job.world):
        seen = [side.modules(rank, step) for side in (job, perturbed)]
        if seen[0] is not None and seen[1] is not None:
            yield from _of_modules(seen[0], seen[1])


def _of_modules(one: WatchedStep, two: WatchedStep) -> Iterator[tuple[str, float, float]]:
    """Of what modules were given and have returned, and of the gradients of that."""
    places, others = one.places(), two.places()
    for name in (name for name in places if name in others):
        mine, other = places[name], others[name]
        if one.watched.tensors[mine].shape == two.watched.tensors[other].shape:
            distance_between = (one.sums[mine] - two.sums[other]).norm(dim=-1)
            for kind, size in enumerate(one.sums[mine].norm(dim=-1)):
                yield (
                    of_module(name, gradient=bool(kind)),
                    float(distance_between[kind]),
                    float(size),
                )


def of_module(name: str, *, gradient: bool) -> str:
    """What a tensor of a module's call is called in a noise floor."""
    return f"module/{name}{'/gradient' * gradient}"


def loss_of(job: JobRecording, rank: int, step: int) -> float:
    """What a rank's step was trained on, without a scaler's scale; NaN where it is not known."""
    record = job.records[rank, step]
    if not record.trained:
        return math.nan
    return sum(one.loss or 0.0 for one in record.trained) / (record.scale or 1.0)


def held(job: JobRecording, kind: Kind, rank: int, step: int, name: str) -> torch.Tensor | None:
    """What a rank held of a tensor at a step: whole, or as 64 sums; None where neither is kept."""
    if kind in STEMS:
        return job.gradient(kind, rank, step, name)
    stem = f"{STEM_OF[kind]}/{name}"
    kept = job.tensors(rank, step)
    return kept[stem] if stem in kept else kept.get(f"sums/{stem}")


def norm_of(tensor: torch.Tensor) -> float:
    """The L2 norm."""
    return float(tensor.double().norm())


def distance_between(one: torch.Tensor, two: torch.Tensor) -> float:
    """The L2 norm of a difference; inf between tensors of other shapes."""
    if one.shape != two.shape:
        sums = [t.shape == (SLOTS,) and t.dtype == torch.float64 for t in (one, two)]
        if sums.count(True) != 1:
            return math.inf
        one, two = (
            t if is_sums else sketch(t) for t, is_sums in zip((one, two), sums, strict=True)
        )
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - two.to(wide)).norm())


def write(noise_floor: NoiseFloor, folder: Path) -> None:
    private.write(folder / FILE, msgspec.json.encode(noise_floor))


def read(folder: Path) -> NoiseFloor:
    """Again; an empty one where none was kept. Raises UsageError for one that is damaged."""
    file = folder / FILE
    if not file.exists():
        return NoiseFloor(why="the recording was kept without one")
    return read_own(file, NoiseFloor)
