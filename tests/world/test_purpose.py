"""A workload says what must happen in its run, and a run without it is unknown."""

from typing import get_args

import pytest
import torch
from torch import nn

import distcheck
from distcheck.contract import Training
from distcheck.errors import UsageError
from distcheck.records import CaseReport
from distcheck.records import expected_events as events
from distcheck.records.expected_events import PURPOSE, Happening
from distcheck.training.loading import load_workload
from distcheck.workloads.cells import CELLS
from distcheck.workloads.cells.samples import FEATURES, CellWorkload

KINDS = set(get_args(Happening))
WEIGHT, COUNT = "layer.weight", "count"


class Plain(nn.Module):
    """One layer, whose width two ranks divide, and a buffer that stays as it is."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, classes)
        self.register_buffer(COUNT, torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(inputs.flatten(1))
        return logits


class Eventless(CellWorkload):
    """Declares everything, and nothing of it happens in one step; no gradient is long enough to be
    clipped.
    """

    training = Training(clip_norm=1e6)
    must_happen = (
        events.ShortBatch(), events.SampleOrderChanged(), events.Resumed(),
        events.LearningRateChanged(), events.AccumulatedPasses(), events.GradientsZeroedInPlace(),
        events.EvaluatedBeforeStep(), events.GradientsClipped(), events.ScalerSkippedStep(),
        events.ModelCalledTwice(), events.RankRandomNumbersDiffer(),
        events.InitialParametersDiffer(), events.NoGradient(parameter=WEIGHT),
        events.NoGradient(parameter=WEIGHT, on="some ranks"),
        events.NoGradient(parameter=WEIGHT, on="one rank", after_one=True),
        events.ZeroGradient(parameter=WEIGHT, on="every rank but one"),
        events.ParameterFrozen(parameter=WEIGHT),
        events.ParameterFrozen(parameter=WEIGHT, after_training=True),
        events.ParameterUnfrozen(parameter=WEIGHT), events.NonfiniteGradient(parameter=WEIGHT),
        events.GradientMagnitude(parameter=WEIGHT, least=1e30, most=3.4e38),
        events.NonzeroRowsDiffer(parameter=WEIGHT), events.TokensPerSampleDiffer(),
        events.PaddedPositions(), events.BufferChanged(buffer=COUNT),
        events.IntegerBufferChanged(buffer=COUNT), events.StepInEvalMode(buffer=COUNT),
        events.GradientShapes(shapes=((), (7, 5))),
        events.GradientWithMoreElements(elements=1 << 24),
        events.GradientWithMoreBytes(nbytes=25 << 20), events.IndivisibleParameter(),
        events.GradientDtypes(dtypes=("float32", "complex64")), events.PermutedMemoryLayout(),
        events.TiedParameter(), events.SharedStorage(), events.SameShapeParameters(least=2),
        events.ModuleClasses(kinds=("Linear", "LSTM")),
    )  # fmt: skip

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Plain(classes)


class NoOtherStep(Eventless):
    """A declaration of a name that the model does not have."""

    must_happen = (events.NoGradient(parameter="another"),)  # type: ignore[assignment]


class Misdeclared(Eventless):
    """Declares what is not an event."""

    must_happen = ("a short batch",)  # type: ignore[assignment]


def purpose_of(workload: str, **asked: object) -> tuple[CaseReport, str, str]:
    report = distcheck.verify("allreduce", workload=workload, **asked)  # type: ignore[arg-type]
    (case,) = report.cases
    (result,) = [result for result in case.checks if result.check == PURPOSE]
    return case, result.verdict, result.reason


def test_every_cell_declares_what_must_happen_in_it() -> None:
    for name in CELLS:
        declared = load_workload(name).workload.must_happen  # type: ignore[attr-defined]
        assert declared, name
        assert {type(event) for event in declared} <= KINDS, name


def test_each_kind_of_event_that_does_not_happen_makes_a_run_unknown() -> None:
    assert {type(event) for event in Eventless.must_happen} == KINDS
    case, verdict, reason = purpose_of(f"{__name__}:Eventless", world=2, steps=1, dtype="float32")
    assert (case.verdict, verdict) == ("unknown", "unknown")
    said = reason.split("; expected ")
    assert len(said) == len(Eventless.must_happen)
    for event, text in zip(Eventless.must_happen, said, strict=True):
        assert text.removeprefix("expected ").startswith(f"{event.says}; seen: "), text
    others = {result.verdict for result in case.checks if result.check != PURPOSE}
    assert others == {"pass"}


def test_too_few_steps_are_unknown_and_the_report_says_how_many_it_takes() -> None:
    case, verdict, reason = purpose_of("ragged_batch", world=2, steps=2)
    assert (case.verdict, verdict) == ("unknown", "unknown")
    assert reason == (
        "expected a step with fewer samples than the batch size; seen: 256, 256 samples per step"
    )
    assert "ragged_batch trains 4 steps by default, but this run took 2; remove --steps" in (
        case.notes
    )
    assert not any("is a cell: " in note for note in case.notes)


@pytest.mark.sweep
@pytest.mark.parametrize("cell", ["unused_later", "frozen_later", "two_epochs", "loss_scaling",
                                  "unfrozen_later", "kept_gradients", "evaluation",
                                  "adamw", "resume", "dropout"])  # fmt: skip
def test_cells_that_take_several_steps_are_unknown_after_one(cell: str) -> None:
    assert purpose_of(cell, world=2, steps=1)[1] == "unknown"


def test_a_name_that_the_model_does_not_have_is_unknown() -> None:
    _, verdict, reason = purpose_of(f"{__name__}:NoOtherStep", world=2, steps=1, dtype="float32")
    assert (verdict, reason) == (
        "unknown",
        "expected no gradient (None) of another on every rank; seen: no such parameter",
    )


def test_what_takes_two_ranks_is_left_out_of_a_world_of_one() -> None:
    with pytest.raises(
        UsageError, match="it needs at least 2 ranks with data to serve its purpose"
    ):
        distcheck.verify("allreduce", world=1, workload="dropout")


def test_a_declaration_that_is_none_gets_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"its must_happen is .* tuple of events of distcheck"):
        distcheck.verify("allreduce", world=2, workload=f"{__name__}:Misdeclared")
