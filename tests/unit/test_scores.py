"""Files of log-probabilities: correct engines pass, mistakes are named or listed, and damaged files
are refused.

A is always scored by `distcheck.scores` with its noise floor; B by the code of `tests/scored.py`,
as an engine would, or by `distcheck.scores` if the mistake is one that it finds itself.
"""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import distcheck
from distcheck.cli import root_command
from distcheck.compare import scores as comparing
from distcheck.compare.records import CaseComparison
from distcheck.errors import DistcheckError, UsageError
from distcheck.recordings.scores import read_scores
from tests import scored as S
from tests.scored import STYLES, Logprobs, Model, nucleus, scored

STEP = 7


class Engines:
    """A model, its sequences, and file A."""

    def __init__(self, style: str, folder: Path) -> None:
        self.style, self.folder = style, folder
        self.model = S.model_of(style)
        self.sequences = S.sampled(self.model)
        self.right = scored(self.model, self.sequences)
        self.file = folder / f"{style}.safetensors"
        distcheck.scores(self.file, self.sequences, self.model, step=STEP)

    def changed(self, change: Callable[[Any], Any]) -> Model:
        """A copy of the model after a change."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            change(model)
        return model

    def compared(self, *, to: Path | None = None, **given: Any) -> CaseComparison:
        """A comparison of A with a file of these scores."""
        given.setdefault("draws", 1)
        other = self.folder / "B.safetensors"
        distcheck.scores(other, given.pop("sequences", self.sequences), **given)
        return comparing.compare_scores(to or self.file, other, bits=False)[0]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def all_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engines]:
    folder = tmp_path_factory.mktemp("scores")
    return {style: Engines(style, folder) for style in STYLES}


@pytest.fixture(params=STYLES)
def engines(request: pytest.FixtureRequest, all_engines: dict[str, Engines]) -> Engines:
    return all_engines[request.param]


@pytest.fixture
def llama(all_engines: dict[str, Engines]) -> Engines:
    return all_engines["llama"]


# -- correct pairs ---------------------------------------------------------------------------------


def other_kernel(model: Model) -> None:
    for layer in model.layers:
        layer.kernel = "sdpa"


class InThirds(nn.Module):
    """A linear layer in three matrix products."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.whole.bias
        biases = [None] * 3 if bias is None else bias.chunk(3)
        pairs = zip(self.whole.weight.chunk(3), biases, strict=True)
        return torch.cat([nn.functional.linear(x, weight, one) for weight, one in pairs], -1)


def unfused(model: Model) -> None:
    for layer in model.layers:
        layer.qkv = InThirds(layer.qkv)


@torch.no_grad()
def in_one_batch(model: nn.Module, given: Logprobs) -> Logprobs:
    most = max(map(len, given))
    ids = torch.stack(
        [torch.cat([one, torch.zeros(most - len(one), dtype=torch.int64)]) for one in given]
    )
    logp = torch.log_softmax(model(ids), -1)
    return [logp[i, : len(q) - 1].gather(-1, q[1:, None])[:, 0] for i, q in enumerate(given)]


@torch.no_grad()
def by_logsumexp(model: nn.Module, given: Logprobs) -> Logprobs:
    found = []
    for ids in given:
        logits = model(ids[None])[0, :-1]
        found.append(logits.gather(-1, ids[1:, None])[:, 0] - logits.logsumexp(-1))
    return found


@torch.no_grad()
def token_by_token(model: nn.Module, given: Logprobs) -> Logprobs:
    """As in generation: each token from its own prefix."""
    return [
        torch.stack(
            [torch.log_softmax(model(q[None, :n])[0, -1], -1)[q[n]] for n in range(1, len(q))]
        )
        for q in given
    ]


def transposed(model: Model) -> None:
    """Another memory layout of the weights, and therefore other kernels."""
    for layer in model.layers:
        layer.qkv.weight = nn.Parameter(layer.qkv.weight.t().contiguous().t())
        layer.up.weight = nn.Parameter(layer.up.weight.t().contiguous().t())


RIGHT: dict[str, Callable[[Engines], Logprobs]] = {
    "the same": lambda e: e.right,
    "another batch size": lambda e: in_one_batch(e.model, e.sequences),
    "left padding": lambda e: scored(e.model, e.sequences, left=9),
    "another attention kernel": lambda e: scored(e.changed(other_kernel), e.sequences),
    "other matrix products": lambda e: scored(e.changed(unfused), e.sequences),
    "float64": lambda e: scored(copy.deepcopy(e.model).double(), e.sequences),
    "logsumexp": lambda e: by_logsumexp(e.model, e.sequences),
    "token by token": lambda e: token_by_token(e.model, e.sequences),
    "another memory layout": lambda e: scored(e.changed(transposed), e.sequences),
    "logits in float64": lambda e: scored(e.model, e.sequences, of=lambda x: x.double()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_engine_passes(name: str, engines: Engines) -> None:
    found = engines.compared(logprobs=RIGHT[name](engines))
    assert (found.verdict, found.diagnosis) == ("pass", ()), found.reason
    assert found.scores is not None
    assert found.scores.mean < 0.9 * found.scores.noise_floor  # as the docstring says


def test_another_order_of_sequences_passes(engines: Engines) -> None:
    found = engines.compared(sequences=engines.sequences[::-1], logprobs=engines.right[::-1])
    assert found.verdict == "pass"
    assert found.bits == "same" or found.scores.mean < found.scores.noise_floor


def test_distcheck_scores_on_both_sides_passes(engines: Engines) -> None:
    given = {"model": engines.model, "batch": 2, "padding": "left"}
    assert engines.compared(sequences=engines.sequences[::-1], **given).verdict == "pass"


def test_lower_precision_on_both_sides_is_rounding_or_undecided(engines: Engines) -> None:
    low = copy.deepcopy(engines.model).bfloat16()
    own = engines.folder / "low.safetensors"
    distcheck.scores(own, engines.sequences, low)
    other_kernel(low)
    found = engines.compared(to=own, logprobs=scored(low, engines.sequences), dtype="bfloat16")
    assert found.verdict == "unknown"  # this floor hides a wrong temperature
    assert "hides a temperature error of 10%" in found.reason
    assert found.scores.mean < found.scores.noise_floor
    assert "float32 detects more" in found.scores.not_detected[-1]


@pytest.mark.sweep
def test_a_compiled_model_passes(engines: Engines) -> None:
    compiled = torch.compile(copy.deepcopy(engines.model), dynamic=True)
    assert engines.compared(logprobs=scored(compiled, engines.sequences)).verdict == "pass"
    assert engines.compared(model=compiled).verdict == "pass"


# -- mistakes --------------------------------------------------------------------------------------


def quantized(model: Model) -> None:
    weight = model.layers[0].qkv.weight
    scale = weight.abs().max() / 127
    weight.copy_((weight / scale).round() * scale)


def with_adapter(model: Model) -> None:
    weight, generator = model.layers[0].qkv.weight, torch.Generator().manual_seed(4)
    one = torch.randn(len(weight), 2, generator=generator) @ torch.randn(
        2, S.WIDTH, generator=generator
    )
    weight += one / one.norm() * weight.norm() * 0.02


def updated(by: float) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for number, parameter in enumerate(model.parameters()):
            signs = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter += by * signs.sign()

    return change


class Attends(nn.Module):
    """Attends to padding, and counts it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any, attention_mask: Any, position_ids: Any) -> torch.Tensor:
        return self.model(ids)


class MixesTheBatch(Attends):
    """Scales by the largest output of the whole batch, relative to that of the sequence."""

    def forward(self, ids: Any, attention_mask: Any, position_ids: Any) -> torch.Tensor:
        logits = self.model(ids, attention_mask, position_ids)
        own = logits.abs().amax((1, 2), keepdim=True)
        return logits * (own / own.max())


class Drops(Attends):
    """Has dropout in eval mode as well."""

    def forward(self, ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        return nn.functional.dropout(self.model(ids, attention_mask, position_ids), 0.1)


def plus_one_from(n: int) -> Callable[[int], torch.Tensor]:
    return lambda length: torch.arange(length) + (torch.arange(length) >= n).long()


def wrong(e: Engines, change: Callable[[Any], Any], *, scores: bool) -> dict[str, Any]:
    model = e.changed(change)
    return {"model": model} if scores else {"logprobs": scored(model, e.sequences)}


WRONG: dict[str, tuple[Callable[[Engines], dict[str, Any]], str, str]] = {
    "shifted by one": (
        lambda e: {"logprobs": [one.roll(1) for one in e.right]}, "scores-shifted", "by +1 token",
    ),
    "shifted the other way": (
        lambda e: {"logprobs": [one.roll(-1) for one in e.right]}, "scores-shifted", "by -1 token",
    ),
    "temperature": (
        lambda e: {"logprobs": scored(e.model, e.sequences, temperature=0.7)},
        "scores-temperature", "at temperature 0.7",
    ),
    "scale": (
        lambda e: {"logprobs": scored(e.model, e.sequences, of=lambda x: 2 * x)},
        "scores-temperature", "at temperature 0.5",
    ),
    "another temperature": (
        lambda e: {"logprobs": scored(e.model, e.sequences, temperature=0.83)},
        "unexplained", "a temperature or scale (near temperature 0.8)",
    ),
    "top-p": (
        lambda e: {"logprobs": scored(e.model, e.sequences, of=lambda x: nucleus(x, 0.9))},
        "scores-renormalized", "top-p 0.9",
    ),
    "another top-p": (
        lambda e: {"logprobs": scored(e.model, e.sequences, of=lambda x: nucleus(x, 0.93))},
        "unexplained", "all differences have the same sign",
    ),
    "stale weights": (
        lambda e: {**wrong(e, updated(1e-5), scores=False), "step": STEP - 1},
        "stale-weights", "steps 7 and 6",
    ),
    "stale weights without a step": (
        lambda e: wrong(e, updated(1e-5), scores=False), "unexplained", "stale weights",
    ),
    "all parameters": (lambda e: wrong(e, updated(1e-5), scores=True), "weights-differ", "more"),
    "quantized layer": (
        lambda e: wrong(e, quantized, scores=True), "weights-differ", "layers.0.qkv.weight",
    ),
    "quantized layer of an engine": (
        lambda e: wrong(e, quantized, scores=False), "unexplained", "a quantized layer",
    ),
    "adapter not merged": (
        lambda e: wrong(e, with_adapter, scores=True), "weights-differ", "layers.0.qkv.weight",
    ),
    "adapter not merged in an engine": (
        lambda e: wrong(e, with_adapter, scores=False), "unexplained", "a LoRA adapter",
    ),
    "padding attended": (
        lambda e: {"model": Attends(e.model), "padding": "left"},
        "scores-depend-on-padding", "with padding on the other side",
    ),
    "padding attended in an engine": (
        lambda e: {
            "logprobs": [
                scored(e.model, [q], left=60 - len(q), is_masked=False)[0] for q in e.sequences
            ]
        },
        "unexplained", "only the longest sequences agree",
    ),
    "another dtype": (
        lambda e: {"logprobs": scored(copy.deepcopy(e.model).bfloat16(), e.sequences,
                                      of=lambda x: x.float()), "dtype": "bfloat16"},
        "scores-low-precision", "is of bfloat16",
    ),
    "rounded": (
        lambda e: {"logprobs": [one.half() for one in e.right]}, "scores-low-precision", "float16",
    ),
    "positions": (
        lambda e: {"logprobs": scored(e.model, e.sequences, positions=plus_one_from(24))},
        "scores-differ-by-position", "from 2",
    ),
    "dropout": (lambda e: {"model": Drops(e.model)}, "scores-not-repeatable", "computed again"),
    "dropout in an engine": (
        lambda e: {name: scored(Drops(e.model), e.sequences) for name in
                   ("logprobs", "again")},
        "scores-not-repeatable", "computed again",
    ),
    "batch": (
        lambda e: {"model": MixesTheBatch(e.model)}, "scores-depend-on-batch", "another batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_or_listed(name: str, engines: Engines) -> None:
    make, cause, evidence = WRONG[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = engines.compared(**make(engines))
    assert found.verdict == "fail", found.reason
    assert [one.cause for one in found.diagnosis] == [cause], found.diagnosis
    assert evidence in found.diagnosis[0].evidence
    assert found.scores is not None
    assert found.scores.first is not None
    assert found.scores.mean > 40 * found.scores.noise_floor


def test_the_same_weights_exclude_mistakes_in_them(llama: Engines) -> None:
    found = llama.compared(model=llama.model, forward=lambda ids: 1.001 * llama.model(ids))
    assert [one.cause for one in found.diagnosis] == ["unexplained"]
    said = found.diagnosis[0].evidence
    assert "temperature" in said
    assert "padding" in said  # `forward` takes no mask
    assert not any(word in said for word in ("weights", "LoRA", "quantized", "dtype", "dropout"))


def test_a_single_wrong_token_is_not_decided(llama: Engines) -> None:
    logprobs = [one.clone() for one in llama.right]
    logprobs[3][10] -= 1e-4
    found = llama.compared(logprobs=logprobs)
    assert found.verdict == "unknown"
    assert "1 of 287 tokens is beyond" in found.reason
    assert (found.scores.first.sequence, found.scores.first.position) == (3, 11)
    assert found.scores.worst[0] == found.scores.first


def test_one_wrong_sequence_is_not_decided(llama: Engines) -> None:
    """The routing of a mixture of experts may flip at one token, which changes those after it."""
    logprobs = [one.clone() for one in llama.right]
    logprobs[1][20:] -= 0.01
    found = llama.compared(logprobs=logprobs)
    assert found.verdict == "unknown"
    assert "20 of 287 tokens are beyond the bound, in 1 of 6 sequences" in found.reason
    logprobs[4][20:] -= 0.01
    assert llama.compared(logprobs=logprobs).verdict == "fail"


def test_a_mean_between_rounding_and_a_mistake_is_not_decided(llama: Engines) -> None:
    floor = read_scores(llama.file).floor.float().split([len(one) for one in llama.right])
    far = [one - 4 * by for one, by in zip(llama.right, floor, strict=True)]
    found = llama.compared(logprobs=[one.clamp_max(0) for one in far])
    assert found.verdict == "unknown"
    assert "between 2x the noise floor" in found.reason


def test_a_file_that_depends_on_its_padding_is_never_a_pass(llama: Engines) -> None:
    found = llama.compared(model=Attends(llama.model))  # padded at the right, which is harmless
    assert found.verdict == "unknown"
    assert "change with the side of the padding" in found.reason


def test_different_weights_are_never_a_pass(llama: Engines) -> None:
    """Even if the noise floor, as that of bfloat16, is wider than their effect."""
    found = llama.compared(logprobs=llama.right, step=STEP - 1)
    assert found.verdict == "unknown"
    assert "agree within the noise floor, but the files are of steps 7 and 6" in found.reason
    found = llama.compared(model=llama.changed(updated(1e-9)))
    assert found.verdict == "unknown"
    assert "parameters differ" in found.reason
    assert llama.compared(logprobs=llama.right, step=STEP).verdict == "pass"


def test_without_a_noise_floor_nothing_is_judged(llama: Engines) -> None:
    bare = llama.folder / "bare.safetensors"
    distcheck.scores(bare, llama.sequences, logprobs=llama.right)
    assert llama.compared(to=bare, logprobs=llama.right).verdict == "pass"  # the same bits
    found = llama.compared(to=bare, logprobs=RIGHT["another attention kernel"](llama))
    assert (found.verdict, found.scores.noise_floor) == ("unknown", None)
    assert "neither file has a noise floor" in found.reason


def test_a_callable_without_parameters_has_no_noise_floor(llama: Engines) -> None:
    found = llama.compared(forward=lambda ids: llama.model(ids))
    assert found.verdict == "pass"
    other = read_scores(llama.folder / "B.safetensors")
    assert other.floor is None
    assert not other.about.weights
    assert {*other.group("with")} == {"again", "batch"}


def test_the_distance_grows_with_the_updates(llama: Engines) -> None:
    means = [
        llama.compared(**wrong(llama, updated(by), scores=False), step=1).scores.mean
        for by in (1e-6, 1e-5, 1e-4)
    ]
    assert 20 * means[0] < 4 * means[1] < means[2]


# -- scoring ---------------------------------------------------------------------------------------


def test_scoring_restores_everything(llama: Engines) -> None:
    model = copy.deepcopy(llama.model).train()
    model.layers[0].eval()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    distcheck.scores(llama.folder / "C.safetensors", llama.sequences, model)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.training
    assert not model.layers[0].norms[0].training
    assert all(one.grad is None for one in model.parameters())
    assert all(one.untyped_storage().resizable() for one in model.parameters())  # for FSDP2

    class Fails(Attends):
        def forward(self, *given: Any) -> Any:
            if any(not torch.equal(one, before[n]) for n, one in model.state_dict().items()):
                raise RuntimeError("perturbed")
            return model(*given)

    with pytest.raises(RuntimeError, match="perturbed"):
        distcheck.scores(
            llama.folder / "C.safetensors", llama.sequences, model, forward=Fails(model)
        )
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_the_dtype_of_the_computation_is_found(llama: Engines) -> None:
    class Casts(Attends):
        def forward(self, ids: Any, attention_mask: Any, position_ids: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(ids, attention_mask, position_ids)

    found = llama.compared(model=Casts(llama.model))
    assert found.scores.noise_floor > 1000 * read_scores(llama.file).floor.mean()
    assert read_scores(llama.folder / "B.safetensors").about.dtype == "bfloat16"


@pytest.mark.parametrize(("precision", "name"), [("high", "tf32"), ("medium", "bfloat16")])
def test_reduced_precision_of_products_widens_the_floor(
    precision: str, name: str, llama: Engines
) -> None:
    torch.set_float32_matmul_precision(precision)
    try:
        found = llama.compared(model=llama.model)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert read_scores(llama.folder / "B.safetensors").about.dtype == name
    assert found.scores.noise_floor > 1000 * read_scores(llama.file).floor.mean()
    assert found.verdict != "fail"
    assert f"hidden by {name}" in found.scores.not_detected[-1]


def test_float64_is_compared_with_the_precision_of_the_other_file(llama: Engines) -> None:
    double, given = copy.deepcopy(llama.model).double(), llama.sequences
    own, right = llama.folder / "double.safetensors", scored(double, given)
    distcheck.scores(own, given, double, draws=1)
    found = llama.compared(to=own, logprobs=right)
    assert found.verdict == "pass"
    assert found.scores.mean < 1e-14
    assert llama.compared(to=own, logprobs=[one.float() for one in right]).verdict == "pass"


def test_only_a_part_of_the_tokens_is_scored(llama: Engines) -> None:
    part = llama.folder / "part.safetensors"
    start = [len(one) // 2 for one in llama.sequences]
    distcheck.scores(part, llama.sequences, llama.model, start=start, draws=1)
    ends = [one[n - 1 :] for one, n in zip(llama.right, start, strict=True)]
    assert llama.compared(to=part, logprobs=ends).verdict == "pass"
    whole = [[None, *one.tolist()] for one in llama.right]
    with pytest.raises(UsageError, match=r"scores sequence 0 from position 30 on, and .* 1 on"):
        llama.compared(to=part, logprobs=whole)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logprobs": [[-1.0]]}, "there are 2 sequences and 1 lists of logprobs"),
        ({"logprobs": [[-1.0] * 3, [-1.0]]}, "sequence 0 has 3 tokens and 3 logprobs"),
        ({"logprobs": [[0.5], [-1.0]]}, "0.5 in logprobs .sequence 0, position 2., which is not"),
        ({"logprobs": [[-1.0], [float("nan")]]}, "nan in logprobs .sequence 1, position 1."),
        ({}, "needs a model, forward= or logprobs="),
        ({"model": nn.Identity(), "logprobs": []}, "either a model"),
        ({"forward": lambda ids: ids}, r"returned shape \(2, 3\) for tokens of shape \(2, 3\)"),
        ({"forward": lambda ids: ids, "start": 2}, "sequence 1 has 2 tokens, and none is scored"),
        ({"forward": lambda ids: ids, "start": [1]}, "there are 2 sequences and 1 starts"),
        ({"forward": lambda ids: ids, "temperature": 0.0}, "temperature is 0.0"),
        ({"sequences": torch.zeros(1, 2, 3)}, "pass a list of token ids per sequence"),
        ({"forward": lambda ids: torch.full((*ids.shape, 9), torch.nan)}, "nan in logprobs"),
        ({"forward": lambda ids: torch.zeros(*ids.shape, 5)}, "vocabulary of 5; use"),
        ({"logprobs": [[-1.0, None], [-1.0]]}, "nan in logprobs .sequence 0, position 2."),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_sentence(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    given.setdefault("sequences", [[1, 2, 3], [4, 5]])
    with pytest.raises(UsageError, match=said) as raised:
        distcheck.scores(tmp_path / "x.safetensors", **given)
    assert "\n" not in str(raised.value)
    assert not [*tmp_path.iterdir()]


# -- the command -----------------------------------------------------------------------------------


def command(*words: object) -> tuple[int, str]:
    arguments = ["compare", *map(str, words), "--scores"]
    ran = CliRunner().invoke(root_command, arguments, standalone_mode=False)
    if isinstance(ran.exception, DistcheckError):
        return int(ran.exception.exit_code), str(ran.exception)
    assert ran.exception is None, ran.exception
    return int(ran.return_value), ran.output


def test_screen_page_and_documents(llama: Engines) -> None:
    other, page = llama.folder / "other.safetensors", llama.folder / "page.html"
    wrong_scores = scored(llama.model, llama.sequences, temperature=0.9)
    distcheck.scores(other, llama.sequences, logprobs=wrong_scores, temperature=0.9)
    files = {name: llama.folder / f"out.{name}" for name in ("json", "junit", "sarif", "gitlab")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    code, screen = command(llama.file, other, "--html", page, *options)
    assert code == 1
    text = " ".join(screen.split())
    assert "x the noise floor: not rounding, first at sequence 0, position 1 " in text
    assert "temperature was 1.0 and is 0.9" in text
    assert "cause scores-temperature: " in text
    assert text.count("noise floor 1") + text.count("noise floor 2") >= 4
    found = json.loads(files["json"].read_text())
    assert len(found["cases"][0]["scores"]["worst"]) == 10
    written = page.read_text()
    assert written.count("<svg") == 2
    assert "Worst tokens" in written
    assert "changed tensors" not in written  # columns that scores do not have
    assert "<br>: " not in written
    assert '<th scope="row">59</th>' in written  # the last position of the longest sequence
    assert "scores-temperature" in files["junit"].read_text()
    annotated = command(llama.file, other, "--github")[1]
    for text in (files["junit"].read_text(), files["sarif"].read_text(), annotated):
        assert f"replay: distcheck compare {llama.file} {other} --scores" in text
        assert "distcheck verify" not in text
    code, screen = command(llama.file, llama.file)
    assert code == 0
    assert screen.startswith(
        "no recorded setting changed\nno bit changed in 287 log-probabilities\n"
    )
    assert "limits not detected by this pass: a mean distance below " in " ".join(screen.split())


def test_every_changed_bit_fails_on_request(llama: Engines) -> None:
    other = llama.folder / "other.safetensors"
    kernel = RIGHT["another attention kernel"](llama)
    distcheck.scores(other, llama.sequences, logprobs=kernel)
    assert command(llama.file, other)[0] == 0
    assert command(llama.file, other, "--bits")[0] == 1
    assert command(llama.file, llama.file, "--bits")[0] == 0


def test_other_sequences_are_one_sentence(llama: Engines) -> None:
    other = llama.folder / "other.safetensors"
    template = [one.clone() for one in llama.sequences]
    template[2][5] = 0
    distcheck.scores(other, template, logprobs=llama.right)
    code, said = command(llama.file, other)
    token = int(llama.sequences[2][5])
    assert code == 2
    assert f"the first token that differs is at position 5: {token} and 0" in said
    assert "chat template" in said
    distcheck.scores(other, llama.sequences[:-1], logprobs=llama.right[:-1])
    assert "which has 1 fewer" in command(llama.file, other)[1]
    assert "which has 1 fewer" in command(other, llama.file)[1]
    shorter = [*llama.sequences[:-1], llama.sequences[-1][:-3]]
    distcheck.scores(other, shorter, logprobs=[*llama.right[:-1], llama.right[-1][:-3]])
    assert "it has 44 tokens, not 47" in command(llama.file, other)[1]
    assert command(llama.file)[1].startswith("compare --scores needs two files")
    assert "is not a file" in command(llama.file, llama.folder)[1]


def test_equal_sequences_are_paired_in_their_order(llama: Engines) -> None:
    twice, right = [*llama.sequences, llama.sequences[0]], [*llama.right, llama.right[0]]
    own = llama.folder / "twice.safetensors"
    distcheck.scores(own, twice, llama.model, draws=1)
    assert llama.compared(to=own, sequences=twice, logprobs=right).verdict == "pass"
    with pytest.raises(UsageError, match="which has 1 fewer"):
        llama.compared(to=own, logprobs=llama.right)


def with_columns(file: Path, out: Path, about: str | None = None, **columns: Any) -> None:
    tensors = {**load_file(file), **columns}
    kept = {name: one for name, one in tensors.items() if one is not None}
    save_file(kept, out, None if about is None else {"distcheck": about})


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "has no tokens"),
    "no log-probabilities": ({"logprobs": None}, "has no logprobs"),
    "tokens of another dtype": ({"tokens": torch.zeros(293)}, "has no tokens; expected an int64"),
    "no sequence": ({"lengths": torch.zeros(0, dtype=torch.int64)}, "has no lengths"),
    "lengths": ({"lengths": torch.full((6,), 40)}, "do not add up"),
    "a negative length": ({"lengths": torch.tensor([-1, 102, 52, 60, 33, 47])}, "impossible"),
    "a huge length": ({"lengths": torch.full((6,), 2**62)}, "has an impossible length"),
    "starts": ({"start": torch.ones(5, dtype=torch.int64)}, "different numbers of sequences"),
    "a start at the end": ({"start": torch.full((6,), 33)}, "no scored token in sequence 4"),
    "a start before 1": ({"start": torch.zeros(6, dtype=torch.int64)}, "no scored token"),
    "too few": ({"logprobs": torch.zeros(286)}, "of shape (286,) for 287 scored tokens"),
    "another dtype": ({"logprobs": torch.zeros(287).half()}, "logprobs of torch.float16"),
    "integers": ({"floor": torch.zeros(287, dtype=torch.int32)}, "has floor of torch.int32"),
    "NaN": ({"logprobs": torch.full((287,), torch.nan)}, "has nan in logprobs (sequence 0, posit"),
    "infinite": ({"logprobs": torch.full((287,), -torch.inf)}, "has -inf in logprobs"),
    "probabilities": ({"logprobs": torch.full((287,), 0.5)}, "not the natural logarithm"),
    "a negative floor": ({"floor": torch.full((287,), -1.0)}, "has -1 in floor"),
    "an infinite floor": ({"floor": torch.full((287,), torch.inf)}, "has inf in floor"),
    "another tensor": ({"weights": torch.zeros(287)}, "has an unknown tensor 'weights'"),
    "a column without a name": ({"if/ ": torch.zeros(287)}, "has an unknown tensor 'if/ '"),
    "a floor of 8 bits": (
        {"floor": torch.ones(287).to(torch.float8_e4m3fn)},
        "has floor of torch.float8_e4m3fn",
    ),
    "metadata": ({"about": "{"}, "the metadata key distcheck is invalid"),
    "a temperature": ({"about": '{"temperature": 0}'}, "the metadata key distcheck is invalid"),
    "another form": ({"about": '{"form": 9}'}, "has form 9"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_one_sentence(name: str, llama: Engines) -> None:
    columns, said = DAMAGED[name]
    other = llama.folder / "damaged.safetensors"
    with_columns(llama.file, other, **columns)
    code, text = command(llama.file, other)
    assert (code, text.count("\n")) == (2, 0)
    assert said in text
    assert str(other) in text


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x08" + bytes(7) + b"{}      ", None])
def test_files_of_other_kinds_are_one_sentence(content: bytes | None, llama: Engines) -> None:
    other = llama.folder / "hostile.safetensors"
    data = llama.file.read_bytes()
    other.write_bytes(data[: len(data) // 2] if content is None else content)
    code, text = command(llama.file, other)
    assert (code, text.count("\n")) == (2, 0)


def test_names_in_a_file_never_reach_the_terminal_unescaped(llama: Engines) -> None:
    other = llama.folder / "hostile.safetensors"
    about = json.dumps({"dtype": "\x1b]0;title\x07", "step": 1})
    logprobs = scored(llama.model, llama.sequences, temperature=0.9)
    with_columns(llama.file, other, about, logprobs=torch.cat(logprobs),
                 **{"if/temperature \x1b[31m": torch.cat(llama.right)})  # fmt: skip
    code, text = command(llama.file, other)
    assert code == 1
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("floor", [0.0, 5e-324])
def test_a_floor_without_width_ends_no_run(floor: float, llama: Engines) -> None:
    one, other = llama.folder / "certain.safetensors", llama.folder / "not-certain.safetensors"
    zeros = torch.zeros(287, dtype=torch.float64)
    with_columns(llama.file, one, logprobs=zeros, floor=zeros + floor, **{"with/again": zeros - 1})
    about = '{"dtype": "float4_e2m1fn_x2"}'
    with_columns(llama.file, other, about, logprobs=zeros - 1, floor=zeros + floor)
    assert command(one, other)[0] in (1, 5)
    assert command(other, one)[0] in (1, 5)


def test_a_floor_that_hides_everything_is_never_a_pass(llama: Engines) -> None:
    other = llama.folder / "wide.safetensors"
    with_columns(llama.file, other, floor=torch.full((287,), 1e3))
    code, text = command(llama.file, other)
    assert code == 5
    text = " ".join(text.split())
    assert "hides a temperature error of 10% and scores shifted by one token" in text
