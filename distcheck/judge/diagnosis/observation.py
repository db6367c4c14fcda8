"""The job that measures a failed case. Causes are derived from its result."""

import os
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, product
from math import isclose, sqrt
from typing import Any, get_args

import msgspec
import torch

from distcheck.contract import (
    BackendAllReduce,
    BackendReduce,
    Contract,
    DDPBuckets,
    Order,
    RankOrder,
    RingOrder,
    Scale,
)
from distcheck.judge import acceptance
from distcheck.judge.checks.data import first_shared_rng_state
from distcheck.judge.diagnosis.backward import fit_passes
from distcheck.judge.diagnosis.designs import find_design, find_mistake, updates_of
from distcheck.judge.diagnosis.layout_measuring import measure_layout
from distcheck.judge.diagnosis.measured import StepExpectation
from distcheck.judge.diagnosis.measurements import (
    MOST_EARLIER,
    Measurements,
    MisplacedGradient,
    SampleOverlap,
)
from distcheck.judge.diagnosis.measuring import LEAST_SINGULAR, MOST_KEPT, StepMeasuring
from distcheck.judge.diagnosis.source_lines import measured_lines
from distcheck.judge.diagnosis.updates import (
    buffers_updated_twice,
    measure_average,
    measure_compression,
    measure_update,
)
from distcheck.judge.fitting import fit_least_squares
from distcheck.judge.jobs import OBSERVE, ObserveRequest
from distcheck.judge.oracles import full_batch_bound, order_exact
from distcheck.judge.oracles.error_feedback import find_acceptance
from distcheck.judge.oracles.references import References
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine import devices, seeds
from distcheck.machine.numerics import NotBoundedError, as_float64
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import LossName
from distcheck.records.layers import BITWISE, IN_FLOAT32, IN_FLOAT64, ROUNDING
from distcheck.training.adapters.forms import trained_with
from distcheck.training.building import Ingredients, open_ingredients
from distcheck.worlds.jobs import Descriptors, Reporter
from distcheck.worlds.rendezvous import enter_world_of_one

_ORDERS: tuple[Order, ...] = (
    RankOrder(), BackendAllReduce(), BackendReduce(), RingOrder(), DDPBuckets(),
    DDPBuckets(rebuilt_at=None), DDPBuckets(rebuilt_at=2),
)  # fmt: skip
_SCALES: tuple[Scale, ...] = ("divide-after", "divide-before", "multiply-before")


@OBSERVE.does
def observe_job(job: ObserveRequest, fds: Descriptors, reporter: Reporter) -> Measurements:
    """Measure a case, and return its measurements. If this fails, `trouble` describes the error."""
    os.nice(5)
    seeds.pin_determinism()
    # On the ranks' kind of device, even if another one judged: only there are a recomputed step and
    # its recording bit-identical.
    device = devices.enter(job.case.device, 0)
    trace = TraceReader(fds["trace"], job.layout, device=device)
    if trained_with(job.case.adaptation.form) == job.case.workload:
        enter_world_of_one()  # required by its reference
    ingredients = open_ingredients(job.case, job.description, fds.get("data"), device)
    seeds.pin_default_dtype(job.case.dtype)
    reporter.progress(job.steps[0] if job.steps else 0, "a closer look")
    return measure_case(job, ingredients, trace)


def measure_case(job: ObserveRequest, ingredients: Ingredients, trace: TraceReader) -> Measurements:
    look = _Look(job, ingredients, trace)
    library, _, alike = first_shared_rng_state(trace, range(job.layout.world))
    seen: dict[str, Any] = {
        "overlaps": tuple(_overlaps(trace)) if ("data", "-") in job.failed else (),
        "same_randomness": alike if job.facts.draws_random_numbers and library == "torch" else (),
        "begins_alike": _starts_bit_identical(trace),
        "ways": tuple(way for step in job.steps for way in measured_lines(trace, step)),
    }
    try:
        if job.steps:
            seen |= look.at_update() | look.at_buffers()
            seen |= look.at_gradients()
    except (NotBoundedError, NotRecordedError) as error:
        seen["trouble"] = str(error)
    return Measurements(world=job.layout.world, **seen)


class _Look:
    """Measurements of a failed case, by the field names of `Facts`."""

    def __init__(self, job: ObserveRequest, ingredients: Ingredients, whole: TraceReader) -> None:
        self._job, self._ingredients = job, ingredients
        self._references = References(ingredients, job.contract, whole)
        self._trace = self._references.trace
        self._written = self._trace.steps_written()
        self._expectations: dict[int, StepExpectation] = {}
        elements = sum(spec.elements for spec in job.layout.model.parameters)
        self._large = elements > MOST_KEPT  # then measure one step, and the previous one
        self._reach = 1 if self._large else MOST_EARLIER

    def at_update(self) -> dict[str, Any]:
        """Measure the optimizer step whose check failed."""
        step = self._job.update_step
        failed = ("parameters", BITWISE) in self._job.failed or (
            ("parameters", "exact") in self._job.failed and step == min(self._job.steps)
        )
        if not failed or not 0 <= step < self._written:
            return {}
        return {"update": measure_update(self._expect(step))}

    def at_buffers(self) -> dict[str, Any]:
        """Measure buffers if only their check failed, at the first step."""
        step = self._job.steps[0]
        alone = ("buffers", BITWISE) in self._job.failed and not any(
            check == "gradients" for check, _ in self._job.failed
        )
        if not alone or step >= self._written:
            return {}
        return {"forward_twice": buffers_updated_twice(self._expect(step))}

    def at_gradients(self) -> dict[str, Any]:
        step, mesh = self._job.steps[0], self._references.mesh
        accepted = acceptance.parse_deviation(self._job.case.accept)
        written = step < self._written
        if mesh is not None:
            at = self._references.at(step)
            return {"layout": measure_layout(at, mesh)} if written else {}
        if accepted is not None and not accepted.requires_mean:
            return self._measure_accepted_design(accepted) if written else {}
        if written and (lost := self._expect(step).shares.lost):
            return {"lost": lost}
        return self._measure_steps()

    def _measure_accepted_design(self, accepted: acceptance.AcceptedDeviation) -> dict[str, Any]:
        if accepted.combines_parameters:
            step, references = self._job.update_step, self._references
            updates_at = updates_of(references, large=self._large)
            seen: dict[str, Any] = {"design": find_design(references, updates_at)}
            if ("parameters", ROUNDING) in self._job.failed:
                seen["mistake"] = find_mistake(references, updates_at, step)
                if accepted.family == "local-sgd" and not (seen["mistake"] or seen["design"]):
                    seen["average"] = measure_average(self._expect(step))
            return seen
        if accepted.kind.changes == "gradients" and ("gradients", ROUNDING) in self._job.failed:
            return {"compression": measure_compression(self._expect(self._job.steps[0]))}
        return {}

    def _measure_steps(self) -> dict[str, Any]:
        steps = [step for step in self._job.steps if step < self._written]
        steps = steps[:1] if self._large else steps
        if not steps:
            return {}
        case, failed = self._job.case, self._job.failed
        undeclared = self._job.contract.is_bare and case.accept is None
        undeclared &= case.dtype in acceptance.DTYPES
        measured = []
        for step in steps:
            past = range(step - 1, max(-1, step - 1 - self._reach), -1)
            earlier = [self._expect(before) for before in past]
            one = StepMeasuring(self._expect(step), earlier).facts()
            measured.append(msgspec.structs.replace(one, undeclared=undeclared))
        seen: dict[str, Any] = {"steps": tuple(measured)}
        expectation, first = self._expect(steps[0]), measured[0]
        passes = expectation.contract.micro_batches * expectation.training.accumulate
        if first.parameters and passes > 1 and not self._large:
            seen["passes"] = fit_passes(expectation)
        if first.parameters and len(first.alike) > 1:
            updates_at = updates_of(self._references, large=self._large)
            seen["design"] = find_design(self._references, updates_at)
        if first.parameters and undeclared and not (steps[0] or self._large):
            seen["compressor"] = self._compressor()
        if expectation.contract.gradients == "owner":
            seen["elsewhere"] = _reduced_to_wrong_rank(expectation)
        if first.parameters and self._job.facts.takes_loss:
            seen["right_under"] = tuple(self._right_under(steps[0]))
        if first.parameters or first.not_finite:
            return seen
        if ("gradients", BITWISE) in failed:
            seen["other_order"] = self._matching_orders(expectation)
        if ("gradients", IN_FLOAT32) in failed or ("gradients", IN_FLOAT64) in failed:
            seen["batch_weights"] = _batch_weights(expectation)
        return seen

    def _compressor(self) -> str:
        """Return the acceptance of the compressor that made the gradients, or ""."""
        try:
            return find_acceptance(self._references)
        except (NotBoundedError, NotRecordedError):
            return ""

    def _expect(self, step: int) -> StepExpectation:
        if step not in self._expectations:
            self._expectations[step] = StepExpectation(self._references, step)
        return self._expectations[step]

    def _right_under(self, first: int) -> Iterator[LossName]:
        """Yield the loss contracts under which everything is right; the failed step is tested
        first, since it excludes most of them.
        """
        steps = [first, *(step for step in range(self._written) if step != first)]
        declared = self._job.contract.loss_given(self._job.case.loss)
        by_tokens = (
            self._expect(first).shares.headers[0].tokens is not None
        )  # the loop cannot sum these
        for loss in get_args(LossName):
            if (
                loss != declared
                and not (loss == "sum/global" and by_tokens)
                and all(self._is_right_under(loss, self._expect(step)) for step in steps)
            ):
                yield loss

    def _is_right_under(self, loss: LossName, expectation: StepExpectation) -> bool:
        for index in range(len(self._job.layout.model.parameters)):
            required = expectation.interval(index, loss=loss)
            for rank in range(self._trace.layout.world):
                found = self._trace.tensor(rank, Kind.GRADIENT, expectation.step, index)
                if found is None or required is None:
                    if found is not None or required is not None:
                        return False
                elif not _is_within(found, required):
                    return False
        return True

    def _matching_orders(self, expectation: StepExpectation) -> str:
        """Return the orders and scales, other than the promised, that the gradients' bits match."""
        actual = self._trace.tensors(0, Kind.GRADIENT, expectation.step)
        found: dict[str, bool] = {}
        promised = self._job.contract
        for contract in _alternative_contracts(promised):
            try:
                expected = order_exact.expected_gradients(
                    contract,
                    self._job.case.backend,
                    [shard.gradients for shard in expectation.shards],
                    weights=expectation.shares.weights,
                    step=expectation.step,
                    ready_order=expectation.shares.headers[0].ready_order,
                    like=expectation.references.parameters,
                )
            except ValueError:
                continue  # an unknown order on this backend
            if all(_same(a, e) for a, e in zip(actual, expected, strict=True)):
                wire = f", wire {contract.wire}" if contract.wire else ""
                name = f"{type(contract.order).__name__} with {contract.scale}{wire}"
                found[name] = contract.scale == promised.scale
        # Dividing by a power of two is exact, so scales cannot be distinguished then.
        nearest = [name for name, same_scale in found.items() if same_scale]
        return " or ".join((nearest or list(found))[:3])


def _alternative_contracts(promised: Contract) -> Iterator[Contract]:
    for order, scale, wire in product(_ORDERS, _SCALES, dict.fromkeys((promised.wire, None))):
        other = msgspec.structs.replace(promised, order=order, scale=scale, wire=wire)
        if other != promised:
            yield other


def _same(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    return torch.equal(actual, expected)


def _batch_weights(expectation: StepExpectation) -> tuple[float, ...]:
    """Return the weights with which shards' gradients sum to the full batch's, if they exist.

    Least squares over all parameters, each scaled by its size; the full batch is within the
    tolerance of full batch float32 or full batch float64, which bounds both the residual and the
    error of the weights.
    """
    rows, allowed = list[tuple[torch.Tensor, ...]](), 0.0
    for index, whole in enumerate(expectation.full_batch.gradients):
        parts = [shard.gradients[index] for shard in expectation.shards]
        present = [part for part in parts if part is not None]
        if whole is None or len(present) < len(parts):
            continue
        if not all(bool(part.isfinite().all()) for part in present):
            continue  # an overflow under a GradScaler has no full-batch gradient
        factors = expectation.shares.unscaled
        columns = [p.double().reshape(-1) / f for p, f in zip(present, factors, strict=True)]
        size = sum(float(c.norm()) for c in columns) / len(columns)
        if size == 0:
            continue
        rows.append((whole.double() / size, *(column / size for column in columns)))
        allowed += (full_batch_bound.tolerance(expectation, index) / size) ** 2
    fitted = fit_least_squares(rows)
    if fitted is None or fitted.apart < LEAST_SINGULAR:
        return ()
    moved = max(fitted.moved_by) * sqrt(allowed)
    shares = [weight / len(expectation.shares.weights) for weight in expectation.shares.weights]
    found, fits = fitted.factors, fitted.left <= sqrt(allowed)
    # Heuristic: 1e-9 for the roundings of a float64 fit.
    positive = min(found) > 0 and isclose(sum(found), 1.0, abs_tol=len(found) * moved + 1e-9)
    differs = max(abs(f - s) for f, s in zip(found, shares, strict=True)) > 2 * moved
    return found if fits and positive and differs else ()


def _reduced_to_wrong_rank(expectation: StepExpectation) -> tuple[MisplacedGradient, ...]:
    """Return the parameters whose owner lacks the mean gradient while another rank has it. A zero
    mean proves nothing.
    """
    trace, step, found = expectation.trace, expectation.step, list[MisplacedGradient]()
    if trace.ranks != tuple(range(trace.layout.world)):
        return ()  # owners are numbered among all ranks, and some have no data
    for index, spec in enumerate(trace.layout.model.parameters):
        owner = trace.owner(0, Kind.GRADIENT, step, index)
        mean = expectation.interval(index)
        if owner is None or mean is None or not bool(mean.mean.any()):
            continue

        def is_right(rank: int) -> bool:
            held = trace.own_tensor(rank, Kind.GRADIENT, step, index)  # noqa: B023
            return held is not None and _is_within(held, mean)  # noqa: B023

        others = [rank for rank in range(trace.layout.world) if rank != owner]
        holder = None if is_right(owner) else next(filter(is_right, others), None)
        if holder is not None:
            found.append(MisplacedGradient(step=step, name=spec.name, owner=owner, holder=holder))
    return tuple(found)


def _is_within(held: torch.Tensor, required: Interval) -> bool:
    return bool(((as_float64(held) - required.mean).abs() <= required.bound).all())


def _overlaps(trace: TraceReader) -> Iterator[SampleOverlap]:
    """Yield pairs of ranks that read the same samples in the same epoch."""
    ranks, steps = range(trace.layout.world), range(trace.steps_written())
    headers = [[trace.header(rank, step) for step in steps] for rank in ranks]
    for one, two in combinations(ranks, 2):
        read: dict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        for first, second in zip(headers[one], headers[two], strict=True):
            read[first.epoch][0].update(first.ids)
            read[second.epoch][1].update(second.ids)
        shared = sum(len(a & b) for a, b in read.values())
        if shared:
            yield SampleOverlap(
                ranks=(one, two),
                shared=shared,
                read=sum(len(header.ids) for header in headers[one]),
                whole_steps=all(
                    set(a.ids) == set(b.ids)
                    for a, b in zip(headers[one], headers[two], strict=True)
                ),
            )


def _starts_bit_identical(trace: TraceReader) -> bool:
    ranks, model = range(trace.layout.world), trace.layout.model
    kinds = ((Kind.PARAMETER, model.parameters), (Kind.BUFFER, model.buffers))
    return all(
        len({trace.entry(rank, kind, 0, index).digest for rank in ranks}) == 1
        for kind, specs in kinds
        for index in range(len(specs))
    )
