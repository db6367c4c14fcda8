"""Which other ways code may be called in, and what follows from trying them."""

from pathlib import Path

import pytest

from distcheck.errors import UsageError
from distcheck.records import Adaptation, Case
from distcheck.training.loading import load_strategy, other_ways
from distcheck.verification.guesses import (
    CallTrial,
    GuessDecision,
    ambiguity_error,
    decide_guess,
    note_on_replacement,
)

GUESS = Adaptation(form="wrapper", finish="none")
OTHER, THIRD = (Adaptation(form="wrapper", finish=name) for name in ("flush", "go"))

ONE, TWO, NO_GROUP = (Adaptation(arguments=(("x", value),)) for value in ("1", "2", "None"))


def trial(way: Adaptation = OTHER, **seen: bool) -> CallTrial:
    return CallTrial(way=way, **seen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("guess", "others", "what", "ways"),
    [
        # What passes on the smallest case is right, and the failure elsewhere is one.
        (trial(GUESS, passed=True), [], "stands", []),
        (trial(GUESS), [trial(passed=True)], "take", [OTHER]),
        (trial(GUESS), [trial(), trial(THIRD, passed=True)], "take", [THIRD]),
        (trial(GUESS), [trial(passed=True), trial(THIRD, passed=True)], "ask", [OTHER, THIRD]),
        (trial(GUESS), [trial(), trial(THIRD)], "ask", [OTHER, THIRD]),
        # Of an exchange, and explained: a failure.
        (trial(GUESS, exchanged=True, explained=True), [trial()], "stands", []),
        # One of these two is not enough.
        (trial(GUESS, exchanged=True), [trial()], "ask", [OTHER]),
        (trial(GUESS, explained=True), [trial()], "ask", [OTHER]),
        # Another way passes, however well the guess is explained.
        (trial(GUESS, exchanged=True, explained=True), [trial(passed=True)], "take", [OTHER]),
        # Nothing was exchanged under the guess, and one other way explains what was.
        (trial(GUESS), [trial(exchanged=True, explained=True), trial(THIRD)], "take", [OTHER]),
        (
            trial(GUESS),
            [trial(exchanged=True, explained=True), trial(THIRD, exchanged=True, explained=True)],
            "ask",
            [OTHER, THIRD],
        ),
        # Every way raises the same.
        (trial(GUESS, broken=True), [trial(broken=True)], "stands", []),
        (trial(GUESS, broken=True), [trial()], "ask", [OTHER]),
        # An argument makes no difference if every value passes; if it fails, its value may be why.
        (trial(GUESS), [trial(ONE, passed=True), trial(TWO, passed=True)], "take", [ONE, TWO]),
        (trial(GUESS), [trial(ONE, passed=True), trial(TWO)], "take", [ONE]),
        (
            trial(GUESS),
            [trial(ONE, passed=True), trial(TWO, passed=True), trial(NO_GROUP)],
            "ask",
            [ONE, TWO],
        ),
        (trial(GUESS), [trial(ONE, exchanged=True, explained=True)], "ask", [ONE]),
        # Those that exchanged are offered first.
        (trial(GUESS), [trial(), trial(THIRD, exchanged=True)], "ask", [THIRD, OTHER]),
    ],
)
def test_after_trials(
    guess: CallTrial, others: list[CallTrial], what: str, ways: list[Adaptation]
) -> None:
    decision = decide_guess(guess, others)
    assert (decision.what, [one.way for one in decision.ways]) == (what, ways)


def test_a_flag_has_no_third_value() -> None:
    on, off = (Adaptation(arguments=(("x", value),)) for value in ("True", "False"))
    assert decide_guess(trial(on, exchanged=True, explained=True), [trial(off)]).sure
    assert not decide_guess(trial(ONE, exchanged=True, explained=True), [trial(TWO)]).sure


def test_what_is_asked_can_be_copied() -> None:
    case = Case(id="", strategy="a b.py:C", world=2)
    error = ambiguity_error(case, GuessDecision("ask", (trial(), trial(THIRD))))
    assert isinstance(error, UsageError)
    assert str(error).splitlines()[1:] == [
        "    distcheck verify --strategy 'a b.py:C' --world 2 --as wrapper --finish flush",
        "    distcheck verify --strategy 'a b.py:C' --world 2 --as wrapper --finish go",
    ]


def test_what_was_found_says_how_to_pin_it() -> None:
    assert "--as wrapper --finish flush" in note_on_replacement(trial(passed=True))


LOAD = "def __init__(self, module): self.module = module\n    def __call__(self, x): return x\n"


@pytest.mark.parametrize(
    ("source", "ways"),
    [
        ("def f(model):\n    for p in model.parameters(): p.grad", []),
        ("def f(model, optimizer):\n    model.parameters(); g(optimizer)", ["optimizer", "step"]),
        ("def f(thing):\n    for p in thing: p.grad", ["parameters @param_list"]),
        ("def f(thing):\n    g(thing)", ["gradients", "tensor-mean"]),
        ("def f(thing):\n    g(thing.grad)", ["parameters"]),
        # Values of an argument that nothing is known of.
        ("def f(model, n_parts: int): model.parameters()", [" @world_size"]),
        ("def f(model, loss_n: int): model.parameters()", []),
        ("def f(model, n_parts: int):\n    'n_parts: micro-batches'\n    model.x", []),
        ("def f(model, mean: bool): model.parameters()", [" True", " False"]),
        ("def f(model, on):\n    if g and not on: model.parameters()", [" True", " False"]),
        (
            "def f(model, on):\n    if on: model.go(on)",
            [" None", " @group", " @optimizer", " @model"],
        ),
        (
            "class f:\n    def __init__(self, optimizer): self.x = optimizer\n"
            "    def step(self, closure=None):\n        if closure: all_reduce(closure())\n",
            ["optimizer @closure"],
        ),
        ("def f(model, a, b: float): model.parameters()", []),
        ("def f(model, a, b, c, d): model.parameters()", []),
        ("def f(thing: 'torch.Tensor'):\n    g(thing)", []),
        ("def f(model):\n    h(model.parameters())\ndef h(x):\n    x.register_hook(f)", ["hooks"]),
        (
            f"class f:\n    {LOAD}    def begin(self): pass\n    def flush(self): pass",
            [
                "wrapper none begin",
                "wrapper none flush",
                "wrapper begin",
                "wrapper flush",
                "wrapper flush begin",
                "wrapper begin flush",
            ],
        ),
        ("class f:\n    def wrap(self, model): return model\n    def go(self): pass", []),
        (
            "class f:\n    def go(self, model): pass\n    def run(self, model): pass",
            [" go", " run"],
        ),
        # The other value of an argument that describes a run of one process.
        ("def f(model, world_size=1): model.parameters()", ["model @world_size"]),
        ("def f(model, size=1, rank=1): model.parameters()", []),
        ("def f(model, world_size=None): model.parameters()", ["model @world_size"]),
        ("def f(model, group=None): model.parameters()", []),
        (
            "def f(model, rank, optimizer):\n    model.parameters()\n    optimizer.step()\n"
            "    dist.broadcast(model, 0)",
            ["optimizer", "steps-inside", "model"],
        ),
        (
            "class f:\n    def __init__(self, n_workers=1): self.n = n_workers\n"
            "    def average_grads(self, model): pass",
            [" 1", " average_grads"],
        ),
        (
            "class f:\n    def __init__(self, optimizer): self.optim = optimizer\n"
            "    def reduce_mine(self): pass\n    def step(self): self.optim.step()",
            ["optimizer reduce_mine"],
        ),
        (
            "def f(tensor, mean=False):\n    dist.all_reduce(tensor)",
            ["tensor-sum", "tensor-mean True"],
        ),
    ],
)
def test_the_ways_that_code_admits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, ways: list[str]
) -> None:
    name = f"ways_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [way for tier in other_ways(f"{name}:f", Adaptation()) for way in tier]
    said = [
        " ".join([way.form or "", *(v for _, v in way.arguments), *_phases(way)]).rstrip()
        for way in found
    ]
    assert said == ways


def _phases(way: Adaptation) -> list[str]:
    return [name for name in (way.finish, way.reset) if name]


def test_what_was_said_is_kept(tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(
        f"class f:\n    {LOAD}    def begin(self): pass\n    def flush(self): pass\n"
    )
    place = f"{tmp_path / 'said.py'}:f"
    tiers = other_ways(place, Adaptation(form="wrapper", finish="flush"))
    assert [[(way.finish, way.reset) for way in tier] for tier in tiers] == [[("flush", "begin")]]


def test_code_that_refuses_the_first_guess_is_loaded_as_the_next(tmp_path: Path) -> None:
    """Nothing is known of `inner` but that what is made has a step()."""
    (tmp_path / "inner.py").write_text(
        "class f:\n    def __init__(self, inner): self.inner = inner\n    def step(self): pass\n"
        "    def also(self): pass\n"
    )
    assert "f around the optimizer" in load_strategy(f"{tmp_path / 'inner.py'}:f").note
