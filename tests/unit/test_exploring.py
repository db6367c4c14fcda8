"""The words of generated models, the space that is drawn from, and what is printed."""

import math
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import example, find, given, settings
from hypothesis import strategies as st

from distcheck.cli import _group
from distcheck.contract import BackendAllReduce, Contract, RingOrder, Training
from distcheck.errors import CannotRunError, DistcheckError, UsageError
from distcheck.exploring import command, delays, models
from distcheck.exploring.budget import seconds_of
from distcheck.exploring.found import KeptCases, as_python
from distcheck.exploring.strategies import DIMENSIONS, cases
from distcheck.exploring.words import (
    EXPLORED_DTYPES,
    PREFIX,
    SHAPE,
    Layer,
    ModelWords,
    parse,
    trains,
)
from distcheck.oracles.full_batch import relative_tolerance
from distcheck.oracles.order_exact import expected_gradients
from distcheck.plan import check_case
from distcheck.positions import shard_sizes
from distcheck.ranks.delays import Lateness
from distcheck.ranks.training import describe_model, open_ingredients
from distcheck.records import Adaptation, Case, Delay
from distcheck.workloads.generated import describe, described


@given(models())
def test_a_model_is_what_its_words_say(model: ModelWords) -> None:
    assert parse(model.words) == model
    built = described(model.words).model(sample_shape=SHAPE, classes=1)
    taking = [p for p in built.parameters() if p.requires_grad]
    assert taking
    assert any(map(trains, model.layers))
    strided = [p for p in built.parameters() if not p.is_contiguous()]
    if strided:
        assert "strided" in model.words


@given(models())
@settings(max_examples=25)
def test_a_trace_is_laid_out_as_an_optimizers_step_would_have_it(model: ModelWords) -> None:
    ingredients = open_ingredients(Case(id="x", strategy="x", world=1, batch=1,
                                        workload=model.workload), b"", None)  # fmt: skip
    built = ingredients.model()
    assert describe(model.workload, built) == describe_model(ingredients, built)


@given(models())
@example(parse("table17-table17-table3-table1-linear1"))
@example(parse("scale-scale-scale-scale-linear1.bias"))
@example(parse("linear1-linear7.tied"))
def test_no_tanh_of_a_generated_model_saturates(model: ModelWords) -> None:
    """Where it is nearly 1 its slope is the rest of 1 - tanh^2, with the rounding errors of 1.

    At worst a table's mean, 1.5 * 1.5, times weights of 1.5, and a bias of 1.5 / 4.
    """
    torch.manual_seed(0)
    workload = described(model.words)
    built = workload.model(sample_shape=SHAPE, classes=1)
    inputs, _ = workload.samples().read(torch.arange(8), train=True, dtype=torch.float32)
    seen = [0.0]
    tanh = torch.tanh

    def watched(argument: torch.Tensor) -> torch.Tensor:
        seen.append(float(argument.detach().abs().max()))
        return tanh(argument)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "tanh", watched)
        built(inputs)
    assert max(seen) <= 1.5**3 + 1.5 / 4


@given(models())
@settings(max_examples=15)
def test_no_gradient_of_a_generated_model_cancels(model: ModelWords) -> None:
    """What S32 allows for is relative to the sum, so no term may be larger than that."""
    torch.manual_seed(0)
    workload = described(model.words)
    built = workload.model(sample_shape=SHAPE, classes=1)
    samples = workload.samples()
    inputs, labels = samples.read(torch.arange(8), train=True, dtype=torch.float32)
    for parameter in built.parameters():
        if not parameter.requires_grad:
            continue
        terms = []
        for n in range(8):
            weight = float(described("scale").loss(_One(), _batch(inputs[n : n + 1], labels[n])))
            loss = built(inputs[n : n + 1]).mean() * weight
            terms.append(torch.autograd.grad(loss, parameter)[0])
        total, sizes = torch.stack(terms).sum(0), torch.stack(terms).abs().sum(0)
        assert torch.equal(total.abs(), sizes)
    assert math.isfinite(relative_tolerance("S32", 8))


class _One(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(inputs)


def _batch(inputs: torch.Tensor, label: torch.Tensor):  # type: ignore[no-untyped-def]
    from distcheck.contract import Batch

    return Batch(inputs=inputs, labels=label.view(1), ids=label.view(1), total=1)


def test_backward_passes_are_words() -> None:
    words = parse("linear3;adam;accumulate=3;samples=20")
    assert words == ModelWords((Layer("linear", 3),), "adam", 20, 3)
    assert words.words == "linear3;adam;samples=20;accumulate=3"
    assert described(words.words).training == Training(accumulate=3)
    assert described("linear3").training == Training()


@given(cases("allreduce", most_steps=4))
def test_every_shard_has_a_sample_for_every_backward_pass(case: Case) -> None:
    words = parse(case.workload.removeprefix(PREFIX))
    sizes = shard_sizes(case.steps, size=words.samples, batch=case.batch, world=case.world)
    assert min(map(min, sizes)) >= words.accumulate


@pytest.mark.parametrize("dtype", EXPLORED_DTYPES)
def test_several_backward_passes_are_drawn_in_every_dtype(dtype: str) -> None:
    others = [name for name in EXPLORED_DTYPES if name != dtype]
    drawn = find(cases("allreduce", without=others), lambda case: "accumulate" in case.workload)
    assert (drawn.dtype, drawn.world, drawn.batch, drawn.steps) == (dtype, 1, 2, 1)
    assert parse(drawn.workload.removeprefix(PREFIX)).accumulate == 2


@given(cases("allreduce", vary={"bucket": ["25", "1"]}))
def test_every_case_of_the_space_can_be_replayed(case: Case) -> None:
    assert check_case(case) == case
    assert dict(case.adaptation.arguments).keys() == {"bucket"}


LEAVABLE = ["strided", "frozen", "late", "unequal", "adam", "accumulate"]


@given(st.sets(st.sampled_from(LEAVABLE)), st.data())
def test_what_is_to_be_left_out_is_left_out(without: set[str], data: st.DataObject) -> None:
    case = data.draw(cases("allreduce", without=without))
    assert not without & set(re.findall("[a-z]+", case.workload))
    assert not ("late" in without and case.delays)
    assert not ("unequal" in without and case.batch % case.world)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "'' is no layer; kinds are linear, scale"),
        ("linear", "'linear': linear takes a size from 1 to 4096, as in linear3"),
        ("linear0", "linear takes a size from 1"),
        ("scale2", "'scale2': scale takes no size"),
        ("linear2.tide", "'tide' is no mark of linear, which takes bias, frozen, strided, tied"),
        ("linear2-conv2", "a conv needs an image, and comes before every linear"),
        ("conv1-conv1-conv1-conv1", "more than 3 convs leave nothing of a 4x4 image"),
        ("scale.frozen-running", "nothing is left to train"),
        ("scale;rmsprop", "'rmsprop' is none of sgd, momentum, adam, samples=N, and accumulate=N"),
        ("scale;samples=0", "'samples=0' is none of"),
        ("scale;accumulate=1", "'accumulate=1' is none of"),
        ("scale;accumulate=5", "accumulate=N with N from 2 to 4"),
        ("scale;accumulate=", "'accumulate=' is none of"),
        ("scale;accumulate=²", "'accumulate=²' is none of"),
    ],
)
def test_words_that_describe_nothing_get_one_sentence(words: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("0.5m", 30)]
)
def test_a_budget(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


BAD = {
    ("--budget", "5"): "--budget 5 is no time to search for; give a number and s, m or h",
    ("--budget", "0s"): "--budget 0s is no time",
    ("--budget", "9999h"): "at most 168h",
    ("--max-cases", "0"): "--max-cases 0 is out of range; it takes 1 to",
    ("--world", "0"): "--world 0 is out of range; it takes 1 to 16",
    ("--world", "17"): "--world 17 is out of range",
    ("--steps", "0"): "--steps 0 is out of range",
    ("--seed", "-1"): "--seed -1 is out of range",
    ("--deadline-s", "0"): "--deadline-s 0.0 is out of range",
    ("--vary", "bucket"): "--vary 'bucket' is not of the form NAME=VALUE",
    ("--without", "bucket"): "--without bucket: there is no such thing to leave out; known are",
    ("--loss", "sum"): "unknown loss contract --loss sum",
    ("--json", "/nowhere/x.json"): "--json /nowhere/x.json cannot be written",
}


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_bad_input_gets_one_sentence(words: tuple[str, str]) -> None:
    ran = CliRunner().invoke(_group, ["explore", "--strategy", "allreduce", *words])
    assert isinstance(ran.exception, DistcheckError)
    assert BAD[words] in str(ran.exception)
    assert "\n" not in str(ran.exception)


def test_no_strategy_and_no_hypothesis_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = CliRunner().invoke(_group, ["explore"])
    assert "no strategy was given; known are" in str(ran.exception)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    ran = CliRunner().invoke(_group, ["explore", "--strategy", "allreduce"])
    assert isinstance(ran.exception, CannotRunError)
    assert "pip install 'distcheck[explore]'" in str(ran.exception)


def test_found_cases_are_kept_apart_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = Case(
        id="allreduce-1", strategy="allreduce", world=2, workload="generated:scale", batch=2,
        rerun=False, delays=(Delay(rank=1, ms=5),),
    )  # fmt: skip
    kept = KeptCases("allreduce")
    path = kept.keep(case)
    assert path is not None
    (kept.folder / "older.json").write_text("{}")
    assert kept.read() == [case]
    assert len(kept.unreadable) == 1
    assert KeptCases("ddp").read() == []


def test_the_python_that_is_printed_says_all_that_the_case_does() -> None:
    case = Case(
        id="x", strategy='a "b".py:f', world=2, workload="generated:scale", batch=2, steps=1,
        deadline_s=3.0, loss="mean/world", delays=(Delay(rank=1, collective=2, ms=5),),
        adaptation=Adaptation(form="model", arguments=(("n", "3"), ("g", "@group")), finish="end"),
    )  # fmt: skip
    called = {}

    class Stand:
        @staticmethod
        def verify(strategy: str, **words: object) -> "Stand":
            called.update(words, strategy=strategy)
            return Stand()

        def raise_for_verdict(self) -> None:
            called["raised"] = True

    exec(as_python(case).partition("\n")[2], {"distcheck": Stand})
    assert called == {
        "strategy": 'a "b".py:f', "world": 2, "workload": "generated:scale", "batch": 2, "steps": 1,
        "seed": 0, "dtype": "float32", "deadline_s": 3.0, "loss": "mean/world", "form": "model",
        "arguments": {"n": 3, "g": "@group"}, "finish": "end", "delays": [(1, 2, 5)],
        "raised": True,
    }  # fmt: skip


@given(st.integers(1, 6).flatmap(lambda world: st.tuples(st.just(world), delays(world))))
def test_delays_are_of_ranks_that_there_are(drawn: tuple[int, tuple[Delay, ...]]) -> None:
    world, late = drawn
    assert all(delay.rank < world and delay.ms > 0 for delay in late)


def test_a_rank_is_late_where_it_was_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("distcheck.ranks.delays.time.sleep", slept.append)
    late = Lateness()
    entered = late._late(lambda: None)
    late.begin([Delay(rank=0, ms=10), Delay(rank=0, collective=2, ms=20)])
    progress = late.watching(lambda step, phase: None)
    for step in range(2):
        progress(step, "forward")
        progress(step, "backward")
        for _ in range(3):
            entered()
    assert slept == [0.01, 0.02] * 2


def test_backends_add_a_strided_gradient_as_it_lies_in_memory() -> None:
    """gloo's ring cuts memory into segments, so an element's order of summation is its place's."""
    torch.manual_seed(0)
    world, shape = 3, (300, 400)
    strided = [torch.randn(shape[::-1]).t() for _ in range(world)]
    lying = [shard.t().contiguous() for shard in strided]
    for order in (BackendAllReduce(), RingOrder()):
        contract = Contract(order=order, scale="divide-after")

        def reduced(shards: list[torch.Tensor], contract: Contract = contract) -> torch.Tensor:
            (found,) = expected_gradients(
                contract, "gloo", [[s] for s in shards], weights=[1.0] * world, step=0,
                ready_order=[0], like=[torch.empty_like(shards[0])],
            )  # fmt: skip
            assert found is not None
            return found

        alike = torch.equal(reduced(strided), reduced(lying).t())
        assert alike == isinstance(order, BackendAllReduce)


def test_every_word_that_can_be_left_out_is_known() -> None:
    assert len(set(DIMENSIONS)) == len(DIMENSIONS)
