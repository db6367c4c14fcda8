"""Detects events of the training loop: its steps, epochs, modes and random numbers.

Each event has a function here. It returns "" if the event happened, and otherwise describes the
recording. The strategy's reaction is irrelevant: an overflow counts even if the strategy hides it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.oracles.forms import Gradients, IndependentStep
from distcheck.machine.numerics import as_float64
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.layout import memory_order, spec_bytes
from distcheck.records import TensorSpec
from distcheck.records import expected_events as events


class RunOfEvents:
    """A run in which events are searched for; it has only ranks with data, numbered from 0."""

    def __init__(self, evidence: Evidence) -> None:
        self.case, self.training = evidence.case, evidence.facts.training
        self.steps = evidence.expectations
        self.trace = evidence.trace.of_ranks(evidence.with_data)
        self.ranks = range(len(evidence.with_data))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.trace.layout.model.parameters

    @property
    def prepared_steps(self) -> list[IndependentStep]:
        return [expectation.what for expectation in self.steps]

    def own(self, expectation: Expectation, index: int) -> Gradients:
        found: IndependentStep = expectation.what
        return found.own[index]

    def named(self, parameter: str) -> Iterator[tuple[int, Gradients]]:
        names = [spec.name for spec in self.specs]
        for expectation in self.steps if parameter in names else ():
            yield expectation.step, self.own(expectation, names.index(parameter))

    def exchanged(self, index: int) -> bool:
        """Return True if at some step every rank had a gradient of a parameter, not all zero."""
        owns = (self.own(expectation, index) for expectation in self.steps)
        return any(all_there(own) and any(holds_any(g) for g in own) for own in owns)

    def buffers(self, name: str) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (step, before, after) of a buffer, on every rank."""
        names = [spec.name for spec in self.trace.layout.model.buffers]
        for expectation in self.steps if name in names else ():
            for rank in self.ranks:
                at = (names.index(name),)
                before = self.trace.tensor(rank, Kind.BUFFER, expectation.step, *at)
                after = self.trace.tensor(rank, Kind.BUFFER, expectation.step + 1, *at)
                if before is not None and after is not None:
                    yield expectation.step, before, after


def holds_any(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def all_there(own: Gradients) -> bool:
    return all(gradient is not None for gradient in own)


def _is_on(on: str, holds: Sequence[bool]) -> bool:
    number, ranks = sum(holds), len(holds)
    return {
        "every rank": number == ranks,
        "some ranks": 0 < number < ranks,
        "one rank": number == 1 < ranks,
        "every rank but one": ranks > 1 and number == ranks - 1,
    }[on]


def _describe_counts(found: Sequence[tuple[int, Sequence[bool]]], what: str) -> str:
    if not found:
        return "seen: no such parameter"
    shown = ", ".join(f"{sum(holds)} of {len(holds)} at step {step}" for step, holds in found)
    return f"seen: {what} on {shown}"


def no_gradient(event: events.NoGradient, run: RunOfEvents) -> str:
    """Detect None as a gradient, which backward leaves if the loss does not use the parameter."""
    found = [(step, [g is None for g in own]) for step, own in run.named(event.parameter)]
    had = not event.after_one
    for _, absent in found:
        if had and _is_on(event.on, absent):
            return ""
        had = had or not any(absent)
    return _describe_counts(found, f"no gradient of {event.parameter}")


def zero_gradient(event: events.ZeroGradient, run: RunOfEvents) -> str:
    found = [
        (step, [g is not None and not holds_any(g) for g in own])
        for step, own in run.named(event.parameter)
    ]
    if any(_is_on(event.on, zero) for _, zero in found):
        return ""
    return _describe_counts(found, f"a zero gradient of {event.parameter}")


def nonfinite_gradient(event: events.NonfiniteGradient, run: RunOfEvents) -> str:
    if run.training.loss_scale is not None:
        return "seen: a GradScaler"
    for _, own in run.named(event.parameter):
        if any(g is not None and not bool(g.isfinite().all()) for g in own):
            return ""
    return f"seen: finite gradients of {event.parameter} in all {len(run.steps)} steps"


def gradient_magnitude(event: events.GradientMagnitude, run: RunOfEvents) -> str:
    """Detect the magnitudes if all ranks have them at the same step."""
    seen = f"seen: no gradient of {event.parameter} on every rank"
    for step, own in run.named(event.parameter):
        there = [as_float64(g).abs().flatten() for g in own if g is not None]
        sizes = torch.cat(there) if len(there) == len(own) else torch.empty(0)
        sizes = sizes[sizes > 0]
        if not sizes.numel():
            continue
        least, most = float(sizes.min()), float(sizes.max())
        if event.least <= least and most <= event.most:
            return ""
        seen = f"seen: magnitudes from {least:.3g} to {most:.3g} at step {step}"
    return seen


def nonzero_rows_differ(event: events.NonzeroRowsDiffer, run: RunOfEvents) -> str:
    """Detect ranks with different nonzero rows."""
    for _, own in run.named(event.parameter):
        rows = {tuple(g.reshape(len(g), -1).any(1).tolist()) for g in own if g is not None}
        if len(rows) > 1:
            return ""
    return f"seen: the same nonzero rows of {event.parameter} on every rank"


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    """Return True if the gradient is nonzero, for complex ones in both parts."""
    if gradient is None or not gradient.is_complex():
        return holds_any(gradient)
    return holds_any(gradient.real) and holds_any(gradient.imag)


def gradient_dtypes(event: events.GradientDtypes, run: RunOfEvents) -> str:
    """Detect nonzero gradients of all dtypes; complex gradients must be nonzero in both parts."""
    found = {
        spec.dtype
        for index, spec in enumerate(run.specs)
        for step in (run.steps if spec.dtype in event.dtypes else ())
        if any(_is_nonzero(gradient) for gradient in run.own(step, index))
    }
    missing = [dtype for dtype in event.dtypes if dtype not in found]
    return f"seen: none of {', '.join(missing)}" if missing else ""


def same_shape_parameters(event: events.SameShapeParameters, run: RunOfEvents) -> str:
    """Detect parameters of equal shape with different gradients, at one step on one rank."""
    most = 0
    for step in run.steps:
        groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for index, spec in enumerate(run.specs):
            gradient = run.own(step, index)[0]
            if gradient is None or not holds_any(gradient):
                continue
            alike = groups.setdefault((spec.shape, spec.dtype), [])
            if not any(torch.equal(gradient, other) for other in alike):
                alike.append(gradient)
        most = max([most, *map(len, groups.values())])
    return "" if most >= event.least else f"seen: at most {most}"


def _there(run: RunOfEvents, holds: Callable[[TensorSpec], bool]) -> list[TensorSpec]:
    """Return the parameters with a property for which every rank had a gradient at some step."""
    owns = ((s, i) for i, s in enumerate(run.specs) if holds(s))
    return [
        spec
        for spec, index in owns
        if any(all_there(run.own(expectation, index)) for expectation in run.steps)
    ]


def gradient_shapes(event: events.GradientShapes, run: RunOfEvents) -> str:
    """Detect shapes, including shapes without elements, whose gradients are always zero."""
    found = {spec.shape for spec in _there(run, lambda spec: spec.shape in event.shapes)}
    missing = [shape for shape in event.shapes if shape not in found]
    return f"seen: none of shape {', '.join(map(str, missing))}" if missing else ""


def gradient_with_more_elements(event: events.GradientWithMoreElements, run: RunOfEvents) -> str:
    most = max((s.elements for i, s in enumerate(run.specs) if run.exchanged(i)), default=0)
    return "" if most > event.elements else f"seen: at most {most:,}"


def gradient_with_more_bytes(event: events.GradientWithMoreBytes, run: RunOfEvents) -> str:
    most = max((spec_bytes(s) for i, s in enumerate(run.specs) if run.exchanged(i)), default=0)
    return "" if most > event.nbytes else f"seen: at most {most:,}"


def indivisible_parameter(event: events.IndivisibleParameter, run: RunOfEvents) -> str:
    world = len(run.ranks)
    found = _there(run, lambda spec: spec.elements % world != 0)
    return "" if found else f"seen: every number of elements is divisible by {world}"


def permuted_memory_layout(event: events.PermutedMemoryLayout, run: RunOfEvents) -> str:
    """Detect permuted memory, as recorded before the first step."""
    for index, spec in enumerate(run.specs):
        strides = torch.empty(spec.shape, device="meta").stride()
        order = run.trace.entry(0, Kind.PARAMETER, 0, index).order
        if order and order != memory_order(spec.shape, strides) and run.exchanged(index):
            return ""
    return "seen: every parameter has its memory layout in index order"


def tied_parameter(event: events.TiedParameter, run: RunOfEvents) -> str:
    """Detect tied parameters by their names in the model."""
    twice = run.prepared_steps[0].twice_named
    found = [i for i, spec in enumerate(run.specs) if spec.name in twice and run.exchanged(i)]
    return "" if found else f"seen: {len(twice)} parameters with two names"


def shared_storage(event: events.SharedStorage, run: RunOfEvents) -> str:
    """Detect parameters that share one storage in the model that the workload builds."""
    shared = run.prepared_steps[0].in_one_storage
    found = [i for i, spec in enumerate(run.specs) if spec.name in shared and run.exchanged(i)]
    return "" if len(found) > 1 else f"seen: {len(shared)} parameters that share a storage"


def module_classes(event: events.ModuleClasses, run: RunOfEvents) -> str:
    """Detect the classes; every parameter must have a gradient on some rank at some step."""
    there = run.prepared_steps[0].kinds
    missing = [kind for kind in event.kinds if kind not in there]
    if missing:
        return f"seen: no {', '.join(missing)}"
    silent = [
        spec.name
        for index, spec in enumerate(run.specs)
        if not any(holds_any(g) for step in run.steps for g in run.own(step, index))
    ]
    return f"seen: no gradient of {', '.join(silent)}" if silent else ""


def _steps(found: Collection[int]) -> str:
    listed = ", ".join(map(str, sorted(set(found))))
    return f"step{'s' * (len(set(found)) != 1)} {listed}" if found else "no step"


def short_batch(event: events.ShortBatch, run: RunOfEvents) -> str:
    sizes = [sum(len(header.ids) for header in step.headers) for step in run.steps]
    if any(size < run.case.batch for size in sizes):
        return ""
    return f"seen: {', '.join(map(str, sizes))} samples per step"


def tokens_per_sample_differ(event: events.TokensPerSampleDiffer, run: RunOfEvents) -> str:
    others: list[tuple[int, int]] = []
    for step in run.steps:
        pairs = [(header.loss_count, len(header.ids)) for header in step.headers]
        (tokens, samples), *others = pairs
        if any(n * samples != tokens * size for n, size in others):
            return ""
    if not others:
        return ""  # with one rank its loss is the batch's
    return "seen: equally many on every rank, at every step"


def padded_positions(event: events.PaddedPositions, run: RunOfEvents) -> str:
    headers = [header for step in run.steps for header in step.headers]
    if any(h.tokens is not None and h.tokens < h.positions for h in headers):
        return ""
    return "seen: none"


def sample_order_changed(event: events.SampleOrderChanged, run: RunOfEvents) -> str:
    """Detect two epochs whose first steps differ on a rank."""
    first: dict[int, list[tuple[int, ...]]] = {}
    for step in run.steps:
        first.setdefault(step.headers[0].epoch, [header.ids for header in step.headers])
    if len(first) < 2:
        return f"seen: {len(first)} epoch"
    orders = list(first.values())
    return "" if any(order != orders[0] for order in orders[1:]) else "seen: the same order"


def resumed(event: events.Resumed, run: RunOfEvents) -> str:
    """Detect a resume with at least one later step."""
    before = run.training.resume_before
    if before is not None and any(step.step >= before for step in run.steps):
        return ""
    when = "is not resumed" if before is None else f"is resumed before step {before}"
    return f"seen: {len(run.steps)} steps of a run that {when}"


def learning_rate_changed(event: events.LearningRateChanged, run: RunOfEvents) -> str:
    """Detect a changed learning rate by calling the workload's schedule again for these steps."""
    rates = [step.rates for step in run.prepared_steps]
    if any(rate != rates[0] for rate in rates[1:]):
        return ""
    return f"seen: the same rate in all {len(rates)} steps"


def accumulated_passes(event: events.AccumulatedPasses, run: RunOfEvents) -> str:
    """Detect accumulation: a shard has at most as many micro-batches as samples."""
    passes = run.training.accumulate
    least = [min(passes, *(len(header.ids) for header in step.headers)) for step in run.steps]
    return "" if max(least, default=0) > 1 else f"seen: {max(least, default=0)} backward pass"


def _later_step(run: RunOfEvents, when: bool, what: str) -> str:
    """Return "" if the loop has the property and there were two steps."""
    if when and len(run.steps) > 1:
        return ""
    return f"seen: {len(run.steps)} step{'s' * (len(run.steps) != 1)} of a loop that {what}"


def gradients_zeroed_in_place(event: events.GradientsZeroedInPlace, run: RunOfEvents) -> str:
    kept = run.training.keeps_gradients
    return _later_step(run, kept, f"sets gradients to {'zero' if kept else 'None'}")


def evaluated_before_step(event: events.EvaluatedBeforeStep, run: RunOfEvents) -> str:
    evaluates = run.training.evaluates
    return _later_step(run, evaluates, "evaluates" if evaluates else "does not evaluate")


def gradients_clipped(event: events.GradientsClipped, run: RunOfEvents) -> str:
    """Detect clipping by the norm of rank 0's reduced gradients."""
    limit, norms = run.training.clip_norm, []
    for step in run.steps:
        found = run.trace.tensors(0, Kind.GRADIENT, step.step)
        sizes = [as_float64(g).norm() for g in found if g is not None]
        norms.append(float(torch.stack(sizes).norm()) if sizes else 0.0)
    if limit is not None and any(norm > limit for norm in norms):
        return ""
    return f"seen: norms up to {max(norms, default=0.0):.3g}, limit {limit}"


def _not_finite(run: RunOfEvents, step: Expectation) -> bool:
    owns = (run.own(step, index) for index in range(len(run.specs)))
    return any(g is not None and not bool(g.isfinite().all()) for own in owns for g in own)


def scaler_skipped_step(event: events.ScalerSkippedStep, run: RunOfEvents) -> str:
    """Detect skipped steps by the ranks' local gradients, which are scaled."""
    scale = run.training.loss_scale
    over = [step.step for step in run.steps if _not_finite(run, step)]
    if scale is not None and 0 < len(over) < len(run.steps):
        return ""
    with_scaler = "no GradScaler" if scale is None else "a GradScaler"
    return f"seen: {with_scaler}, overflow at {_steps(over)} of {len(run.steps)}"


def model_called_twice(event: events.ModelCalledTwice, run: RunOfEvents) -> str:
    """Detect repeated calls in a repetition of rank 0's first forward pass."""
    calls = run.prepared_steps[0].calls
    return "" if calls > 1 else f"seen: {calls} call"


def rank_random_numbers_differ(event: events.RankRandomNumbersDiffer, run: RunOfEvents) -> str:
    """Detect RNG use by the state of torch's generators before each step."""
    states = [[header.rng_digest for header in step.headers] for step in run.steps]
    drew = any(
        before != after
        for one, two in pairwise(states)
        for before, after in zip(one, two, strict=True)
    )
    apart = any(len(set(state)) == len(state) > 1 for state in states)
    if drew and apart:
        return ""
    drawn = "random numbers were drawn" if drew else "no random number was drawn between two steps"
    return f"seen: {drawn}; generators {'differ' if apart else 'are identical'}"


def initial_parameters_differ(event: events.InitialParametersDiffer, run: RunOfEvents) -> str:
    """Detect different initial models by repeating the workload's initialization for each rank."""
    alike = run.prepared_steps[0].starts_alike
    return "seen: the same parameters on every rank" if alike else ""


def parameter_frozen(event: events.ParameterFrozen, run: RunOfEvents) -> str:
    """Detect frozen parameters in the workload's model as prepared for each step."""
    trains = [step.trains.get(event.parameter, True) for step in run.prepared_steps]
    trained = not event.after_training
    for now in trains:
        if trained and not now:
            return ""
        trained = trained or now
    what = "it trains" if any(trains) else "it does not train"
    return f"seen: {what} in all {len(trains)} steps"


def parameter_unfrozen(event: events.ParameterUnfrozen, run: RunOfEvents) -> str:
    trains = [step.trains.get(event.parameter, True) for step in run.prepared_steps]
    if any(now and not before for before, now in pairwise(trains)):
        return ""
    return f"seen: it trains at {_steps([step for step, now in enumerate(trains) if now])}"


def step_in_eval_mode(event: events.StepInEvalMode, run: RunOfEvents) -> str:
    """Detect eval mode by the modules' mode, and by a buffer that changes only in training mode."""
    still, moved = set[int](), set[int]()
    trains = {expectation.step: expectation.what.training_mode for expectation in run.steps}
    for step, before, after in run.buffers(event.buffer):
        same = torch.equal(before, after)
        if same and not trains[step]:
            still.add(step)
        if not same and trains[step]:
            moved.add(step)
    if still and moved:
        return ""
    return f"seen: {_steps(still)} in eval mode, {_steps(moved)} in training mode"


def buffer_changed(event: events.BufferChanged, run: RunOfEvents) -> str:
    found = [not torch.equal(before, after) for _, before, after in run.buffers(event.buffer)]
    if any(found):
        return ""
    return f"seen: {event.buffer} " + ("stays the same" if found else "is not a buffer")


def integer_buffer_changed(event: events.IntegerBufferChanged, run: RunOfEvents) -> str:
    seen = f"seen: {event.buffer} is not a buffer"
    for _, before, after in run.buffers(event.buffer):
        whole = not after.is_floating_point() and after.dtype != torch.bool
        largest = int(after.abs().max()) if whole and after.numel() else 0
        changed = not torch.equal(before, after)
        if whole and changed and largest >= event.least:
            return ""
        dtype = str(after.dtype).removeprefix("torch.")
        kept = "changed" if changed else "stays the same"
        seen = f"seen: {event.buffer} of {dtype}, up to {largest:,}, {kept}"
    return seen
