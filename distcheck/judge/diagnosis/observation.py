"""The job that takes a closer look at a failed case: measures what causes are derived from."""

import os
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, product
from math import isclose, sqrt
from typing import get_args

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
from distcheck.judge.checks.data import drew_alike
from distcheck.judge.diagnosis.facts import Facts, Overlap
from distcheck.judge.diagnosis.forward_twice import ran_twice
from distcheck.judge.diagnosis.layout_measuring import measured_layout
from distcheck.judge.diagnosis.measuring import LEAST_SINGULAR, MOST_KEPT, StepMeasuring
from distcheck.judge.diagnosis.micro_batches import measured_passes
from distcheck.judge.diagnosis.on_demand import StepExpectation
from distcheck.judge.diagnosis.owned import owned_elsewhere
from distcheck.judge.diagnosis.updates import (
    averaged_every,
    measured_average,
    measured_update,
    scaled_projection,
)
from distcheck.judge.fitting import fit
from distcheck.judge.jobs import OBSERVE, ObserveRequest
from distcheck.judge.oracles import order_exact
from distcheck.judge.oracles.references import References
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine import devices, seeds
from distcheck.machine.numerics import NotBoundedError, real_parts
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import LossName
from distcheck.records.layers import BITWISE, IN_FLOAT32, IN_FLOAT64, ROUNDING
from distcheck.records.mesh import Mesh
from distcheck.training.building import Ingredients, open_ingredients
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.reporter import Reporter

_MOST_EARLIER = 4  # steps; a gradient that is staler has no name
_ORDERS: tuple[Order, ...] = (
    RankOrder(), BackendAllReduce(), BackendReduce(), RingOrder(), DDPBuckets(),
    DDPBuckets(rebuilt_at=None), DDPBuckets(rebuilt_at=2),
)  # fmt: skip
_SCALES: tuple[Scale, ...] = ("divide-after", "divide-before", "multiply-before")


@OBSERVE.does
def observe_job(job: ObserveRequest, fds: Descriptors, reporter: Reporter) -> Facts:
    """Measures; returns a Facts. What cannot be measured is said in `trouble`."""
    os.nice(5)
    seeds.pin_determinism()
    device = devices.enter(job.case.judged_on, 0)
    trace = TraceReader(fds["trace"], job.layout, device=device)
    ingredients = open_ingredients(job.case, job.description, fds.get("data"), device)
    seeds.pin_default_dtype(job.case.dtype)
    reporter.progress(job.steps[0] if job.steps else 0, "a closer look")
    return observe(job, ingredients, trace)


def observe(job: ObserveRequest, ingredients: Ingredients, trace: TraceReader) -> Facts:
    """What is to be known of the job's steps."""
    look = _Look(job, ingredients, trace)
    library, _, alike = drew_alike(trace, range(job.layout.world))
    facts = Facts(
        world=job.layout.world,
        overlaps=tuple(_overlaps(trace)) if ("data", "-") in job.failed else (),
        same_randomness=alike if job.draws_random_numbers and library == "torch" else (),
        begins_alike=_begins_alike(trace),
    )
    accepted = acceptance.read(job.case.accept)
    if not job.steps:
        return facts
    try:
        facts = look.at_buffers(look.at_update(facts))
        if look.mesh is not None:
            return look.at_layout(facts, look.mesh)
        if accepted is not None and not accepted.requires_mean:
            return look.at_design(facts, accepted)
        if lost := look.lost():
            return msgspec.structs.replace(facts, lost=lost)
        return look.at_steps(facts)
    except (NotBoundedError, NotRecordedError) as error:
        return msgspec.structs.replace(facts, trouble=str(error))


class _Look:
    def __init__(self, job: ObserveRequest, ingredients: Ingredients, whole: TraceReader) -> None:
        self._job = job
        self._references = References(ingredients, job.contract, whole)
        self._trace, self.mesh = self._references.trace, self._references.mesh
        self._ingredients = ingredients
        self._expectations: dict[int, StepExpectation] = {}
        elements = sum(spec.elements for spec in job.layout.model.parameters)
        self._large = elements > MOST_KEPT  # then one step, and the one before it
        self._reach = 1 if self._large else _MOST_EARLIER

    def lost(self) -> str:
        """Says of which ranks no gradient can come back from the loss, at the first step."""
        step = self._job.steps[0]
        return self._expect(step).lost if step < self._trace.steps_written() else ""

    def at_update(self, facts: Facts) -> Facts:
        """Measures the optimizer's step where its check failed."""
        step = self._job.update_step
        failed = ("parameters", BITWISE) in self._job.failed or (
            ("parameters", "lattice") in self._job.failed and step == min(self._job.steps)
        )
        if not failed or not 0 <= step < self._trace.steps_written():
            return facts
        return msgspec.structs.replace(facts, update=measured_update(self._expect(step)))

    def at_buffers(self, facts: Facts) -> Facts:
        """Measures the buffers where their check alone failed, at the first step."""
        step = self._job.steps[0]
        alone = ("buffers", BITWISE) in self._job.failed and not any(
            check == "gradients" for check, _ in self._job.failed
        )
        if not alone or step >= self._trace.steps_written():
            return facts
        return msgspec.structs.replace(facts, forward_twice=ran_twice(self._expect(step)))

    def at_design(self, facts: Facts, accepted: acceptance.Accepted) -> Facts:
        """Measures what is exchanged in place of a mean of gradients."""
        step = self._job.steps[0]
        if step >= self._trace.steps_written():
            return facts
        if ("parameters", ROUNDING) in self._job.failed:
            step = self._job.update_step
            average = measured_average(self._expect(step))
            return msgspec.structs.replace(facts, average=average)
        if accepted.family == "low-rank" and ("gradients", ROUNDING) in self._job.failed:
            factor = scaled_projection(self._expect(step))
            return msgspec.structs.replace(facts, scaled_projection=factor)
        return facts

    def at_layout(self, facts: Facts, mesh: Mesh) -> Facts:
        """Measures the first step that failed in a model-parallel layout."""
        step = self._job.steps[0]
        if step >= self._trace.steps_written():
            return facts
        return msgspec.structs.replace(
            facts, layout=measured_layout(self._references.at(step), mesh)
        )

    def at_steps(self, facts: Facts) -> Facts:
        """Measures every step that was written."""
        written = self._trace.steps_written()
        steps = [step for step in self._job.steps if step < written][: 1 if self._large else None]
        case = self._job.case
        undeclared = self._job.contract.is_bare and case.accept is None
        undeclared &= case.dtype in acceptance.DTYPES
        measured = []
        for step in steps:
            past = range(step - 1, max(-1, step - 1 - self._reach), -1)
            earlier = [self._expect(before) for before in past]
            one = StepMeasuring(self._expect(step), earlier).facts()
            measured.append(msgspec.structs.replace(one, undeclared=undeclared))
        facts = msgspec.structs.replace(facts, steps=tuple(measured))
        if measured and measured[0].parameters:
            facts = self._beside(facts, self._expect(steps[0]), written)
        if steps and self._references.contract.gradients == "owner":
            found = owned_elsewhere(self._expect(steps[0]))
            facts = msgspec.structs.replace(facts, elsewhere=found)
        if measured and measured[0].parameters and self._job.takes_loss:
            under = tuple(self._right_under(steps[0], written))
            facts = msgspec.structs.replace(facts, right_under=under)
        if not measured or measured[0].parameters or measured[0].not_finite:
            return facts
        expectation, failed = self._expect(steps[0]), self._job.failed
        if ("gradients", BITWISE) in failed:
            facts = msgspec.structs.replace(facts, other_order=self._other_order(expectation))
        for layer in (IN_FLOAT32, IN_FLOAT64):
            if ("gradients", layer) in failed:
                weights = _batch_weights(expectation)
                facts = msgspec.structs.replace(facts, batch_weights=weights)
        return facts

    def _beside(self, facts: Facts, expectation: StepExpectation, written: int) -> Facts:
        """What makes up gradients beside the ranks' own: passes, and averages of parameters."""
        passes = self._references.contract.micro_batches * self._ingredients.training.accumulate
        if passes > 1 and not self._large:
            facts = msgspec.structs.replace(facts, passes=measured_passes(expectation))
        if len(facts.steps[0].alike) > 1:
            every = averaged_every(expectation, written)
            facts = msgspec.structs.replace(facts, averaged_every=every)
        return facts

    def _expect(self, step: int) -> StepExpectation:
        if step not in self._expectations:
            self._expectations[step] = StepExpectation(self._references, step)
        return self._expectations[step]

    def _right_under(self, first: int, written: int) -> Iterator[LossName]:
        """The loss contracts under which nothing would be wrong; the step that failed goes first,
        as it is enough to rule most of them out.
        """
        steps = [first, *(step for step in range(written) if step != first)]
        declared = self._job.contract.loss_given(self._job.case.loss)
        by_tokens = self._expect(first).headers[0].tokens is not None  # which the loop cannot sum
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
                elif not bool(((real_parts(found) - required.mean).abs() <= required.bound).all()):
                    return False
        return True

    def _other_order(self, expectation: StepExpectation) -> str:
        """The orders and scales, other than the promised, whose bits the gradients have."""
        count = len(self._job.layout.model.parameters)
        actual = [
            self._trace.tensor(0, Kind.GRADIENT, expectation.step, index) for index in range(count)
        ]
        found: dict[str, bool] = {}
        promised = self._job.contract
        for contract in _other_promises(promised):
            try:
                expected = order_exact.expected_gradients(
                    contract,
                    self._job.case.backend,
                    [shard.gradients for shard in expectation.shards],
                    weights=expectation.weights,
                    step=expectation.step,
                    ready_order=expectation.headers[0].ready_order,
                    like=expectation.parameters,
                )
            except ValueError:
                continue  # an order that is not known on this backend
            if all(_same(a, e) for a, e in zip(actual, expected, strict=True)):
                wire = f", wire {contract.wire}" if contract.wire else ""
                name = f"{type(contract.order).__name__} with {contract.scale}{wire}"
                found[name] = contract.scale == promised.scale
        # Dividing by a power of two rounds nothing, so that scales cannot be distinguished then.
        nearest = [name for name, same_scale in found.items() if same_scale]
        return " or ".join((nearest or list(found))[:3])


def _other_promises(promised: Contract) -> Iterator[Contract]:
    for order, scale, wire in product(_ORDERS, _SCALES, dict.fromkeys((promised.wire, None))):
        other = msgspec.structs.replace(promised, order=order, scale=scale, wire=wire)
        if other != promised:
            yield other


def _same(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    return torch.equal(actual, expected)


def _batch_weights(expectation: StepExpectation) -> tuple[float, ...]:
    """The weights with which shards' gradients add up to the whole batch's, if some do.

    Least squares over all parameters, each by its own size; the whole batch is within S32's or
    S64's tolerance of what it should be, which bounds both the residual and the weights' error.
    """
    rows, allowed = list[tuple[torch.Tensor, ...]](), 0.0
    for index, whole in enumerate(expectation.full_batch.gradients):
        parts = [shard.gradients[index] for shard in expectation.shards]
        present = [part for part in parts if part is not None]
        if whole is None or len(present) < len(parts):
            continue
        if not all(bool(part.isfinite().all()) for part in present):
            continue  # an overflow under a GradScaler, of which no whole batch is made
        factors = expectation.unscaled
        columns = [p.double().reshape(-1) / f for p, f in zip(present, factors, strict=True)]
        size = sum(float(c.norm()) for c in columns) / len(columns)
        if size == 0:
            continue
        rows.append((whole.double() / size, *(column / size for column in columns)))
        allowed += (expectation.full_batch_tolerance(index) / size) ** 2
    fitted = fit(rows)
    if fitted is None or fitted.apart < LEAST_SINGULAR:
        return ()
    moved = max(fitted.moved_by) * sqrt(allowed)
    shares = [weight / len(expectation.weights) for weight in expectation.weights]
    found, fits = fitted.factors, fitted.left <= sqrt(allowed)
    # Chosen: 1e-9 for the roundings of a fit in float64, where nothing moved.
    positive = min(found) > 0 and isclose(sum(found), 1.0, abs_tol=len(found) * moved + 1e-9)
    differs = max(abs(f - s) for f, s in zip(found, shares, strict=True)) > 2 * moved
    return found if fits and positive and differs else ()


def _overlaps(trace: TraceReader) -> Iterator[Overlap]:
    """Pairs of ranks that read the same samples in the same epoch."""
    ranks, steps = range(trace.layout.world), range(trace.steps_written())
    headers = [[trace.header(rank, step) for step in steps] for rank in ranks]
    for one, two in combinations(ranks, 2):
        read: dict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        for first, second in zip(headers[one], headers[two], strict=True):
            read[first.epoch][0].update(first.ids)
            read[second.epoch][1].update(second.ids)
        shared = sum(len(a & b) for a, b in read.values())
        if shared:
            yield Overlap(
                ranks=(one, two),
                shared=shared,
                read=sum(len(header.ids) for header in headers[one]),
                whole_steps=all(
                    set(a.ids) == set(b.ids)
                    for a, b in zip(headers[one], headers[two], strict=True)
                ),
            )


def _begins_alike(trace: TraceReader) -> bool:
    """Whether all ranks begin with the same bits."""
    ranks, model = range(trace.layout.world), trace.layout.model
    kinds = ((Kind.PARAMETER, model.parameters), (Kind.BUFFER, model.buffers))
    return all(
        len({trace.entry(rank, kind, 0, index).digest for rank in ranks}) == 1
        for kind, specs in kinds
        for index in range(len(specs))
    )
