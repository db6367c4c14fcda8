"""The words of generated models, the space that is drawn from, and what is printed."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from hypothesis import example, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from distcheck.addons.explore import command, delays, models, running
from distcheck.addons.explore.command import parse_duration
from distcheck.addons.explore.failure_database import FailureDatabase, reproducing_program
from distcheck.addons.explore.report import ONE_RANK, ExploreResult, _lines, print_search
from distcheck.addons.explore.search import Finding, Search
from distcheck.addons.explore.space import DIMENSIONS, cases
from distcheck.cli import root_command
from distcheck.contract import BackendAllReduce, Batch, Contract, RingOrder, Training
from distcheck.errors import CannotRunError, DistcheckError, ExitCode, UsageError
from distcheck.judge.oracles.full_batch import relative_tolerance
from distcheck.judge.oracles.order_exact import expected_gradients
from distcheck.plan.cases import check_case
from distcheck.plan.declined import declinable_words, declined_words
from distcheck.records import Adaptation, Case, CaseReport, Delay, Diagnosis
from distcheck.records.causes import APART
from distcheck.records.generated_words import (
    EXPLORED_DTYPES,
    PREFIX,
    SHAPE,
    GeneratedLayer,
    GeneratedModelSpec,
    is_trainable_layer,
    parse_model_words,
)
from distcheck.store.run_folder import write_case
from distcheck.training.building import describe_model, open_ingredients
from distcheck.training.delays import RankDelays
from distcheck.training.epoch_positions import shard_sizes
from distcheck.workloads.generated import WEIGHT_DECAY, describe, described
from tests import documents
from tests.stored import compare


@given(models())
def test_a_model_is_what_its_words_say(model: GeneratedModelSpec) -> None:
    assert parse_model_words(model.words) == model
    built = described(model.words).model(sample_shape=SHAPE, classes=1)
    taking = [p for p in built.parameters() if p.requires_grad]
    assert taking
    assert any(map(is_trainable_layer, model.layers))
    strided = [p for p in built.parameters() if not p.is_contiguous()]
    if strided:
        assert "strided" in model.words


@given(models())
@settings(max_examples=25)
def test_a_trace_is_laid_out_as_an_optimizers_step_would_have_it(model: GeneratedModelSpec) -> None:
    ingredients = open_ingredients(Case(id="x", strategy="x", world=1, batch=1,
                                        workload=model.workload), b"", None)  # fmt: skip
    built = ingredients.model()
    assert describe(model.workload, built) == describe_model(ingredients, built)


@given(models())
@example(parse_model_words("table17-table17-table3-table1-linear1"))
@example(parse_model_words("scale-scale-scale-scale-linear1.bias"))
@example(parse_model_words("linear1-linear7.tied"))
def test_no_tanh_of_a_generated_model_saturates(model: GeneratedModelSpec) -> None:
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
def test_no_gradient_of_a_generated_model_cancels(model: GeneratedModelSpec) -> None:
    """What full batch float32 allows for is relative to the sum, so no term may be larger than
    that. A norm's own weight is compared on the scale of its bias, so it is left out here.
    """
    torch.manual_seed(0)
    workload = described(model.words)
    built = workload.model(sample_shape=SHAPE, classes=1)
    samples = workload.samples()
    inputs, labels = samples.read(torch.arange(8), train=True, dtype=torch.float32)
    norms = {m.weight for m in built.modules() if isinstance(m, torch.nn.BatchNorm2d)}
    for parameter in built.parameters():
        if not parameter.requires_grad or parameter in norms:
            continue
        terms = []
        for n in range(8):
            weight = float(described("scale").loss(_One(), _batch(inputs[n : n + 1], labels[n])))
            loss = built(inputs[n : n + 1]).mean() * weight
            (term,) = torch.autograd.grad(loss, parameter, allow_unused=True)
            terms.append(torch.zeros_like(parameter) if term is None else term)
        total, sizes = torch.stack(terms).sum(0), torch.stack(terms).abs().sum(0)
        assert torch.equal(total.abs(), sizes)
    assert math.isfinite(relative_tolerance("full batch float32", 8))


class _One(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(inputs)


def _batch(inputs: torch.Tensor, labels: torch.Tensor) -> Batch:
    labels = labels.view(len(inputs))
    return Batch(inputs=inputs, labels=labels, ids=labels, total=len(inputs))


def test_backward_passes_are_words() -> None:
    words = parse_model_words("linear3;adam;accumulate=3;samples=20")
    assert words == GeneratedModelSpec((GeneratedLayer("linear", 3),), "adam", 20, 3)
    assert words.words == "linear3;adam;samples=20;accumulate=3"
    assert described(words.words).training == Training(accumulate=3)
    assert described("linear3").training == Training()


def test_words_of_older_cases_are_read_as_they_were() -> None:
    words = parse_model_words("conv2.strided-linear3.bias.tied-scale;adam;samples=20;accumulate=2")
    assert words.words == "conv2.strided-linear3.bias.tied-scale;adam;samples=20;accumulate=2"
    assert [layer.nested for layer in words.layers] == [0, 0, 0]
    model = described(words.words).model(sample_shape=SHAPE, classes=1)
    names = [name for name, _ in model.named_parameters()]
    assert names == ["0.weight", "2.weight", "2.bias", "3.factor"]


def test_neighbors_share_the_modules_that_they_are_nested_in() -> None:
    words = parse_model_words("scale.nested2-scale.nested3-scale-running.nested1-scale.nested1")
    assert parse_model_words(words.words) == words
    model = described(words.words).model(sample_shape=SHAPE, classes=1)
    names = [name for name, _ in model.named_parameters()]
    assert names == ["0.0.0.factor", "0.0.1.0.factor", "1.factor", "2.1.factor"]


def test_two_groups_learn_and_decay_at_rates_that_change() -> None:
    workload = described("linear2.bias-scale;momentum;groups;schedule")
    model = workload.model(sample_shape=SHAPE, classes=1)
    optimizer = workload.optimizer(workload.groups(model.parameters()))
    seen = []
    for step in range(3):
        workload.schedule(optimizer, step)
        seen.append([group["lr"] for group in optimizer.param_groups])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, WEIGHT_DECAY]
    assert all(first == 2 * second for first, second in seen)
    assert len({first for first, _ in seen}) == 3
    assert not hasattr(described("scale"), "groups")
    assert not hasattr(described("scale"), "schedule")


@given(models(without=["norm", "running"]))
@settings(max_examples=15)
def test_what_is_absent_has_no_gradient_without_its_samples(model: GeneratedModelSpec) -> None:
    """And the whole batch's gradient is the mean of the samples', a None counting as zero."""
    torch.manual_seed(0)
    marked = [msgspec.structs.replace(layer, marks=("absent",)) for layer in model.layers]
    marked = [layer for layer in marked if layer.kind != "running"]
    workload = described(GeneratedModelSpec((*marked, GeneratedLayer("scale"))).words)
    built = workload.model(sample_shape=SHAPE, classes=1).double()
    inputs, labels = workload.samples().read(torch.arange(6), train=True, dtype=torch.float64)
    chosen = inputs[:, 0, 0, 0] < 1.0
    assert 0 < int(chosen.sum()) < 6
    parameters = list(built.parameters())
    whole = torch.autograd.grad(workload.loss(built, _batch(inputs, labels)), parameters)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for n in range(6):
        loss = workload.loss(built, _batch(inputs[n : n + 1], labels[n]))
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        assert [gradient is None for gradient in found[:-1]] == [not chosen[n]] * len(found[:-1])
        for sum_, gradient in zip(total, found, strict=True):
            sum_ += 0 if gradient is None else gradient / 6
    for one, other in zip(whole, total, strict=True):
        torch.testing.assert_close(one, other)


@given(cases("allreduce"))
def test_absent_is_drawn_only_where_zeros_move_nothing(case: Case) -> None:
    model = parse_model_words(case.workload.removeprefix(PREFIX))
    if any("absent" in layer.marks for layer in model.layers):
        assert (model.optimizer, model.groups) == ("sgd", False)


@pytest.mark.parametrize("word", ["norm", "nested1", "groups", "schedule", "absent"])
def test_every_dimension_is_drawn_alone(word: str) -> None:
    """What is found by it shrinks to a case of the simplest kind but for it."""
    drawn = find(cases("allreduce"), lambda case: word in case.workload)
    least = {
        "norm": ["norm"], "nested1": ["linear1.nested1"],
        "groups": ["norm;groups", "linear1.bias;groups", "linear1-linear1;groups"],
        "schedule": ["linear1;schedule"],
        "absent": ["linear1.absent-linear1", "linear1-linear1.absent"],
    }  # fmt: skip
    assert drawn.workload.removeprefix(PREFIX) in least[word]
    assert (drawn.world, drawn.steps, drawn.dtype, drawn.delays) == (1, 1, "float32", ())


def test_a_contract_that_declines_a_cell_declines_what_has_it() -> None:
    declined = declined_words(
        Contract(declines=("unused_later", "transposed")), own_backward=True, own_update=False
    )
    assert set(declined) == {"absent", "strided", "accumulate"}
    assert "its contract declines unused_later" in declined["absent"]
    assert declinable_words("generated:scale.absent-linear1.bias;accumulate=2") == {
        "absent",
        "accumulate",
    }
    assert declinable_words("cnn") == set()


@given(cases("allreduce", most_steps=4))
def test_every_shard_has_a_sample_for_every_backward_pass(case: Case) -> None:
    words = parse_model_words(case.workload.removeprefix(PREFIX))
    sizes = shard_sizes(case.steps, size=words.samples, batch=case.batch, world=case.world)
    assert min(map(min, sizes)) >= words.accumulate


@pytest.mark.parametrize("dtype", EXPLORED_DTYPES)
def test_several_backward_passes_are_drawn_in_every_dtype(dtype: str) -> None:
    others = [name for name in EXPLORED_DTYPES if name != dtype]
    drawn = find(cases("allreduce", without=others), lambda case: "accumulate" in case.workload)
    assert (drawn.dtype, drawn.world, drawn.batch, drawn.steps) == (dtype, 1, 2, 1)
    assert parse_model_words(drawn.workload.removeprefix(PREFIX)).accumulate == 2


@given(cases("allreduce", vary={"bucket": ["25", "1"]}))
def test_every_case_of_the_space_can_be_replayed(case: Case) -> None:
    assert check_case(case) == case
    assert dict(case.adaptation.arguments).keys() == {"bucket"}


@given(cases("allreduce", backend="simulated:tree"))
@settings(max_examples=30)
def test_every_case_of_a_simulated_space_can_be_replayed(case: Case) -> None:
    assert check_case(case) == case
    assert case.backend == "simulated:tree"
    assert not (case.schedules and (case.rerun or case.world == 1))
    assert (f"schedules={case.schedules}," in reproducing_program(case)) == bool(case.schedules)
    assert 'backend="simulated:tree",' in reproducing_program(case)


def test_schedules_are_drawn_in_simulated_worlds_only() -> None:
    def scheduled(case: Case) -> bool:
        return case.schedules > 0

    found = find(cases("allreduce", backend="simulated"), scheduled)
    assert (found.world, found.steps, found.schedules) == (2, 1, 8)
    for space in (cases("allreduce", backend="simulated", without=["turns"]), cases("allreduce")):
        with pytest.raises(NoSuchExample):
            find(space, scheduled, settings=settings(max_examples=200))


LEAVABLE = [
    "strided", "frozen", "late", "unequal", "adam", "accumulate", "norm", "absent", "nested",
    "groups", "schedule",
]  # fmt: skip


@given(st.sets(st.sampled_from(LEAVABLE)), st.data())
def test_what_is_to_be_left_out_is_left_out(without: set[str], data: st.DataObject) -> None:
    case = data.draw(cases("allreduce", without=without))
    assert not without & set(re.findall("[a-z]+", case.workload))
    assert not ("late" in without and case.delays)
    assert not ("unequal" in without and case.batch % case.world)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "'' is not a layer; kinds are linear, scale"),
        ("linear", "'linear': linear takes a size from 1 to 4096, for example linear3"),
        ("linear0", "linear takes a size from 1"),
        ("scale2", "'scale2': scale takes no size"),
        ("linear2.tide", "linear does not take 'tide'; it takes bias, frozen, strided, tied"),
        ("running.nested4", "running does not take 'nested4'; it takes nested1 to nested3"),
        ("scale.absent-scale.frozen", "every trainable layer is absent for half of the samples"),
        ("scale-norm", "there is at most one norm, and it must precede every other layer"),
        ("linear2-conv2", "a conv needs an image, so it must precede every linear layer"),
        ("conv1-conv1-conv1-conv1", "more than 3 convs reduce a 4x4 image to nothing"),
        ("scale.frozen-running", "no parameter is trainable"),
        ("scale;rmsprop", "'rmsprop' is not one of sgd, momentum, adam, groups, schedule, s"),
        ("scale;samples=0", "'samples=0' is not one of"),
        ("scale;accumulate=1", "'accumulate=1' is not one of"),
        ("scale;accumulate=5", "accumulate=N with N from 2 to 4"),
        ("scale;accumulate=", "'accumulate=' is not one of"),
        ("scale;accumulate=²", "'accumulate=²' is not one of"),
    ],
)
def test_words_that_describe_nothing_get_one_sentence(words: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_model_words(words)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("0.5m", 30)]
)
def test_a_budget(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


BAD = {
    ("--budget", "5"): "--budget 5 is not a duration; pass a number and s, m or h",
    ("--budget", "0s"): "--budget 0s is not a duration", ("--budget", "9999h"): "at most 168h",
    ("--max-cases", "0"): "--max-cases 0 is out of range; it takes 1 to",
    ("--world", "0"): "--world 0 is out of range; it takes 2 to 16",
    ("--world", "17"): "--world 17 is out of range", ("--steps", "0"): "--steps 0 is out of range",
    ("--seed", "-1"): "--seed -1 is out of range",
    ("--deadline", "0"): "--deadline 0.0 is out of range",
    ("--vary", "bucket"): "--vary 'bucket' is not of the form NAME=VALUE",
    ("--without", "bucket"): "--without bucket: unknown word; choose from",
    ("--backend", "mpi"): "--backend mpi is not supported by explore; pass gloo, simulated or",
    ("--backend", "simulated:heap"): "unknown order 'heap' of backend simulated",
    ("--loss", "sum"): "unknown loss contract --loss sum",
    ("--json", "/nowhere/x.json"): "--json /nowhere/x.json cannot be written",
}  # fmt: skip


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_bad_input_gets_one_sentence(words: tuple[str, str]) -> None:
    ran = CliRunner().invoke(root_command, ["explore", "--strategy", "allreduce", *words])
    assert isinstance(ran.exception, DistcheckError)
    assert BAD[words] in str(ran.exception)
    assert "\n" not in str(ran.exception)


MATRIX = """
[tool.distcheck]
strategies = ["allreduce", "mine.py:sync"]
loss = "mean"
[tool.distcheck.strategy."mine.py:sync"]
arg = { average = true }
as = "model"
"""


def test_a_matrix_is_searched_by_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the message says that comes where neither a strategy nor a matrix is given."""
    (tmp_path / "pyproject.toml").write_text(MATRIX)
    (tmp_path / "mine.py").write_text("def sync(model): pass")
    monkeypatch.chdir(tmp_path)
    made: list[tuple[str, float, Adaptation]] = []

    def explore(asked: dict[str, Any], strategy: str, budget_s: float, vary: object) -> ExitCode:
        made.append((strategy, budget_s, asked["adaptation"]))
        return codes.pop(0)

    monkeypatch.setattr(command, "_explore", explore)
    codes = [ExitCode.PASS, ExitCode.MISMATCH]
    ran = CliRunner().invoke(root_command, ["explore", "--budget", "90s"], standalone_mode=False)
    assert ran.return_value == 1
    own = Adaptation(form="model", arguments=(("average", "True"),))
    assert made == [("allreduce", 45.0, Adaptation()), ("mine.py:sync", 45.0, own)]
    made.clear()
    codes = [ExitCode.PASS]
    words = ["explore", "--strategy", "mine.py:sync", "--as", "wrapper"]
    CliRunner().invoke(root_command, words, standalone_mode=False)
    typed = msgspec.structs.replace(own, form="wrapper")
    assert made == [("mine.py:sync", 300.0, typed)], "what is typed is used in place of the key"
    ran = CliRunner().invoke(root_command, ["explore", "--json", "x.json"])
    assert "--json takes the findings of one strategy" in str(ran.exception)
    ran = CliRunner().invoke(
        root_command, ["explore", "--strategy", "ddp", "--accept", "quantized:8"]
    )
    assert "--accept quantized:8 is not supported by explore" in str(ran.exception)


class Fresh:
    """A runner in which every case fails, with causes by the number of ranks."""

    def __init__(self, causes: dict[int, list[tuple[str, str]]]) -> None:
        self.causes = causes

    def replay(self, case: Case, times: int) -> list[CaseReport]:
        found = self.causes.get(case.world)
        diagnosis = tuple(
            Diagnosis(cause=cause, evidence=evidence, suggestion="")
            for cause, evidence in found or ()
        )
        report = CaseReport(
            case=case, strategy_file="", verdict="pass" if found is None else "fail", outcomes=(),
            checks=(), diagnosis=diagnosis,
        )  # fmt: skip
        return [report] * times


@pytest.mark.parametrize(
    ("causes", "world"),
    [
        ({1: [("wrong-divisor", "")], 2: [("duplicated-rank", "")]}, 2),
        ({1: [("unexplained", "")], 2: [("unexplained", "")], 3: [("dropped-rank", "")]}, 3),
        ({1: [("wrong-divisor", "")], 2: [("wrong-divisor", "")], 3: [("missing-sync", "")]}, 1),
        ({1: [("wrong-divisor", "")], 2: [("missing-sync", f"{APART} noise")]}, 1),
        ({1: [("wrong-divisor", "")]}, 1),
    ],
)
def test_what_shrank_to_one_rank_is_shown_where_its_cause_has_a_name(
    causes: dict[int, list[tuple[str, str]]], world: int
) -> None:
    runner: Any = Fresh(causes)
    search = Search(runner=runner, space=st.nothing(), seed=0, until=0.0)
    alone = Case(id="", strategy="ddp", world=1, batch=3, workload="generated:scale", rerun=False)
    (report,) = runner.replay(alone, 1)
    search._conclude(report, "")
    assert search.finding is not None
    found = search.finding.report.case
    assert (found.world, found.batch) == (world, 3 * world)


@pytest.mark.parametrize(("worlds", "code"), [((1, 1), 5), ((1, 2), 0)])
def test_cases_of_one_rank_are_no_pass(worlds: tuple[int, ...], code: int) -> None:
    """A rank alone exchanges nothing: whatever the strategy does, it passes there."""
    runner: Any = SimpleNamespace(left_out={}, distrusts_kept="")
    search = Search(runner=runner, space=st.nothing(), seed=0, until=0.0)
    search.passed = [Case(id=str(w), strategy="s", world=w) for w in worlds]
    story = ExploreResult(
        strategy="s", seed=0, spent_s=1.0, search=search, earlier=0, unreadable=(),
        interrupted=False, kept_as=None,
    )  # fmt: skip
    assert story.exit_code == code
    assert ("unknown", ONE_RANK) in list(_lines(story)) or code == 0


def test_a_hang_that_repeats_is_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one run, the cases after a hang are left out: each replay is a run by itself."""

    def run_cases(cases: list[Case], pool: object) -> SimpleNamespace:
        first = documents.mismatch()
        found = [
            msgspec.structs.replace(first, case=case, verdict="unknown" if at else "fail")
            for at, case in enumerate(cases)
        ]
        return SimpleNamespace(cases=found)

    monkeypatch.setattr(running, "run_cases", run_cases)
    runner: Any = SimpleNamespace(_pool=None)
    replayed = running.Runner.replay(runner, documents.mismatch().case, 3)
    assert [report.verdict for report in replayed] == ["fail"] * 3


@pytest.mark.parametrize("width", [80, 100])
def test_the_screen_of_what_was_found(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner: Any = SimpleNamespace(left_out={}, distrusts_kept="")
    search = Search(runner=runner, space=st.nothing(), seed=0, until=0.0)
    search._verdicts = {str(number): documents.mismatch() for number in range(16)}
    search.finding, search.shrunk_in = Finding(documents.mismatch(), 3, 3), 4
    story = ExploreResult(
        strategy="mine.py:sync", seed=0, spent_s=7.2, search=search, earlier=1, unreadable=(),
        interrupted=False, kept_as=Path(".distcheck/explore/mine/case.json"),
    )  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    print_search(story, quiet=False)
    compare(f"explore-{width}.txt", capsys.readouterr().out)


def test_no_strategy_and_no_hypothesis_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = CliRunner().invoke(root_command, ["explore"])
    assert "no strategy was given; pass --strategy" in str(ran.exception)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = CliRunner().invoke(root_command, ["explore", "--strategy", "allreduce"])
    assert isinstance(ran.exception, CannotRunError)
    assert "pip install 'distcheck[explore]'" in str(ran.exception)


def test_found_cases_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = Case(
        id="allreduce-1", strategy="allreduce", world=2, workload="generated:scale", batch=2,
        rerun=False, delays=(Delay(rank=1, ms=5),),
    )  # fmt: skip
    kept = FailureDatabase("allreduce")
    path = kept.keep(case)
    assert path is not None
    (kept.folder / "older.json").write_text("{}")
    foreign = msgspec.structs.replace(case, id="came-with-a-folder")
    write_case(kept.folder / "foreign.json", foreign)
    assert kept.read() == [case]
    unreadable, not_own = sorted(kept.unreadable, key=lambda text: "own runs" in text)
    assert "older.json is not a case file" in unreadable
    assert "foreign.json is not a case of your own runs" in not_own
    assert FailureDatabase("ddp").read() == []


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

    exec(reproducing_program(case).partition("\n")[2], {"distcheck": Stand})
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
    monkeypatch.setattr("distcheck.training.delays.time.sleep", slept.append)
    late = RankDelays()
    late.begin([Delay(rank=0, ms=10), Delay(rank=0, collective=2, ms=20)])
    progress = late.watching(lambda step, phase: None)
    for step in range(2):
        progress(step, "forward")
        progress(step, "backward")
        for _ in range(3):
            late.enter_collective()
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


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_a_world_of_one_adds_nothing_whose_order_would_have_to_be_known(backend: str) -> None:
    own = torch.randn(5)
    contract = Contract(order=BackendAllReduce(), scale="divide-after")
    (found,) = expected_gradients(
        contract, backend, [[own]], weights=[1.0], step=0, ready_order=[0], like=[own]
    )
    assert found is not None
    assert torch.equal(found, own)


def test_every_word_that_can_be_left_out_is_known() -> None:
    assert len(set(DIMENSIONS)) == len(DIMENSIONS)
