"""The passes of an accumulation as one: a copy of the replay gets all micro-batches of all ranks in
one batch, and leaves the gradient of their loss.

The script's own factor before the loss (`loss / accumulate`) is left out: the gradient is that of
the loss that torch computed, where the script's is a multiple of it, or of the mean at the end of
the script's own computation. So it does not matter what the script takes the factor to be.
"""

import resource
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import psutil
import torch

from distcheck.job.inside import state, terms
from distcheck.job.inside.batch_source import ALL, BatchSource, NotTogetherError
from distcheck.job.settings import ReplayTask
from distcheck.machine.resources import available_bytes, cores
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import StepRecord

Found = Mapping[ReplayTask, dict[str, torch.Tensor] | None]
Kind = Literal["", "mean", "sum", "terms"]
_KINDS: tuple[Kind, ...] = ("", "mean", "sum", "terms")
_TERM = "term/"  # before a gradient: it is that of a term
# Chosen: rounding leaves 1e-6 of a gradient, and a second term of a loss, or samples that interact,
# more than a thousandth.
_SAME = 1e-3
_ONE_BY_ONE = "the loss of a larger batch is not the mean of its parts' losses"


def interacts(records: Sequence[StepRecord]) -> str:
    """Why samples of several passes may not share a batch; empty where they may."""
    if any(record.batchnorm for record in records):
        return "BatchNorm normalizes by the batch"
    if any(one.draws for record in records for one in record.passes):
        return "the forward pass draws random numbers"
    if any(one.autocast for record in records for one in record.passes):
        return "autocast rounds by the shape of a batch"
    return ""


class MergedBatch:
    """Whether passes can be made as one; the copies for that, and what comes of them."""

    def __init__(self, job: JobRecording, batch_source: BatchSource, apart: str = "") -> None:
        self._job, self._feeding = job, batch_source
        self.kind: Kind = ""
        self._heard: list[terms.Heard] = []
        self._probes: list[ReplayTask] = []
        self._draws: list[ReplayTask] = []
        self._moves: dict[str, float] = {}  # by one ULP, over the norm
        self._accumulates = any(len(record.trained) > 1 for record in job.records.values())
        self.why = apart if self._accumulates else ""  # they could not be made as one

    def tasks(self, step: int, draws: int) -> list[ReplayTask]:
        """The copies of a step; at the first one also those that show whether samples interact."""
        self.kind, self._heard, self._draws, self._probes = "", [], [], []
        if not self._accumulates or self.why:
            return []
        every = [
            (rank, number)
            for number in range(len(self._feeding.passes(step, 0)))
            for rank in range(self._job.world)
        ]
        why = self._why_not(step, every)
        if why:
            self.why = why if step == self._job.steps[0] else f"at step {step} {why}"
            return []
        self._draws = [ReplayTask(ALL, step, draw, tuple(every)) for draw in range(draws + 1)]
        if step == self._job.steps[0]:
            first = every[: self._job.world]
            each = (first, *([pair] for pair in first))
            self._probes = [ReplayTask(ALL, step, 0, tuple(pairs)) for pairs in each]
        return list(dict.fromkeys((*self._draws, *self._probes)))

    def _why_not(self, step: int, every: Sequence[tuple[int, int]]) -> str:
        records = self._job.at(step)
        if why := interacts(records):
            return why
        passes = [one for record in records for one in record.passes]
        if len({len(record.passes) for record in records}) > 1:
            return "ranks make different numbers of passes"
        if any(record.earlier for record in records) or not all(one.live for one in passes):
            return "gradients of some passes are dropped, or kept for another step"
        if any(one.loss is None for one in passes):
            return "a backward pass has several forward passes"
        counts = sorted({len(one.rows) for one in passes})
        if len(counts) > 1:
            several = ", ".join(map(str, counts[:8]))
            return f"the micro-batches have different numbers of samples ({several})"
        try:
            given = self._feeding.inputs(step, every)
        except NotTogetherError:
            return "the micro-batches do not fit into one batch"
        if any(one is None for one in given) and self._feeding.begins_at(step) < step:
            return "a batch, padded to its own length, is loaded before the step"
        return "" if passes[0].rows else "no samples were seen"

    # -- in a copy -------------------------------------------------------------------------------

    def heard(self, one: terms.Heard) -> None:
        """Keeps a loss of torch's, of which a copy wants the gradient."""
        self._heard.append(one)

    def take(
        self, task: ReplayTask, loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The gradient of the mean loss, or of the sum, that the script's loss is a multiple of; of
        a loss with several terms its own, and in a copy that tries them that of each.
        """
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        whole = _gradients(loss, trained)
        if len(self._heard) == 1 and self._heard[0][2].numel() == 1:
            _, reduction, value, _ = self._heard[0]
            own = _gradients(value, trained)
            if _parallel(whole, own):
                return {**own, "kind": _code("mean" if reduction == "mean" else "sum")}
        elif not self._heard and (factor := factor_of_mean(loss)):
            return {**{name: g / factor for name, g in whole.items()}, "kind": _code("mean")}
        ends, _ = terms.ends_of(loss, self._heard)
        if not ends:
            return {**whole, "kind": _code("")}
        out = {**whole, "kind": _code("terms")}
        out["weights"] = torch.tensor([term.weight for term, _ in ends], dtype=torch.float64)
        if task in self._probes:
            for number, (_, end) in enumerate(ends):
                found = terms.gradient_of(end, list(trained.values()))
                out |= {f"{_TERM}{number}/{n}": g for n, g in _dense(trained, found).items()}
        return out

    # -- in the parent ---------------------------------------------------------------------------

    def results(self, found: Found, step: int) -> dict[str, torch.Tensor]:
        """The gradient of all micro-batches as one batch, and how far it moves with one ULP."""
        if not self._draws:
            return {}
        plain, *perturbed = (found.get(task) for task in self._draws)
        if plain is None:
            self.why = "with all micro-batches in one batch the script fails (or has no memory)"
            return {}
        kind = _KINDS[int(plain["kind"])]
        if not kind:
            self.why = "the loss is neither a mean nor a sum over samples, times a factor"
        elif kind == "terms":
            self.why = self._why_not_terms(found, plain["weights"], step)
        elif self._probes and not self._adds_up(found, kind, step):
            self.why = _ONE_BY_ONE
        if self.why:
            return {}
        self.kind = kind
        out = {}
        for name, gradient in _plain(plain).items():
            there = [one[name] for one in perturbed if one is not None]
            out[f"folded/{name}"] = gradient
            spread = state.spread_of(gradient, there, name, self._moves)
            out[f"spread-folded/{name}"] = torch.tensor(spread)
        return out

    def _adds_up(self, found: Found, kind: Kind, step: int) -> bool:
        """Whether the loss of several passes in one batch is that of each, weighted by targets."""
        together, *each = (found.get(task) for task in self._probes)
        if together is None or any(one is None for one in each):
            return False
        weights = [1.0] * len(each)
        if kind == "mean":
            pairs = [task.pairs[0] for task in self._probes[1:]]
            counts = [targets_of_pass(self._job.records[rank, step], n) for rank, n in pairs]
            weights = [count / sum(counts) for count in counts]
        added = state.mean(each, weights)
        return added is not None and state.distance(added, together) <= _SAME

    def _why_not_terms(self, found: Found, weights: torch.Tensor, step: int) -> str:
        """Why one batch's loss of several terms is not what the passes add up to, if so."""
        recorded = self._job.records[0, step].passes[0].terms
        passes = [one for record in self._job.at(step) for one in record.passes]
        if any(one.terms != recorded for one in passes):
            return "the terms of the loss are weighted differently from pass to pass"
        then = torch.tensor([term.weight for term in recorded], dtype=torch.float64)
        if len(then) != len(weights) or not _proportional(then, weights):
            return "the terms of the loss are weighted differently in a larger batch"
        if not self._probes:
            return ""
        together, *each = (found.get(task) for task in self._probes)
        if together is None or any(one is None for one in each):
            return _ONE_BY_ONE
        pairs = [task.pairs[0] for task in self._probes[1:]]
        for number, term in enumerate(recorded):
            if term.call >= 0 and term.reduction != "mean":
                return f"its term {term.name} is a sum"
            counts = [targets_of_pass(self._job.records[r, step], n, term.call) for r, n in pairs]
            parts = [_of_term(one, number) for one in each]
            added = state.mean(parts, [count / sum(counts) for count in counts])
            if added is None or state.distance(added, _of_term(together, number)) > _SAME:
                return f"its term {term.name} is not the mean of its parts' in a larger batch"
        return ""


def targets_of_pass(record: StepRecord, number: int, call: int = 0) -> int:
    """What a mean loss counts for: its targets, or its samples where torch computed no loss."""
    one = record.passes[number]
    return one.losses[call].counted if one.losses and call >= 0 else len(one.rows)


def _plain(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: g
        for name, g in found.items()
        if name not in state.NOT_GRADIENTS and not name.startswith(_TERM)
    }


def _of_term(found: dict[str, torch.Tensor] | None, number: int) -> dict[str, torch.Tensor]:
    before = f"{_TERM}{number}/"
    return {n.removeprefix(before): g for n, g in (found or {}).items() if n.startswith(before)}


def _proportional(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether weights are others times a factor, but for the rounding of single precision."""
    by = one.abs().max() / other.abs().max()
    return bool(((one - by * other).abs() <= 1e-6 * one.abs()).all())


def _code(kind: Kind) -> torch.Tensor:
    return torch.tensor(float(_KINDS.index(kind)))


def _gradients(
    loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, allow_unused=True
    )
    return _dense(parameters, found)


def _dense(names: Iterable[str], found: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    pairs = zip(names, found, strict=True)
    return {name: g.to_dense() if g.is_sparse else g for name, g in pairs if g is not None}


def _parallel(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    if set(one) != set(other):
        return False
    by = state.factor_of(one, other)
    return by > 0 and state.distance(one, other, by) <= _SAME


def factor_of_mean(loss: torch.Tensor) -> float:
    """The number by which a mean over elements was multiplied to be the loss; 0 where the loss is
    another thing than such a mean.
    """
    ends, _ = terms.ends_of(loss, ())
    if len(ends) != 1 or ends[0][0].reduction != "mean":
        return 0.0
    return ends[0][0].weight


def limit_memory() -> None:
    """In a copy: a script accumulates where one batch would not fit into memory, so the copies
    together may take half (chosen) of what is free. One that needs more fails by itself.
    """
    held = psutil.Process().memory_info().data
    room = available_bytes() // (2 * cores())
    resource.setrlimit(resource.RLIMIT_DATA, (held + room, held + room))
