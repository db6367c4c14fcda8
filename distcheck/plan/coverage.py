"""The amount that each check must compare for a verdict. Does not import torch.

If a check compares fewer tensors, elements, ranks or steps than required, the case is unknown.
"""

from collections.abc import Sequence

from distcheck.contract import Contract
from distcheck.judge.acceptance import AcceptedDeviation
from distcheck.judge.checks import ORDER
from distcheck.records import Case, Compared, ModelLayout, PlannedCheck, TensorSpec
from distcheck.records.expected_events import PURPOSE
from distcheck.records.layers import BITWISE, ROUNDING
from distcheck.records.mistakes import SENSITIVITY


class Coverage:
    """Computes the amount that each check must compare: all values, on every rank, at every step.

    A rank without data must be checked for its outcome, its initial state and its rerun. Its other
    values are compared as well, but are not required.
    """

    def __init__(
        self,
        case: Case,
        contract: Contract,
        model: ModelLayout,
        sizes: Sequence[Sequence[int]],
        output: TensorSpec | None = None,
    ) -> None:
        self._case, self._contract, self._model, self._sizes = case, contract, model, sizes
        self._mesh = contract.mesh(case.world)
        self._with_data = len(case.with_data)
        # in the model's output for one sample, if outputs are recorded
        self.numbers = output.elements if output is not None and self._mesh is not None else 0

    def check(
        self,
        name: str,
        layer: str,
        tensors: Sequence[TensorSpec],
        *,
        state: Sequence[TensorSpec] = (),
        steps: int | None = None,
    ) -> PlannedCheck:
        """Return a check of `tensors` on ranks with data, and of `state` on its holders, at all
        steps or at least at a number of them.
        """
        steps = self._case.steps if steps is None else steps
        holders = 1 if self._contract.optimizer_state == "sharded" else self._with_data
        elements = sum(t.elements for t in tensors) * self._with_data
        elements += sum(t.elements for t in state) * holders
        return PlannedCheck(
            check=name,
            layer=layer,
            scope="step",
            required=self._compared(
                len({t.name for t in (*tensors, *state)}), elements * steps, steps
            ),
        )

    def basic_checks(self) -> list[PlannedCheck]:
        """Return the checks whose tensors are listed in `ORDER`."""
        return [
            self.check(name.replace("_", " "), "-", getattr(self._model, tensors))
            for name, tensors in ORDER.items()
            if tensors
        ]

    def local_then_mean(self, warmup: int) -> list[PlannedCheck]:
        """Return the checks of gradients that ranks average in the first `warmup` steps only."""
        after = self._case.steps - warmup
        return [
            self.check("gradients", layer, self._model.parameters, steps=steps)
            for layer, steps in ((ROUNDING, warmup), (BITWISE, after))
            if steps
        ]

    def combined(self, accepted: AcceptedDeviation) -> list[PlannedCheck]:
        """Return the checks of ranks that step locally: each rank's parameters, except after the
        steps after which they are combined; the combination; and agreement after these steps and
        those of a warm-up. The step of the first combination may be unknown, so the minimum over
        all steps is required.
        """
        steps, world, kind = self._case.steps, self._case.world, accepted.kind
        fewest, most = kind.combined(accepted.settings, steps)
        same = (fewest + accepted.warmup) * kind.agree
        parameters = sum(t.elements for t in self._model.parameters) * world
        state = sum(t.elements for t in self._model.optimizer) * world
        tensors, alone = len(self._model.parameters), steps - most
        own = alone if accepted.combines_state else steps  # steps with each rank's own state
        between = Compared(
            tensors=tensors * (alone > 0) + len(self._model.optimizer) * (own > 0),
            elements=parameters * alone + state * own,
            ranks=world,
            steps=own if self._model.optimizer else alone,
        )
        after = Compared(tensors=tensors, elements=parameters * fewest, ranks=world, steps=fewest)
        agreed = Compared(tensors=tensors, elements=parameters * same, ranks=world, steps=same)
        return [
            PlannedCheck(check=check, layer=layer, scope="step", required=required)
            for check, layer, required in (
                ("parameters", BITWISE, between),
                ("parameters", ROUNDING, after),
                ("agreement", "-", agreed),
            )
            if required.steps
        ]

    def loss(self, layer: str) -> PlannedCheck:
        """Return the check of the loss on every rank with data at every step; in a mesh, on one
        rank of each data coordinate.
        """
        required = self._compared(1, self._with_data * self._case.steps)
        if self._mesh is not None:
            data, steps = self._mesh.data, self._case.steps
            required = Compared(tensors=1, elements=data * steps, ranks=data, steps=steps)
        return PlannedCheck(check="loss", layer=layer, scope="step", required=required)

    def outputs(self, layer: str) -> PlannedCheck:
        """Return the check of the outputs for every sample, on one rank of each data coordinate."""
        readers = () if self._mesh is None else self._mesh.readers
        elements, steps = self._samples_of(readers) * self.numbers, self._case.steps
        required = Compared(tensors=1, elements=elements, ranks=len(readers), steps=steps)
        return PlannedCheck(check="outputs", layer=layer, scope="step", required=required)

    def outcome(self) -> Compared:
        return Compared(ranks=self._case.world)

    def data(self) -> Compared:
        """Return the amount of the data check: every sample of every step."""
        return self._compared(0, sum(map(sum, self._sizes)))

    def initial(self) -> Compared:
        """Return the amount for the initial state: parameters and buffers of every rank."""
        tensors = (*self._model.parameters, *self._model.buffers)
        elements = sum(t.elements for t in tensors) * self._case.world
        return Compared(tensors=len(tensors), elements=elements, ranks=self._case.world, steps=1)

    def sensitivity(self) -> PlannedCheck:
        """Return the check that mistakes would have been revealed. It compares no tensors."""
        required = Compared(ranks=self._with_data)
        return PlannedCheck(check=SENSITIVITY, layer="-", scope="front", required=required)

    def purpose(self) -> PlannedCheck:
        """Return the check of the events that the workload requires. It reads all samples of every
        step of every rank with data; in a mesh, of one rank of each data coordinate.
        """
        required = self.data()
        if self._mesh is not None:
            readers, steps = self._mesh.readers, self._case.steps
            samples = self._samples_of(readers)
            required = Compared(tensors=0, elements=samples, ranks=len(readers), steps=steps)
        return PlannedCheck(check=PURPOSE, layer="-", scope="step", required=required)

    def _samples_of(self, readers: Sequence[int]) -> int:
        return sum(sizes[rank] for sizes in self._sizes for rank in readers)

    def rerun(self) -> PlannedCheck:
        """Return the check of the rerun: all values of every rank agree with a second world."""
        model, case = self._model, self._case
        state = (*model.parameters, *model.buffers, *model.optimizer)
        seen = self._contract.sync != "out-of-sight"
        gradients = (*model.parameters, *(model.parameters if seen else ()))
        per_step = sum(t.elements for t in (*gradients, *state))
        before = sum(t.elements for t in state)
        returned = self.numbers * max(map(max, self._sizes))
        elements = case.world * (case.steps * (per_step + returned) + before)
        tensors = len(gradients) + len(state) + (self.numbers > 0)
        required = Compared(tensors=tensors, elements=elements, ranks=case.world, steps=case.steps)
        return PlannedCheck(check="rerun", layer="-", scope="run", required=required)

    def _compared(self, tensors: int, elements: int, steps: int | None = None) -> Compared:
        steps = self._case.steps if steps is None else steps
        return Compared(tensors=tensors, elements=elements, ranks=self._with_data, steps=steps)
