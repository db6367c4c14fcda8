"""A closer look at code that is right finds nothing, whatever made someone look."""

from collections.abc import Sequence

import pytest

import distcheck
from distcheck.judge import diagnosis
from distcheck.judge.diagnosis import gradients
from distcheck.judge.diagnosis.measurements import Measurements
from distcheck.records import CheckResult, Diagnosis, Outcome

pytestmark = pytest.mark.usefixtures("no_rerun")

RIGHT = ["allreduce", "ring", "ddp_bf16_hook", "ddp_no_sync", "fsdp"]
LOOKED_AT = ("ring", "fsdp")  # a promised order, and sharded parameters


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.sweep), 3])
@pytest.mark.parametrize(
    "strategy",
    [name if name in LOOKED_AT else pytest.param(name, marks=pytest.mark.sweep) for name in RIGHT],
)
def test_right_code_is_named(strategy: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Measurements | None] = []

    def note(
        ends: Sequence[Outcome], results: Sequence[CheckResult], facts: Measurements | None,
        *further: object, accept: str | None,
    ) -> list[Diagnosis]:  # fmt: skip
        looked.append(facts)
        return []

    monkeypatch.setattr(diagnosis, "needs_diagnosis", lambda results: True)
    monkeypatch.setattr(diagnosis, "steps_to_diagnose", lambda results: (0, 1, 2))
    monkeypatch.setattr(diagnosis, "diagnose", note)
    report = distcheck.verify(strategy, world=world, workload="tests.mutants.small:Small", steps=3)
    report.raise_for_verdict()
    assert len(looked) >= len(report.cases)
    for facts in looked:
        assert facts is not None
        assert not facts.trouble
        assert [step.step for step in facts.steps] == [0, 1, 2]
        assert all(step.total == 4 and not step.parameters for step in facts.steps)
        assert not any(step.missing or step.unchanged for step in facts.steps)
        assert not gradients.explain(facts)
        assert not facts.batch_weights
        assert not facts.other_order
