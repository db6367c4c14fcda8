"""Collects module inputs and outputs from all copies of a replay: the reference of each rank, and
the change of each tensor when every parameter is perturbed by one ULP.
"""

import math

import torch

from distcheck.job.inside.batch_source import ALL
from distcheck.job.inside.forks import Written
from distcheck.job.settings import ReplayTask
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.watched import (
    OF_RANKS,
    Shape,
    WatchedStep,
    pack_modules,
    prefix_of_rank,
    shapes_by_role,
    unpack_modules,
)

Tensors = dict[str, torch.Tensor]


class ModulesOfCopies:
    """Recorded modules of each rank, for each copy."""

    def __init__(self, draws: int, world: int) -> None:
        self._draws, self._world = draws, world
        self._found: dict[ReplayTask, dict[int, WatchedStep]] = {}

    def without(self, found: Written) -> Written:
        """Remove recorded modules from the results of copies and keep them here. Return the
        remaining results.
        """
        left: Written = {}
        for task, one in found.items():
            left[task] = one
            if one is not None and any(name.startswith(OF_RANKS) for name in one):
                left[task] = {n: t for n, t in one.items() if not n.startswith(OF_RANKS)}
                several = {
                    rank: unpack_modules(one, prefix_of_rank(rank)) for rank in range(self._world)
                }
                self._found[task] = {r: seen for r, seen in several.items() if seen is not None}
        return left

    def results(self, step: int, own: dict[int, WatchedStep]) -> Tensors:
        """Return the recorded modules of each rank and their spreads, for the reference's file."""
        out: Tensors = {}
        for rank in range(self._world):
            seen = own.get(rank) or self._get(rank, step, 0).get(rank)
            if seen is None:
                continue
            perturbed = [
                self._get(rank, step, draw).get(rank) for draw in range(1, self._draws + 1)
            ]
            spread = distances_from_farthest(seen, [one for one in perturbed if one is not None])
            out |= {
                **pack_modules(seen, prefix_of_rank(rank)),
                f"{prefix_of_rank(rank)}spread": spread,
            }
        self._found = {task: one for task, one in self._found.items() if task.step != step}
        return out

    def _get(self, rank: int, step: int, draw: int) -> dict[int, WatchedStep]:
        found = self._found
        return (
            found.get(ReplayTask(rank, step, draw)) or found.get(ReplayTask(ALL, step, draw)) or {}
        )


def packed_all(seen: dict[int, WatchedStep]) -> Tensors:
    return {
        n: t
        for rank, one in seen.items()
        for n, t in pack_modules(one, prefix_of_rank(rank)).items()
    }


def distances_from_farthest(seen: WatchedStep, perturbed: list[WatchedStep]) -> torch.Tensor:
    """Return, for each tensor and gradient, the largest distance from its perturbed versions; NaN
    if there are none.
    """
    found = torch.full(seen.sums.shape[:2], math.nan, dtype=torch.float64)
    places = seen.places()
    for one in perturbed:
        others = one.places()
        for name in places.keys() & others.keys():
            place, other = places[name], others[name]
            if seen.watched.tensors[place].shape == one.watched.tensors[other].shape:
                apart = (seen.sums[place] - one.sums[other]).norm(dim=-1)
                found[place] = torch.fmax(found[place], apart)
    return found


def shapes_at(job: JobRecording, rank: int, step: int) -> dict[str, Shape | None]:
    """Return the shapes of a rank's module inputs and outputs."""
    watched = job.records[rank, step].modules
    return {} if watched is None else shapes_by_role(watched)
