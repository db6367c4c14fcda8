"""Losses that add several terms up: what is read off the graph, and what it says of their scale."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

from distcheck.job import causes, checks
from distcheck.job.checks import exchange, terms
from distcheck.job.checks.accumulation import accumulation
from distcheck.job.inside.batch_source import ALL, BatchSource
from distcheck.job.inside.merged_batch import MergedBatch
from distcheck.job.inside.terms import divisor_of_loss, ends_of, terms_of
from distcheck.job.settings import ReplayTask
from distcheck.recordings.jobs.records import LossCall, LossFactor, LossTerm
from tests.job.recordings import Facts, make, reference
from tests.job.test_examples import judge

Losses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _DDPSink(torch.autograd.Function):
    """What DistributedDataParallel puts the model's outputs through."""

    @staticmethod
    def forward(ctx: Any, about: Any, *inputs: Any) -> Any:  # type: ignore[override]
        return tuple(one.clone() for one in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *gradients)


def _adds_in_place(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a += 0.1 * b  # the tensor of the first loss has the whole loss now
    return a


def read(of: Losses) -> tuple[tuple[LossTerm, ...], str]:
    logits = torch.randn(4, 3, requires_grad=True)
    ce = F.cross_entropy(logits, torch.tensor([0, 1, 2, 0]))
    mse = F.mse_loss(logits, torch.zeros(4, 3))
    heard = [("ce", "mean", get_gradient_edge(ce), 4), ("mse", "mean", get_gradient_edge(mse), 4)]
    return terms_of(of(ce, mse, logits), heard)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (lambda a, b, x: a + 0.1 * b, [("ce", []), ("mse", [0.1])]),
        (lambda a, b, x: (a + 2 * b) / 4, [("ce", [0.25]), ("mse", [0.25, 2])]),
        (lambda a, b, x: a / 4 - torch.tensor(0.5) * b, [("ce", [0.25]), ("mse", [-1, 0.5])]),
        (lambda a, b, x: torch.stack([a, b]).mean() * 3, [("ce", [3, 0.5]), ("mse", [3, 0.5])]),
        (lambda a, b, x: -sum([a, b.view(1).squeeze()]).mean(), [("ce", [-1]), ("mse", [-1])]),  # type: ignore[attr-defined]
        (lambda a, b, x: torch.add(a, b, alpha=3) + 7, [("ce", []), ("mse", [3])]),
        (lambda a, b, x: a + 0 * x.sum(), [("ce", [])]),
        (lambda a, b, x: a + ((x**2) * 0.5 / 2).mean(), [("ce", []), ("a mean", [0.5, 0.5])]),
        (lambda a, b, x: a + (torch.tensor(2.0) / x).mean(), [("ce", []), ("a mean", [])]),
        (_adds_in_place, [("ce", []), ("mse", [0.1])]),
        (lambda a, b, x: 2 * _DDPSink.apply(None, a, b)[1], [("mse", [2])]),
    ],
)
def test_terms_are_read_off_the_graph(of: Losses, expected: list[tuple[str, list[float]]]) -> None:
    found, why = read(of)
    assert why == ""
    numbers = {term.name: sorted(one.number for one in term.factors) for term in found}
    assert numbers == {name: sorted(given) for name, given in expected}


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (lambda a, b, x: a * b, "it contains MulBackward0"),
        (lambda a, b, x: a + b.exp(), "it contains ExpBackward0"),
        (lambda a, b, x: a / b, "it contains DivBackward0"),
        (lambda a, b, x: torch.tensor(2.0) / a, "it contains DivBackward0"),
        (lambda a, b, x: a * float("inf"), "a number that is not finite"),
        (lambda a, b, x: sum(a for _ in range(40)), "it has more than 32 terms"),
        (lambda a, b, x: torch.tensor(1.0), "it has no graph"),
    ],
)
def test_it_is_said_why_a_loss_has_no_terms(of: Losses, why: str) -> None:
    found, said = read(of)
    assert found == ()
    assert why in said


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (lambda a, b, x: a, (4.0, "")),
        (lambda a, b, x: a * 4 * 2, (1.0, "times")),  # the samples, and two ranks
        (lambda a, b, x: b * 4, (3.0, "times")),  # of a mean over three numbers a sample
        (lambda a, b, x: (a + b) * 4, (0.0, "times")),
        (lambda a, b, x: a * 4 + b, (0.0, "")),
        (lambda a, b, x: a * 4.0, (4.0, "")),  # a weight
        (lambda a, b, x: x.square().sum() / 4, (4.0, "sum")),
    ],
)
def test_a_mean_times_its_samples_is_a_sum(of: Losses, expected: tuple[float, str]) -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    ce = F.cross_entropy(logits, torch.tensor([0, 1, 2, 0]))
    mse = F.mse_loss(logits, torch.zeros(4, 3))
    heard = [("ce", "mean", get_gradient_edge(ce), 4), ("mse", "mean", get_gradient_edge(mse), 12)]
    assert divisor_of_loss(of(ce, mse, logits), heard, 4) == expected


def _add(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss = a / 2 + 0.1 * b - x.mean()
    loss += 0.01 * x.square().sum()
    return loss


def _two(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss, other = a + b, b + b
    return sum([loss, 2 * other.detach(), x.mean()])  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (_add, ["a / 2", "0.1 * b", "x.mean()", "0.01 * x.square().sum()"]),
        (_two, ["", "", ""]),  # two additions in one line, and one by a function
    ],
)
def test_terms_have_the_text_of_their_source(of: Losses, expected: list[str]) -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    with torch.autograd.set_detect_anomaly(mode=True, check_nan=False):
        ce = F.cross_entropy(logits, torch.tensor([0, 1, 2, 0]))
        mse = F.mse_loss(logits, torch.zeros(4, 3))
        loss = of(ce, mse, logits)
    found, why = ends_of(
        loss, [("ce", "mean", get_gradient_edge(ce), 4), ("mse", "mean", get_gradient_edge(mse), 4)]
    )
    assert why == ""
    assert [end.text for _, end in found] == expected
    assert all("test_terms.py:" in end.place for _, end in found)
    weights = {_add: [0.5, 0.1, -1, 0.01], _two: [1, 1, 1]}[of]
    assert [end.weight for _, end in found] == pytest.approx(weights)


def test_a_term_without_a_gradient_is_a_warning(tmp_path: Path) -> None:
    """Its value is what the loss is more than its terms, at each step; a constant is none."""

    def adds(more: Callable[[Facts], float]) -> Callable[[Facts], None]:
        def change(facts: Facts) -> None:
            own = LossTerm(name="cross_entropy", reduction="mean", call=0)
            loss = 2.0 + more(facts)
            facts.passes = [facts.a_pass(0, loss=loss, terms=(own,))]

        return change

    for number, more in enumerate((0.1, 0.0, -2.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = make(folder, adds(lambda facts, more=more: more * (1 + facts.step * (more > 0))))
        found = [*causes.terms_without_gradient(job)]
        assert [one.cause for one in found] == ["term-without-gradient"] * (more > 0)
        assert all("cross_entropy plus a term without a gradient (0.1 at step 0" in one.evidence
                   for one in found)  # fmt: skip
    folder = tmp_path / "constant"
    folder.mkdir()
    assert [*causes.terms_without_gradient(make(folder, adds(lambda _: 0.5)))] == []


def test_numbers_that_a_script_has_computed_are_known_from_whole_ones() -> None:
    (one, other), _ = read(lambda a, b, x: (2 * a + 0.1 * b) / 4)
    assert [(f.computed, f.outer) for f in one.factors] == [(True, True), (False, False)]
    assert [(f.computed, f.outer) for f in other.factors] == [(True, True), (True, False)]
    assert [f.divides for f in (*one.factors, *other.factors)] == [True, False, True, False]


# -- what they say of the scale ------------------------------------------------------------------


def term(name: str, *numbers: float, computed: bool = True, **about: Any) -> LossTerm:
    by = about.pop("divides", True)
    factors = tuple(
        LossFactor(number=abs(n), computed=computed, outer=n < 0, divides=by) for n in numbers
    )
    return LossTerm(name=name, factors=factors, **{"reduction": "mean", "call": 0, **about})


def whole(name: str, number: float) -> LossTerm:
    return term(name, number, computed=False)


def passes_with(*found: LossTerm, count: int = 4, **about: Any) -> Callable[[Facts], None]:
    """A negative number stands for a factor of the whole loss."""

    def change(facts: Facts) -> None:
        facts.passes = [facts.a_pass(i, losses=(), terms=found, **about) for i in range(count)]

    return change


@pytest.mark.parametrize(
    "found",
    [
        (term("ce", -1 / 4), term("aux", -1 / 4, 0.1)),
        (term("ce", -1 / 4, 0.75), term("aux", -1 / 4, 0.25)),  # the weights add up to 1
        (term("ce", -1 / 4), term("aux", -1 / 4, 0.25)),  # a weight that looks like a division
        (term("ce", 1 / 4), term("aux", 1 / 4), term("l2", 1 / 4, 1e-4, reduction="sum", call=-1)),
        (term("ce", -1 / 4, -1 / 4, -4.0), term("aux", -1 / 4, -1 / 4, -4.0)),
    ],
)
def test_a_right_loss_of_several_terms_passes(found: tuple[LossTerm, ...], tmp_path: Path) -> None:
    job = make(tmp_path, passes_with(*found))
    result = exchange.loss_scale(job, job.steps)
    assert result is not None
    assert (result.verdict, result.compared.elements) == ("pass", 2 * 3 * 4)


def weighted(number: float, divided: float) -> LossTerm:
    """As of `number * ce / passes`."""
    (weight,) = term("ce", -number, divides=False).factors
    (division,) = term("ce", -divided).factors
    return LossTerm(name="ce", reduction="mean", call=0, factors=(weight, division))


@pytest.mark.parametrize("number", [1 / 4, 4.0])
def test_a_weight_equal_to_the_pass_count_is_no_mistake(number: float, tmp_path: Path) -> None:
    """Multiplied by it, and divided by the passes: two divisions would give the same loss."""
    call = LossCall(name="cross_entropy", reduction="mean", counted=4, value=2.0, target="")

    def change(facts: Facts) -> None:
        about = {"loss": 2.0 * number / 4, "losses": (call,), "terms": (weighted(number, 1 / 4),)}
        facts.passes = [facts.a_pass(i, **about) for i in range(4)]

    job = make(tmp_path, change)
    result = exchange.loss_scale(job, job.steps)
    assert result is not None
    assert result.verdict == "unknown"
    assert (
        f"because of the weight {number:.6g} in the loss, or because of the number of passes"
        in result.reason
    )


@pytest.mark.parametrize(
    ("found", "cause", "said"),
    [
        ((term("ce", 1 / 4), term("aux")), "accumulation-not-scaled",
         "ce is divided by the 4 gradient accumulation steps, but aux is not"),
        ((term("ce", 1 / 4), whole("aux", 2.0)), "accumulation-not-scaled",
         "ce is divided by the 4 gradient accumulation steps, but aux is not"),
        ((term("ce"), term("aux", 0.1)), "accumulation-not-scaled",
         "not divided by the 4 gradient accumulation steps, so gradients are 4x too large"),
        ((term("ce", 0.9), term("aux", 0.1)), "accumulation-not-scaled",
         "the loss is not divided by the 4 gradient accumulation steps"),
        ((term("ce", -1 / 4, -1 / 4), term("aux", -1 / 4, -1 / 4, 0.1)),
         "accumulation-scaled-twice",
         "the loss is divided twice by the 4 gradient accumulation steps"),
    ],
)  # fmt: skip
def test_undivided_terms(
    found: tuple[LossTerm, ...], cause: str, said: str, tmp_path: Path
) -> None:
    job = make(tmp_path, passes_with(*found))
    results = [r for r in checks.checks_without_reference(job) if r.compared.elements]
    assert [r.check for r in results if r.verdict == "fail"] == ["loss scale"]
    (named,) = causes.diagnose(job, results)
    assert named.cause == cause
    assert said in named.evidence


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ((term("ce", 1 / 4), term("aux", 0.1)),
         "aux is not, unless the division is in its weight 0.1"),
        ((term("ce", 0.4), term("aux", 0.1)), "none of its terms is divided by the number"),
        ((term("ce", 1 / 4, 1 / 4), term("aux", 1 / 4, 1 / 4)),
         "by the number of backward passes twice"),
        ((term("ce", 1 / 4), term("l2", reduction="sum", call=-1)),
         "unless the division is within the term"),
    ],
)  # fmt: skip
def test_an_unknown_scale_has_a_reason(
    found: tuple[LossTerm, ...], why: str, tmp_path: Path
) -> None:
    job = make(tmp_path, passes_with(*found))
    result = exchange.loss_scale(job, job.steps)
    assert result is not None
    assert result.compared.elements == 0
    assert why in result.reason


def test_terms_that_change_from_pass_to_pass_are_not_judged(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        passes_with(term("ce", 1 / 2), count=1)(facts)
        facts.passes += [facts.a_pass(1, losses=(), terms=(term("ce", 1 / 2), term("kl")))]

    job = make(tmp_path, change)
    assert (
        terms.judge_loss_weight(job, 0, 0).why
        == "the weights of its terms change from one backward pass to the next"
    )


def test_the_scale_of_a_scaler_is_left_out(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        passes_with(term("ce", -64.0, -1 / 4), term("aux", -64.0, -1 / 4, 0.1))(facts)
        facts.scale = 64.0

    assert terms.judge_loss_weight(make(tmp_path, change), 0, 0) == terms.LossWeight()


def test_a_last_step_with_fewer_passes_is_divided_as_the_others(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        count = 2 if facts.step == 2 else 4
        passes_with(term("ce", 1 / 4), term("aux", 1 / 4, 0.1), count=count)(facts)

    job = make(tmp_path, change)
    result = exchange.loss_scale(job, job.steps)
    assert result is not None
    assert result.verdict == "pass"


@pytest.mark.parametrize(("divides", "verdict"), [(True, "pass"), (False, "fail")])
def test_terms_may_be_divided_at_the_end(divides: bool, verdict: str, tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        passes_with(term("ce"), term("aux", 0.1))(facts)
        if divides:
            facts.raw = {name: gradient / 4 for name, gradient in facts.raw.items()}

    results = {r.check: r for r in checks.checks_without_reference(make(tmp_path, change))}
    assert results["loss scale"].verdict == verdict
    assert results["gradients"].verdict == "pass"


def a_sum(*numbers: float, divides: bool = True) -> LossTerm:
    return term("a sum", *numbers, reduction="sum", call=-1, divides=divides)


@pytest.mark.parametrize(
    ("divisors", "expected"),
    [
        ([8, 8, 8], ("pass", "")),  # the samples of both passes
        ([16, 16, 16], ("pass", "")),  # of all ranks: the reference compares that
        ([4, 4, 4], ("fail", "not divided by the 2 gradient accumulation steps")),
        ([37, 52, 41], ("pass", "")),  # a number of targets of the step
        ([37, 37, 37], ("unknown", "none of its terms is divided by the number")),
    ],
)
def test_a_sum_is_divided_by_samples_or_by_a_number_of_the_step(
    divisors: list[float], expected: tuple[str, str], tmp_path: Path
) -> None:
    def change(facts: Facts) -> None:
        passes_with(a_sum(1 / divisors[facts.step]), count=2)(facts)

    job = make(tmp_path, change)
    result = exchange.loss_scale(job, job.steps)
    assert result is not None
    has_compared = result.compared.elements > 0
    assert (result.verdict if has_compared else "unknown") == expected[0]
    assert expected[1] in result.reason + result.first_reason


@pytest.mark.parametrize(
    ("divisors", "passes", "why"),
    [
        ([37, 52, 41], 2, "by a number of the whole step, and by the number of passes"),
        ([4, 4, 4], 4, "by the number of samples of a pass, which is also the number of passes"),
    ],
)
def test_a_sum_with_a_divisor_of_two_meanings_is_not_judged(
    divisors: list[float], passes: int, why: str, tmp_path: Path
) -> None:
    def change(facts: Facts) -> None:
        also = () if passes == 4 else (1 / 2,)
        passes_with(a_sum(1 / divisors[facts.step], *also), count=passes)(facts)

    assert why in terms.judge_loss_weight(make(tmp_path, change), 0, 0).why


@pytest.mark.parametrize(
    ("also", "verdict"), [((0.5,), "pass"), ((), "fail"), ((0.25,), "unknown")]
)
def test_a_sum_with_a_divisor_of_each_pass_is_a_mean(
    also: tuple[float, ...], verdict: str, tmp_path: Path
) -> None:
    def change(facts: Facts) -> None:
        facts.passes = [
            facts.a_pass(n, losses=(), terms=(a_sum(1 / (37 + 5 * n + facts.step), *also),))
            for n in range(2)
        ]

    job = make(tmp_path, change)
    result = exchange.loss_scale(job, job.steps)
    assert result is not None
    assert (result.verdict if result.compared.elements else "unknown") == verdict
    passes = [one for record in job.at(0) for one in record.trained]
    assert terms.own_divisors(passes) == pytest.approx([37, 42, 37, 42])


def tasks(weights: list[float], count: int, *, of_torch: bool = True) -> Callable[[Facts], None]:
    """Passes of two tasks over the same samples, in `count` micro-batches."""

    def change(facts: Facts) -> None:
        facts.passes = []
        for number in range(count):
            for task, weight in enumerate(weights):
                call = LossCall(
                    name="mse_loss", reduction="mean", counted=4, value=2.0 + task, target="y"
                )
                own = term("a mean", weight, call=-1)
                of = {"losses": (call,)} if of_torch else {"losses": (), "terms": (own,)}
                about = {"loss": weight * (2.0 + task), **of}
                rows = (*facts.rows, f"{number}")
                facts.passes.append(facts.a_pass(number, rows=rows, **about))

    return change


@pytest.mark.parametrize(
    ("weights", "count", "verdict", "of_torch"),
    [
        ([1.0, 1.0], 1, None, True),  # nothing accumulates
        ([1.0, 0.02], 1, None, False),
        ([0.5, 0.5], 2, "pass", True),
        ([0.5, 0.5], 2, "pass", False),
        ([0.25, 0.25], 2, "pass", True),  # also the mean of the tasks
        ([1.0, 1.0], 3, "fail", True),
        ([1.0, 1.0], 3, "fail", False),
        ([1 / 9, 1 / 9], 3, "fail", True),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_each_of_several_losses_is_judged_by_itself(
    weights: list[float], count: int, verdict: str | None, of_torch: bool, world: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    job = make(tmp_path, tasks(weights, count, of_torch=of_torch), world=world)
    result = exchange.loss_scale(job, job.steps)
    assert (None if result is None else result.verdict) == verdict
    assert result is None or result.compared.elements == 2 * count * world * 3


def test_losses_that_differ_in_number_are_not_judged(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        tasks([1.0, 1.0], 2)(facts)
        facts.passes.pop()

    job = make(tmp_path, change)
    result = exchange.loss_scale(job, job.steps)
    assert result is not None
    assert (result.compared.elements, "not equally many of each" in result.reason) == (0, True)


def test_passes_over_a_whole_batch_have_the_same_samples(tmp_path: Path) -> None:
    """As of a GAN's discriminator, whose second pass has other inputs."""

    def change(facts: Facts) -> None:
        tasks([1.0, 1.0], 1)(facts)
        fakes = tuple(f"fake {row}" for row in facts.rows)
        facts.passes[1] = msgspec.structs.replace(facts.passes[1], rows=fakes)

    job = make(tmp_path, change)
    assert exchange.loss_scale(job, job.steps) is None


def with_constant_targets(rows: Callable[[int], tuple[str, ...]]) -> Callable[[Facts], None]:
    """Return a second pass, on samples that no loader made, with the same targets at every step."""

    def change(facts: Facts) -> None:
        tasks([1.0, 1.0], 1)(facts)
        one, other = facts.passes
        call = msgspec.structs.replace(other.losses[0], target="zeros")
        facts.passes[0] = msgspec.structs.replace(one, batches=())
        facts.passes[1] = msgspec.structs.replace(
            other, batches=(), rows=rows(facts.step), losses=(call,)
        )

    return change


@pytest.mark.parametrize("rows", [lambda step: (f"{step}-a", f"{step}-b"), lambda step: ()])
def test_passes_with_constant_targets_do_not_accumulate(rows: Any, tmp_path: Path) -> None:
    """As of a GAN."""
    job = make(tmp_path, with_constant_targets(rows))
    assert exchange.loss_scale(job, job.steps) is None


def test_constant_targets_of_one_optimizer(tmp_path: Path) -> None:
    """The generator's steps do not have the labels of fakes."""

    def change(facts: Facts) -> None:
        facts.of_record = {"number": facts.step % 2}
        if facts.step % 2 == 0:
            with_constant_targets(lambda step: (f"{step}-a", f"{step}-b"))(facts)

    job = make(tmp_path, change, steps=4)
    assert exchange.loss_scale(job, job.steps) is None


def test_the_same_batch_at_every_step_accumulates(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        with_constant_targets(lambda step: ("a", "b"))(facts)
        facts.passes[0] = msgspec.structs.replace(facts.passes[0], rows=("c", "d"))

    job = make(tmp_path, change)
    result = exchange.loss_scale(job, job.steps)
    assert result is not None
    assert result.verdict == "fail"


# -- next to one batch ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folded", "verdict", "named"),
    [
        (lambda s: (4.0, 0.0), "pass", []),
        (lambda s: (1.0, 0.0), "pass", []),  # divided later: its scale is another check's
        (lambda s: (4.0, 1e-4), "fail", ["unexplained"]),
    ],
)
def test_direction_with_terms(folded: Any, verdict: str, named: list[str], tmp_path: Path) -> None:
    job = make(tmp_path, passes_with(term("ce", 1 / 4), term("aux", 1 / 4, 0.1)))
    alone = reference(job, tmp_path, folded=folded, kind="terms")
    (result,) = accumulation(job, alone)
    assert result.verdict == verdict
    assert [d.cause for d in causes.diagnose(job, [result], alone)] == named


def folding_of(found: tuple[LossTerm, ...], folder: Path) -> MergedBatch:
    def micro_batches(facts: Facts) -> None:
        passes_with(*found, count=2)(facts)
        last = msgspec.structs.replace(facts.passes[1], rows=(*facts.rows[1:], "of the last"))
        facts.passes[1] = last

    job = make(folder, micro_batches)
    return MergedBatch(job, BatchSource(job))


def test_a_copy_leaves_the_gradients_of_the_terms(tmp_path: Path) -> None:
    merged_batch = folding_of((term("ce", 1 / 2), term("mse", 1 / 2, 0.1)), tmp_path)
    model, inputs = torch.nn.Linear(3, 2), torch.randn(4, 3)
    parameters = dict(model.named_parameters())
    probe = ReplayTask(ALL, 0, 0, ((0, 0), (1, 0)))
    merged_batch._probes = [probe]
    ce = F.cross_entropy(model(inputs), torch.tensor([0, 1, 0, 1]))
    mse = F.mse_loss(model(inputs), torch.zeros(4, 2))
    merged_batch.heard(("ce", "mean", get_gradient_edge(ce), 4))
    merged_batch.heard(("mse", "mean", get_gradient_edge(mse), 4))
    loss = (ce + 0.1 * mse + 1e-3 * model.weight.square().sum()) / 2
    left = merged_batch.take(probe, loss, parameters)
    assert left["weights"].tolist() == pytest.approx([0.5, 0.05, 0.0005])
    for number, value in enumerate((ce, mse, model.weight.square().sum())):
        expected = torch.autograd.grad(value, model.weight, retain_graph=True)[0]
        assert torch.equal(left[f"term/{number}/weight"], expected)
    whole_loss = torch.autograd.grad(loss, model.weight, retain_graph=True)[0]
    assert torch.equal(left["weight"], whole_loss)
    other = merged_batch.take(ReplayTask(ALL, 0, 1, ((0, 0), (1, 0))), loss, parameters)
    assert not [name for name in other if name.startswith("term/")]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ({}, ""),
        ({"weights": [0.5, 0.06]}, "differ in a larger batch"),
        ({"weights": [0.5]}, "differ in a larger batch"),
        ({"part": 1.1}, "its term mse is not the mean over its micro-batches in a larger batch"),
    ],
)
def test_terms_that_interact_are_seen_and_not_judged(
    harm: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchSource, "inputs", lambda *_: [torch.zeros(1)])
    own = {"call": -1}
    merged_batch = folding_of((term("ce", 1 / 2, **own), term("mse", 1 / 2, 0.1, **own)), tmp_path)
    tasks = merged_batch.tasks(0, 2)
    weights = torch.tensor(harm.get("weights", [0.25, 0.025]), dtype=torch.float64)

    def wrote() -> dict[str, torch.Tensor]:
        found = {name: torch.ones(2) for name in ("weight", "term/0/weight", "term/1/weight")}
        return {**found, "kind": torch.tensor(3.0), "weights": weights}

    found: dict[ReplayTask, Any] = {task: wrote() for task in tasks}
    found[tasks[3]]["term/1/weight"] *= harm.get("part", 1.0)
    left = merged_batch.results(found, 0)
    assert why in merged_batch.why
    assert bool(merged_batch.why) == bool(why)
    assert sorted(left) == ([] if why else ["folded/weight", "spread-folded/weight"])


# -- whole jobs ----------------------------------------------------------------------------------

SCRIPT = """
import torch, torch.distributed as dist
import torch.nn as nn, torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return self.head(hidden), self.aux(hidden)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, passes = dist.get_rank(), 3
for step in range(6):
    for number in range(passes):
        drawn = torch.Generator().manual_seed(100 * step + 10 * number + rank)
        inputs = torch.randn(4, 6, generator=drawn)
        labels = torch.randint(0, 3, (4,), generator=drawn)
        places = torch.randn(4, 2, generator=drawn)
        model.require_backward_grad_sync = number == passes - 1
        logits, seen = model(inputs)
        ce, aux = F.cross_entropy(logits, labels), F.mse_loss(seen, places)
        loss = {loss}
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
Z_LOSS = "1e-2 * logits.logsumexp(-1).square().mean()"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (f"(ce + 0.1 * aux + {Z_LOSS}) / passes", (0, "pass", [])),
        ("ce / passes + aux", (1, "fail", ["accumulation-not-scaled"])),
        ("ce / passes + 0.1 * aux", (5, "unknown", [])),
        ("(ce + 0.1 * aux.sqrt()) / passes", (5, "unknown", [])),
    ],
)
def test_several_terms_job(loss: str, expected: tuple[int, str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("{loss}", loss))
    code, case = judge(tmp_path / "train.py", tmp_path)
    assert (code, case["verdict"], [d["cause"] for d in case["diagnosis"]]) == expected
    if code == 0:
        compared = {c["check"]: c.get("compared", {}).get("elements", 0) for c in case["checks"]}
        assert compared["accumulation"] > 0
        assert compared["loss scale"] > 0
