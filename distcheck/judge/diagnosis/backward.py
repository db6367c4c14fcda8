"""Compares the recorded local gradients with those of the shards, and measures the weight of each
backward pass in the result. Runs in a judge.
"""

from math import inf, sqrt

import torch

from distcheck.judge.diagnosis.measured import MeasuredParameter, StepExpectation, StepView
from distcheck.judge.diagnosis.measurements import LocalGradientFacts, PassFacts
from distcheck.judge.fitting import fit_least_squares
from distcheck.machine.numerics import as_float64
from distcheck.recordings.recording import Kind

_MOST_ELEMENTS = 1 << 18  # elements of a model; larger ones are sampled with a stride
# Heuristic, relative to the largest: below it, passes cannot be distinguished.
_LEAST_SINGULAR = 1e-5
_RESIDUAL = 1e-5  # Heuristic, relative to a result: passes were added in its dtype
_MOST_BUFFERS = 32  # buffers that differ across ranks: each takes a few passes of a shard


def local_gradient_factor(
    view: StepView, rank: int, measured: list[MeasuredParameter]
) -> float | None:
    """Return the ratio of the recorded local gradient to the shard's gradient, including loss
    scaling; None if the gradient was not recorded or is not a multiple.
    """
    same, rows = True, []
    for m in measured:
        found, shard = view.seen(rank, m.index), view.local(rank, m.index)
        if found is None or shard is None:
            return None
        same = same and torch.equal(found, shard)
        rows.append((found, shard))
    fitted = fit_least_squares(rows)
    if fitted is None or not fitted.factors[0]:
        return None
    promised = view.loss_factor(rank)
    if same:
        return promised
    # Heuristic: no multiple if the relative residual exceeds 1e-5.
    return fitted.factors[0] * promised if fitted.share <= 1e-5 else None


def ranks_with_wrong_local_gradients(
    view: StepView, measured: list[MeasuredParameter]
) -> tuple[LocalGradientFacts, ...]:
    """Return the ranks whose local gradient differs from their shard's gradient."""
    if not isinstance(view, StepExpectation):
        return ()  # its expectation is the recorded local gradient itself
    ranks = range(view.trace.layout.world)
    return tuple(filter(None, (_local_facts(view, rank, measured) for rank in ranks)))


def _local_facts(
    expectation: StepExpectation, rank: int, measured: list[MeasuredParameter]
) -> LocalGradientFacts | None:
    pairs, names = [], []
    for m in measured:
        found, own = expectation.seen(rank, m.index), expectation.local(rank, m.index)
        if found is None or own is None:
            if (found is None) != (own is None):
                return None  # not recorded: unknown
            continue
        pairs.append((m.index, as_float64(found)))
        if not torch.equal(found, own):
            names.append(m.name)
    if not names:
        return None
    others = [r for r in range(expectation.trace.layout.world) if r != rank]
    source = next((r for r in others if _is_of(expectation, r, pairs)), -1)
    apart = size = 0.0
    for index, found in pairs:
        own = expectation.shards[rank].gradients[index]
        assert own is not None
        apart += float((found - as_float64(own)).norm()) ** 2
        size += float(as_float64(own).norm()) ** 2
    buffers = () if source >= 0 else _find_replaced_buffers(expectation, rank, pairs)
    named = source >= 0 or buffers
    return LocalGradientFacts(
        rank=rank,
        parameters=tuple(names),
        distance=sqrt(apart / size) if size else 0.0,
        source=source,
        buffers=buffers,
        autocast="" if named else _autocast(expectation, rank, pairs, sqrt(apart)),
    )


def _autocast(
    expectation: StepExpectation,
    rank: int,
    pairs: list[tuple[int, torch.Tensor]],
    distance: float,
) -> str:
    """Return the dtype under whose autocast the shard reproduces the local gradient, or ""."""
    for dtype in (torch.bfloat16, torch.float16):
        try:
            shards = expectation.references.shards
            gradients = shards.run(rank, expectation.step, autocast=dtype).gradients
        except RuntimeError:  # an operation without such a kernel
            continue
        squares = [
            float((found - as_float64(own)).norm()) ** 2
            for index, found in pairs
            if (own := gradients[index]) is not None
        ]
        # Heuristic: nearer by two orders of magnitude; a loss may be computed within autocast or
        # after it.
        if len(squares) == len(pairs) and sqrt(sum(squares)) <= distance / 100:
            return str(dtype).removeprefix("torch.")
    return ""


def _find_replaced_buffers(
    expectation: StepExpectation, rank: int, pairs: list[tuple[int, torch.Tensor]]
) -> tuple[str, ...]:
    """Return the buffers to replace by another rank's so that the shard reproduces the local
    gradient bitwise. Each replacement that reduces the distance is kept.
    """
    trace, step = expectation.trace, expectation.step
    specs, ranks = trace.layout.model.buffers, range(trace.layout.world)
    promised = 0 if expectation.contract.buffers == "rank 0" else rank
    held = [
        {trace.entry(r, Kind.BUFFER, step, index).digest: r for r in reversed(ranks)}
        for index in range(len(specs))
    ]
    differ = [index for index, sources in enumerate(held) if len(sources) > 1]
    if len(differ) > _MOST_BUFFERS:
        return ()
    chosen = [promised] * len(specs)

    def apart(sources: list[int]) -> float:
        gradients = expectation.references.shards.run(rank, step, buffers_of=sources).gradients
        return sum(
            float((found - as_float64(own)).norm()) ** 2
            for index, found in pairs
            if (own := gradients[index]) is not None
        )

    least = apart(chosen) if differ else inf
    for index in differ:
        for source in held[index].values():
            tried = [*chosen[:index], source, *chosen[index + 1 :]]
            distance = apart(tried) if source != chosen[index] else inf
            if distance < least:
                least, chosen = distance, tried
    if least:
        return ()
    return tuple(specs[index].name for index in differ if chosen[index] != promised)


def _is_of(expectation: StepExpectation, rank: int, pairs: list[tuple[int, torch.Tensor]]) -> bool:
    """Return True if these are another rank's gradients, up to a relative error of 1e-5."""
    for index, found in pairs:
        gradient = expectation.shards[rank].gradients[index]
        if gradient is None:
            return False
        wanted = as_float64(gradient)
        # Heuristic: far above float32 rounding; other ranks' gradients differ by far more.
        if float((found - wanted).norm()) > 1e-5 * float(wanted.norm()):
            return False
    return True


def fit_passes(expectation: StepExpectation) -> PassFacts | None:
    """Fit every rank's gradients to the passes of all ranks by least squares. Return None for a
    single pass, for passes that cannot be distinguished, and if no combination fits.
    """
    trace, step = expectation.trace, expectation.step
    ranks = range(trace.layout.world)
    parts = [expectation.references.shards.passes(rank, step) for rank in ranks]
    count = min(len(passes) for passes in parts)
    if count < 2 or count != max(len(passes) for passes in parts):
        return None
    elements = sum(spec.elements for spec in trace.layout.model.parameters)
    stride = max(1, elements // _MOST_ELEMENTS)
    # Parameters of which every shard has a gradient.
    by_parameter = zip(*(shard.gradients for shard in expectation.shards), strict=True)
    used = [i for i, own in enumerate(by_parameter) if all(g is not None for g in own)]
    columns = [
        _flatten([gradients[index] for index in used], stride)
        for passes in parts
        for gradients in passes
    ]
    weights = []
    for rank in ranks:
        held = [trace.tensor(rank, Kind.GRADIENT, step, index) for index in used]
        found = fit_least_squares([(_flatten(held, stride), *columns)])
        if found is None or found.apart < _LEAST_SINGULAR or not found.share <= _RESIDUAL:
            return None
        starts = range(0, len(columns), count)
        weights.append(tuple(found.factors[start : start + count] for start in starts))
    return PassFacts(step=step, passes=count, weights=tuple(weights))


def _flatten(tensors: list[torch.Tensor | None], stride: int) -> torch.Tensor:
    return torch.cat([as_float64(t).reshape(-1)[::stride] for t in tensors if t is not None])
