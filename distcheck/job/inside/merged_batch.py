"""Merges the passes of gradient accumulation: a copy of the replay computes the gradient of all
micro-batches of all ranks as one batch.

The factor by which the script scales its loss (`loss / accumulate`) is excluded, so the result does
not depend on it. The result is the gradient of torch's loss function, if the script's loss is a
multiple of it; otherwise the gradient of the final mean in the script's computation.
"""

import resource
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import psutil
import torch

from distcheck.job.inside import state, terms
from distcheck.job.inside.batch_source import ALL, BatchSource, NotTogetherError
from distcheck.job.settings import GROWTH, TERM, TERMS, ReplayTask
from distcheck.machine.resources import available_bytes, cores
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import StepRecord

Found = Mapping[ReplayTask, dict[str, torch.Tensor] | None]
Kind = Literal["", "mean", "sum", "terms"]
_KINDS: tuple[Kind, ...] = ("", "mean", "sum", "terms")
# Heuristic: rounding leaves 1e-6 of a gradient; a second loss term, or samples that interact, more
# than 1e-3.
_SAME = 1e-3
_MOST_TERMS = 8  # chosen: each has a gradient as large as the model
_ONE_BY_ONE = "the loss of a larger batch is not the mean of its micro-batches' losses"


def why_not_merged(records: Sequence[StepRecord]) -> str:
    """Return why samples of several passes must not share a batch, or ""."""
    if any(record.batchnorm for record in records):
        return "BatchNorm normalizes over the batch"
    if any(one.draws for record in records for one in record.passes):
        return "the forward pass draws random numbers"
    if any(one.autocast for record in records for one in record.passes):
        return "the rounding of autocast depends on the batch shape"
    return ""


class MergedBatch:
    """Decides whether passes can be merged into one batch; plans the copies that do so, and reads
    their results.
    """

    def __init__(self, job: JobRecording, batch_source: BatchSource, apart: str = "") -> None:
        self._job, self._feeding = job, batch_source
        self.kind: Kind = ""
        self._heard: list[terms.Heard] = []
        self._probes: list[ReplayTask] = []
        self._draws: list[ReplayTask] = []
        self._moves: dict[str, float] = {}  # relative change by one ULP
        self._accumulates = any(len(record.trained) > 1 for record in job.records.values())
        self._apart = apart
        self.why = apart if self._accumulates else ""  # why passes cannot be merged

    def tasks(self, step: int, draws: int, *, by_rank: bool = False) -> list[ReplayTask]:
        """Return the copies of a step; at the first step, also those that detect interactions
        between samples, or that measure the terms of a loss, rank by rank if `by_rank`.
        """
        self.kind, self._heard, self._draws, self._probes = "", [], [], []
        if not self._accumulates and not self._apart and step == self._job.steps[0]:
            self._probes = self._tasks_for_terms(step, by_rank=by_rank)
            return self._probes
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

    def _tasks_for_terms(self, step: int, *, by_rank: bool) -> list[ReplayTask]:
        """Return the copies that measure terms, and one in which each sample of the first of these
        copies occurs twice: only a sum over samples then changes.
        """
        records = self._job.at(step)
        counts = {len(one.passes[0].terms) if len(one.passes) == 1 else 0 for one in records}
        if not 1 < min(counts) <= max(counts) <= _MOST_TERMS:
            return []
        pairs = tuple(self._feeding.pairs(0, ALL))
        each = tuple((one,) for one in pairs) if by_rank or why_not_merged(records) else (pairs,)
        return [ReplayTask(ALL, step, 0, some) for some in (*each, each[0] * 2)]

    def reads_terms(self, task: ReplayTask | None) -> bool:
        """Return True if a copy needs the source lines of the terms."""
        return not self._accumulates and task in self._probes

    def _why_not(self, step: int, every: Sequence[tuple[int, int]]) -> str:
        records = self._job.at(step)
        if why := why_not_merged(records):
            return why
        passes = [one for record in records for one in record.passes]
        if len({len(record.passes) for record in records}) > 1:
            return "ranks make different numbers of passes"
        if any(record.earlier for record in records) or not all(one.live for one in passes):
            return "gradients of some passes are dropped, or kept for a later step"
        if any(one.loss is None for one in passes):
            return "a backward pass covers several forward passes"
        if passes[0].rows and any(len({p.rows for p in r.passes}) < len(r.passes) for r in records):
            return "several passes of a step use the same samples"
        if any(len(self._job.by_loss(rank, step)) > 1 for rank in range(self._job.world)):
            return "the passes of a step compute different losses"
        counts = sorted({len(one.rows) for one in passes})
        if len(counts) > 1:
            several = ", ".join(map(str, counts[:8]))
            return f"the micro-batches have different numbers of samples ({several})"
        try:
            given = self._feeding.inputs(step, every)
        except NotTogetherError:
            return "the micro-batches cannot be concatenated"
        if any(one is None for one in given) and self._feeding.begins_at(step) < step:
            return "a batch, padded to its own length, is loaded before the step"
        return "" if passes[0].rows else "no samples were seen"

    # -- in a copy -------------------------------------------------------------------------------

    def heard(self, one: terms.Heard) -> None:
        """Keep a torch loss whose gradient is needed in a copy."""
        self._heard.append(one)

    def take(
        self, task: ReplayTask, loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the gradient of the mean or sum of which the script's loss is a multiple.

        For a loss with several terms, return the gradient of the loss and, in a probing copy, of
        each term.
        """
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        whole = _gradients(loss, trained)
        if len(self._heard) == 1 and terms.is_scalar(self._heard[0][2]):
            _, reduction, edge, _ = self._heard[0]
            end = terms.NodeOutput(edge.node, edge.output_nr)
            own = _dense(trained, terms.gradients_of_term(end, list(trained.values())))
            if _parallel(whole, own):
                return {**own, "kind": _encode_kind("mean" if reduction == "mean" else "sum")}
        elif not self._heard and (factor := factor_from_mean_to_loss(loss)):
            return {**{name: g / factor for name, g in whole.items()}, "kind": _encode_kind("mean")}
        ends, _ = terms.ends_of(loss, self._heard)
        if not ends:
            return {**whole, "kind": _encode_kind("")}
        out = {**whole, "kind": _encode_kind("terms")}
        out["weights"] = torch.tensor([term.weight for term, _ in ends], dtype=torch.float64)
        if self.reads_terms(task):
            said = [(f"`{e.text}`" if e.text else t.name, e.place) for t, e in ends]
            out[TERMS] = torch.frombuffer(bytearray(msgspec.json.encode(said)), dtype=torch.uint8)
        if task in self._probes:
            for number, (_, end) in enumerate(ends):
                by = end.weight if TERMS in out else 1.0
                found = terms.gradients_of_term(end, list(trained.values()))
                dense = _dense(trained, found)
                out |= {
                    f"{TERM}{number}/{name}": by * dense.get(name, torch.zeros_like(parameter))
                    for name, parameter in trained.items()
                }
        return out

    # -- in the parent ---------------------------------------------------------------------------

    def results(self, found: Found, step: int) -> dict[str, torch.Tensor]:
        """Return the gradient of all micro-batches as one batch, and its change when parameters are
        perturbed by one ULP.
        """
        if not self._draws:
            return self._results_for_terms(found, step) if self._probes else {}
        plain, *perturbed = (found.get(task) for task in self._draws)
        if plain is None:
            self.why = (
                "with all micro-batches in one batch the script fails (or runs out of memory)"
            )
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
        for name, gradient in _only_gradients(plain).items():
            there = [one[name] for one in perturbed if one is not None]
            out[f"folded/{name}"] = gradient
            spread = state.distance_from_farthest(gradient, there, name, self._moves)
            out[f"spread-folded/{name}"] = torch.tensor(spread)
        return out

    def _results_for_terms(self, found: Found, step: int) -> dict[str, torch.Tensor]:
        """Return each term's weighted gradient, its source, and its growth if samples occur twice:
        1 for a mean, 2 for a sum.
        """
        copies = [found.get(task) for task in self._probes]
        scale = self._job.records[0, step].scale or 1.0
        numbers = range(min(len(one["weights"]) if one and TERMS in one else 0 for one in copies))
        if not numbers:
            return {}
        parts = [[_gradients_of_term(one, number) for number in numbers] for one in copies]
        *each, twice = parts
        mean = state.mean([_named(one) for one in each], [1 / len(each) / scale] * len(each))
        growth = [state.factor_of(b, a) for a, b in zip(each[0], twice, strict=True)]
        said = (copies[0] or {})[TERMS]
        return {**(mean or {}), TERMS: said, GROWTH: torch.tensor(growth, dtype=torch.float64)}

    def _adds_up(self, found: Found, kind: Kind, step: int) -> bool:
        """Return True if the joint loss of several passes is their target-weighted mean."""
        together, *each = (found.get(task) for task in self._probes)
        if together is None or any(one is None for one in each):
            return False
        weights = [1.0] * len(each)
        if kind == "mean":
            pairs = [task.pairs[0] for task in self._probes[1:]]
            counts = [weight_of_mean_loss(self._job.records[rank, step], n) for rank, n in pairs]
            weights = [count / sum(counts) for count in counts]
        added = state.mean(each, weights)
        return added is not None and state.distance(added, together) <= _SAME

    def _why_not_terms(self, found: Found, weights: torch.Tensor, step: int) -> str:
        """Return why the joint loss with several terms is not the sum over passes, or ""."""
        recorded = self._job.records[0, step].passes[0].terms
        passes = [one for record in self._job.at(step) for one in record.passes]
        if any(one.terms != recorded for one in passes):
            return "the weights of the loss terms differ between passes"
        then = torch.tensor([term.weight for term in recorded], dtype=torch.float64)
        if len(then) != len(weights) or not _proportional(then, weights):
            return "the weights of the loss terms differ in a larger batch"
        if not self._probes:
            return ""
        together, *each = (found.get(task) for task in self._probes)
        if together is None or any(one is None for one in each):
            return _ONE_BY_ONE
        pairs = [task.pairs[0] for task in self._probes[1:]]
        for number, term in enumerate(recorded):
            if term.call >= 0 and term.reduction != "mean":
                return f"its term {term.name} is a sum"
            counts = [
                weight_of_mean_loss(self._job.records[r, step], n, term.call) for r, n in pairs
            ]
            parts = [_gradients_of_term(one, number) for one in each]
            added = state.mean(parts, [count / sum(counts) for count in counts])
            if added is None or state.distance(added, _gradients_of_term(together, number)) > _SAME:
                return (
                    f"its term {term.name} is not the mean over its micro-batches in a larger batch"
                )
        return ""


Gradients = dict[str, torch.Tensor]


def _named(parts: Sequence[Gradients]) -> Gradients:
    return {f"{TERM}{number}/{n}": g for number, one in enumerate(parts) for n, g in one.items()}


def weight_of_mean_loss(record: StepRecord, number: int, call: int = 0) -> int:
    """Return the weight of a mean loss: its targets, or its samples if torch computed no loss."""
    one = record.passes[number]
    return one.losses[call].counted if one.losses and call >= 0 else len(one.rows)


def _only_gradients(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: g
        for name, g in found.items()
        if name not in state.NOT_GRADIENTS and not name.startswith(TERM)
    }


def _gradients_of_term(
    found: dict[str, torch.Tensor] | None, number: int
) -> dict[str, torch.Tensor]:
    before = f"{TERM}{number}/"
    return {n.removeprefix(before): g for n, g in (found or {}).items() if n.startswith(before)}


def _proportional(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if weights are proportional within float32 rounding."""
    by = one.abs().max() / other.abs().max()
    return bool(((one - by * other).abs() <= 1e-6 * one.abs()).all())


def _encode_kind(kind: Kind) -> torch.Tensor:
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


def factor_from_mean_to_loss(loss: torch.Tensor) -> float:
    """Return the factor between a mean over elements and the loss; 0 if there is none."""
    ends, _ = terms.ends_of(loss, ())
    if len(ends) != 1 or ends[0][0].reduction != "mean":
        return 0.0
    return ends[0][0].weight


def limit_memory() -> None:
    """Limit the memory of a copy. All copies together may use half (heuristic) of the free memory.

    A script accumulates because one batch does not fit; a copy that needs more memory fails by
    itself.
    """
    held = psutil.Process().memory_info().data
    room = available_bytes() // (2 * cores())
    resource.setrlimit(resource.RLIMIT_DATA, (held + room, held + room))
