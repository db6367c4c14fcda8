"""What ranks count by where a workload counts tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distcheck.contract import BackendAllReduce, Batch, Contract, contract_of, strategy
from distcheck.errors import UsageError
from distcheck.judge.checks import happened
from distcheck.judge.diagnosis import tokens, weights
from distcheck.judge.diagnosis.combinations import fitting_readings
from distcheck.judge.oracles.shares import Shares
from distcheck.plan.source_files import declared_promises
from distcheck.recordings.traces.header import StepHeader
from distcheck.records import expected_events as events
from distcheck.training.building import with_token_mask
from distcheck.training.loaded import LoadedStrategy
from distcheck.verification.inspection import check_global_sum, check_loss
from distcheck.workloads.tokens import IGNORED, LENGTH, PADDING, workload
from tests.unit.test_diagnosis import measured

TOKENS, POSITIONS, SAMPLES = (30, 10, 24), (48, 48, 32), (3, 3, 2)
PLENTY = tuple(n / sum(TOKENS) for n in TOKENS)


def header(tokens: int | None, *, samples: int = 3, positions: int = 48) -> StepHeader:
    return StepHeader(
        written=True, ids=tuple(range(samples)), loss=1.0, loss_factor=1.0, epoch=0, rng_state=b"",
        rng_digest=b"", library_states=b"", ready_order=(), settings=0, implementation=0,
        tokens=tokens, positions=positions,
    )  # fmt: skip


def shares(tokens: Sequence[int], loss: Any = "mean", **promised: Any) -> Shares:
    headers = tuple(header(n, samples=s) for n, s in zip(tokens, SAMPLES, strict=True))
    return Shares(0, (0, 1, 2), headers, Contract(**promised), loss, (1.0,) * 3)


def batch(rows: int = 5) -> Batch:
    inputs, labels = workload.samples().read(torch.arange(rows), train=True, dtype=torch.float32)
    found = Batch(inputs=inputs, labels=labels, ids=torch.arange(rows), total=rows)
    return with_token_mask(workload, "tokens", found)


def test_sequences_are_of_very_unequal_length_and_some_have_no_target() -> None:
    inputs, labels = workload.samples().read(torch.arange(999), train=True, dtype=torch.bfloat16)
    counts = (labels != IGNORED).sum(1)
    assert int(counts.max()) == LENGTH
    assert 0.05 < float((counts == 0).float().mean()) < 0.2
    assert float(counts.float().median()) < LENGTH / 4
    # A token is there before each target, and what follows it is that target.
    follows = inputs[:, 1:].long() == labels[:, :-1]
    assert bool((follows | (labels[:, :-1] == IGNORED)).all())
    assert bool((inputs[labels != IGNORED] != PADDING).all())


def test_parts_count_by_their_tokens() -> None:
    whole = batch()
    parts = whole.split(3)
    assert [len(part.ids) for part in parts] == [2, 2, 1]
    assert sum(part.tokens for part in parts) == whole.tokens == int((whole.labels >= 0).sum())
    assert sum(part.share_of(whole) for part in parts) == pytest.approx(1.0)
    empty = replace(whole, real=torch.zeros(5, LENGTH) > 0)
    assert (empty.tokens, empty.part(0, 2).share_of(empty)) == (0, 0.0)


@pytest.mark.parametrize(
    ("found", "said"),
    [([True], "returned list"), (torch.ones(5), "returned torch.float32"),
     (torch.ones(2, 4) > 0, r"the shape \(2, 4\) for 5 samples")],
)  # fmt: skip
def test_what_is_no_table_of_positions_is_refused(found: object, said: str) -> None:
    class Other:
        def tokens(self, batch: Batch) -> object:
            return found

    with pytest.raises(UsageError, match=said):
        with_token_mask(Other(), "mine", batch())


def test_a_rank_counts_by_its_tokens_and_one_without_any_for_nothing() -> None:
    assert shares(TOKENS).mean_weights == pytest.approx(PLENTY)
    summed = shares((30, 0, 24), "tokens")
    assert summed.loss_factors == [30.0, 1.0, 24.0]
    assert summed.mean_weights == pytest.approx([1 / 54, 0.0, 1 / 54])
    assert not summed.lost
    by_loss = shares(
        TOKENS, weighting="loss"
    ).mean_weights  # what the strategy did by samples counts
    assert [s * n / 8 for s, n in zip(by_loss, (9, 9, 6), strict=True)] == pytest.approx(PLENTY)
    assert shares((0, 0, 0)).mean_weights == [0.0, 0.0, 0.0]


def test_a_step_whose_ranks_have_as_many_tokens_shows_nothing() -> None:
    class Run:
        def __init__(self, *counts: int, **said: int) -> None:
            step = type("Step", (), {"headers": [header(n, **said) for n in counts]})
            self.steps = [step]

    def apart(*counts: int) -> str:
        return happened.tokens_per_sample_differ(events.TokensPerSampleDiffer(), Run(*counts))  # type: ignore[arg-type]

    assert apart(7, 8) == apart(7) == ""
    assert apart(7, 7) == "seen: equally many on every rank, at every step"
    run: Any = Run(48, 48)
    assert happened.padded_positions(events.PaddedPositions(), run) == "seen: none"
    assert happened.padded_positions(events.PaddedPositions(), Run(48, 47)) == ""  # type: ignore[arg-type]


def counted(combined: Sequence[float], *, summed: bool = True, **said: Any) -> Any:
    step = measured([combined] * 3, PLENTY)
    said = {"tokens": TOKENS, "positions": POSITIONS, "samples": SAMPLES} | said
    return type(step)(
        **{name: getattr(step, name) for name in step.__struct_fields__} | said | {"summed": summed}
    )


def causes(step: Any) -> list[str]:
    return [found.cause for found in weights.explain(step, step.parameters)]


ALL, PADDED = sum(TOKENS), sum(POSITIONS)
LEFT = {
    "unweighted-tokens": [1 / 3] * 3,
    "unweighted-tokens by samples": [3 / 8, 3 / 8, 2 / 8],
    "padding-counted": [n / PADDED for n in TOKENS],
    "padding-counted on each rank": [n / p / 3 for n, p in zip(TOKENS, POSITIONS, strict=True)],
    "missing-division": [float(n) for n in TOKENS],
    "wrong-divisor by ranks": [n / 3 for n in TOKENS],
    "wrong-divisor by samples": [n / 8 for n in TOKENS],
    "double-division": [n / ALL / 3 for n in TOKENS],
}


@pytest.mark.parametrize("name", LEFT)
def test_what_each_mistake_leaves_is_named(name: str) -> None:
    step = counted(LEFT[name])
    assert causes(step) == [name.partition(" ")[0]]
    (finding,) = weights.explain(step, step.parameters)
    told = {"unweighted-tokens": "30, 10, 24 tokens", "wrong-divisor": "number of tokens (64)"}
    assert told.get(finding.cause, "") in finding.evidence
    if name == "padding-counted":
        assert "64 tokens over 128 positions" in finding.evidence


def test_a_factor_that_may_be_two_mistakes_has_both_names() -> None:
    step = counted([n / 192 for n in TOKENS], positions=(64, 64, 64))  # 64 / 192 is 1 / 3
    assert causes(step) == ["padding-counted", "double-division"]


def test_right_weights_and_other_workloads_have_none_of_these_names() -> None:
    assert causes(counted(PLENTY)) == []
    plain = measured([[1 / 3] * 3] * 3, PLENTY)
    assert causes(plain) == ["unweighted-mean"]
    assert tokens.mistaken_weights(plain) == {} == dict.fromkeys(tokens.token_factors(plain))
    assert tokens.causes_of_token_factor(plain, 0.5, "") == []
    assert [way.kind for way in fitting_readings(plain, plain.parameters, 0)][:1] == ["plain mean"]


def test_the_promise_goes_with_no_other_of_weights() -> None:
    assert contract_of(strategy(loss="tokens")(lambda model: None)).loss_given("mean") == "tokens"
    with pytest.raises(ValueError, match=r"remove order=, weighting="):
        strategy(loss="tokens", order=BackendAllReduce())
    with pytest.raises(ValueError, match='loss "tokens" or None'):
        strategy(loss="sum")  # type: ignore[arg-type]


def test_a_promise_is_read_from_a_decorator_without_an_import(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "raise RuntimeError\n@strategy(loss='tokens')\nclass Yes: ...\n"
        "@strategy(loss=other)\ndef no(model): 'loss=tokens'\n"
    )
    assert declared_promises(f"{file}:Yes") == {"loss": "tokens"}
    assert declared_promises("token_weighted") == {"loss": "tokens"}
    for other in (f"{file}:no", f"{file}:missing", str(file), "allreduce", "nothing", "a/b.py:c"):
        assert "loss" not in declared_promises(other)


def test_what_does_not_go_with_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(loss: str) -> Any:
        return type("Case", (), {"strategy": "mine", "workload": "tokens", "loss": loss})

    promised = LoadedStrategy(contract=Contract(loss="tokens"), file="")
    check_loss(case("mean"), promised)
    check_loss(case("tokens"), promised)
    with pytest.raises(UsageError, match="--loss mean/world contradicts the promise loss='tokens'"):
        check_loss(case("mean/world"), promised)
    own: Any = LoadedStrategy(
        contract=Contract(loss="tokens"), file="", backward=lambda *args: torch.zeros(())
    )
    with pytest.raises(UsageError, match="has its own backward"):
        check_loss(case("mean"), own)
    facts: Any = type("Facts", (), {"by_tokens": True})
    check_global_sum(case("mean"), facts)
    with pytest.raises(UsageError, match="pass --loss tokens"):
        check_global_sum(case("sum/global"), facts)
