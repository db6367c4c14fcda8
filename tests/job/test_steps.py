"""A step is what the optimizer gets: which passes it is made of, and which gradients."""

from pathlib import Path

import pytest
import torch

from distcheck.job.inside.moved_gradients import with_moved_gradients
from distcheck.recordings.recording import Kind
from tests.job.scripts import recorded, run

KINDS = (Kind.LOCAL_GRADIENT, Kind.GRADIENT)

LOOP = """
model = torch.nn.Linear(3, 2)
optimizer = optimizer_of(model)
for step in range(3):
    x, y = batch(step)
    {body}
    optimizer.step()
"""
TRAIN = "optimizer.zero_grad(); F.cross_entropy(model(x), y).backward()"
MOVED = """
    kept = [0, 0]
    optimizer.zero_grad()
    for i in (0, 1, 2):
        model(x[i:]).square().mean().backward()
        if i == {kept}: break
        kept = [{times} * k + p.grad for k, p in zip(kept, model.parameters())]
        model.zero_grad()
    for k, p in zip(kept, model.parameters()): p.grad = k + (0 if p.grad is None else p.grad)
"""
# What a script does in a step: by pass, whether it is in what the optimizer gets.
STEPS = {
    "one pass": (TRAIN, [True]),
    "accumulation": (
        "optimizer.zero_grad()\n"
        "    for i in (0, 1): F.cross_entropy(model(x[i::2]), y[i::2]).backward()",
        [True, True],
    ),
    "a dry pass": (f"model(x); {TRAIN}", [False, True]),
    "a pass whose gradients are dropped": (
        f"model(x).sum().backward(); model.zero_grad(); {TRAIN}",
        [False, True],
    ),
    "gradients that are set to zero": (
        f"model(x).sum().backward(); model.zero_grad(set_to_none=False); {TRAIN}",
        [False, True],
    ),
    "a skipped step": (f"{TRAIN}; {TRAIN}", [False, True]),
    "two backward passes of one forward pass": (
        "optimizer.zero_grad(); o = model(x); o[:, 0].sum().backward(retain_graph=True); "
        "o[:, 1].sum().backward()",
        [True],
    ),
    "one backward pass of two forward passes": (
        "optimizer.zero_grad(); (model(x) - model(-x)).square().mean().backward()",
        [True, True],
    ),
    "gradients that are moved and put back": (
        MOVED.format(kept=-1, times=1),
        [True, True, True],
    ),
    "gradients that are moved, the last only put back": (
        MOVED.format(kept=-1, times=0),
        [False, False, True],
    ),
    "gradients that are moved, and added to the last": (
        MOVED.format(kept=2, times=1),
        [True, True, True],
    ),
    "an evaluation": (f"model.eval(); model(x).sum(); model.train(); {TRAIN}", [True]),
    "without gradients": (f"torch.no_grad()(model)(x); {TRAIN}", [True]),
    "without gradients within forward": (
        "own, model.forward = model.forward, torch.no_grad()(model.forward); model(x); "
        f"model.forward = own; {TRAIN}",
        [False, True],
    ),
    "a gradient that is not added": (
        f"torch.autograd.grad(model(x).sum(), model.weight); {TRAIN}",
        [False, True],
    ),
    "a backward pass in torch.autograd": (
        "optimizer.zero_grad(); torch.autograd.backward([F.cross_entropy(model(x), y)])",
        [True],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_passes_of_a_step_are_those_that_the_optimizer_gets(name: str, tmp_path: Path) -> None:
    body, live = STEPS[name]
    job = with_moved_gradients(recorded(LOOP.replace("{body}", body), tmp_path))
    assert job.steps == (0, 1, 2)
    for step in job.steps:
        record = job.records[0, step]
        assert [one.live for one in record.passes] == live
        assert not record.carried
        for parameter in ("weight", "bias"):  # one rank: what backward added is what is there
            local, given = (job.gradient(k, 0, step, parameter) for k in KINDS)
            assert local is not None
            assert given is not None
            assert torch.allclose(local, given, atol=1e-6)


def test_gradients_that_were_kept_are_said_to_be(tmp_path: Path) -> None:
    body = "F.cross_entropy(model(x), y).backward()"
    job = recorded(LOOP.replace("{body}", body), tmp_path)
    assert [job.records[0, step].carried for step in job.steps] == [False, True, True]
    assert job.records[0, 1].earlier == ((0, 0),)


def test_a_loss_that_no_backward_pass_comes_from_is_not_one(tmp_path: Path) -> None:
    body = f"F.mse_loss(model(x), torch.zeros(4, 2)); {TRAIN}"
    job = recorded(LOOP.replace("{body}", body), tmp_path)
    (one,) = job.records[0, 0].trained
    assert [call.name for call in one.losses] == ["cross_entropy"]
    assert [term.call for term in one.terms] == [0]


GAN = """
G, D = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
og, od = optimizer_of(G), optimizer_of(D)
for step in range(2):
    real, _ = batch(step)
    fake = G(real[:, :2])
    od.zero_grad(); (D(fake.detach()).mean() - D(real).mean()).backward(); od.step()
    og.zero_grad(); (-D(fake)).mean().backward(); og.step()
"""


def test_each_optimizer_has_its_steps_and_its_parameters(tmp_path: Path) -> None:
    """What the generator's loss leaves in the discriminator is in no step."""
    job = recorded(GAN, tmp_path, steps=4)
    records = [job.records[0, step] for step in job.steps]
    assert [record.number for record in records] == [1, 0, 1, 0]
    assert [[one.live for one in record.passes] for record in records] == [
        [False, True, True], [True], [False, True, True], [True],
    ]  # fmt: skip
    assert [record.earlier for record in records] == [(), ((0, 0),), (), ((2, 0),)]
    assert not any(record.carried for record in records)
    assert [job.parameters(step) for step in job.steps[:2]] == [
        ("Linear-1.weight", "Linear-1.bias"), ("weight", "bias"),
    ]  # fmt: skip


TWO_OPTIMIZERS = """
model = torch.nn.Linear(3, 2)
head = torch.nn.Parameter(torch.ones(2))
own = torch.optim.SGD([head], lr=0.1)
optimizer = optimizer_of(model)
for step in range(2):
    x, y = batch(step)
    optimizer.zero_grad(); own.zero_grad()
    F.cross_entropy(model(x) * head, y).backward()
    optimizer.step()
    own.step()
"""


def test_a_parameter_that_no_module_has_is_of_its_optimizer(tmp_path: Path) -> None:
    job = recorded(TWO_OPTIMIZERS, tmp_path, steps=4)
    name = "parameter 0 of group 0 of optimizer 0"
    assert job.parameters(0) == ("weight", "bias")
    assert job.parameters(1) == (name,)
    assert job.records[0, 1].passes == ()
    assert job.records[0, 1].earlier == ((0, 0),)
    local, given = (job.gradient(kind, 0, 1, name) for kind in KINDS)
    assert local is not None
    assert given is not None
    assert torch.equal(local, given)


CLOSURE = """
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    x, y = batch(step)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step({how}closure)
"""


@pytest.mark.parametrize("how", ["", "closure="])
def test_a_step_with_a_closure_is_a_step(how: str, tmp_path: Path) -> None:
    job = recorded(CLOSURE.replace("{how}", how), tmp_path)
    assert job.steps == (0, 1, 2)
    for step in job.steps:
        record = job.records[0, step]
        assert len(record.trained) == 1
        local, given = (job.gradient(kind, 0, step, "weight") for kind in KINDS)
        assert local is not None
        assert given is not None
        assert torch.equal(local, given)


CHANGES = """
model = torch.nn.Linear(3, 2)
optimizer = optimizer_of(model)
for step in range(2):
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        moves = [0.1 * p.grad for p in model.parameters()]
        for p, m in zip(model.parameters(), moves): p.add_(m)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, m in zip(model.parameters(), moves): p.sub_(m)
    optimizer.step()
"""


def test_the_state_of_a_step_is_that_of_the_passes_that_it_was_trained_on(tmp_path: Path) -> None:
    """Sharpness-aware minimization moves parameters between two passes."""
    job = recorded(CHANGES, tmp_path, steps=2)
    record, kept = job.records[0, 1], job.tensors(0, 1)
    assert [one.later for one in record.passes] == [False, True]
    assert not torch.equal(kept["start/before/weight"], kept["before/weight"])
    assert torch.allclose(kept["start/before/weight"], job.tensors(0, 0)["after/weight"])


DRY = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
        self(batch(9)[0]) if {whole} else self.head(self.norm(batch(9)[0]))
        self.head.bias = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        return self.head(self.norm(x))
class Around(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model
    def forward(self, x):
        return self.module(x)
tried = torch.nn.Linear(3, 2)
tried(batch(8)[0])
model = Around(Net())
optimizer = optimizer_of(model)
for step in range(2):
    x, y = batch(step)
    optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
"""


@pytest.mark.parametrize("whole", [True, False])
def test_the_first_state_is_that_of_what_trains_when_it_begins(whole: bool, tmp_path: Path) -> None:
    """Not of a model that was tried, of a parameter that was replaced, nor of buffers before a dry
    pass: ranks hold these differently, until DistributedDataParallel gives them rank 0's.
    """
    job = recorded(DRY.replace("{whole}", str(whole)), tmp_path)
    record, kept = job.records[0, 0], job.tensors(0, 0)
    before = [kept[n] for n in record.digests if n.startswith("before/")]
    assert sorted(tuple(one.shape) for one in before) == [(2,), (2, 3), (3,), (3,)]
    assert any(torch.equal(one, torch.ones(2)) for one in before)
    (count,) = [kept[n] for n in record.digests if n.startswith("buffer/") and "batches" in n]
    assert int(count) == 1
    assert [one.later for one in record.passes if one.live] == [True]


AVERAGES = """
import copy
class Around(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
model = torch.nn.Linear(3, 2)
other = {other}
optimizer = optimizer_of(model)
for step in range(2):
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("other", "found"), [("copy.deepcopy(model)", 1), ("Around(model)", 0)])
def test_what_is_around_a_model_is_no_average_of_it(other: str, found: int, tmp_path: Path) -> None:
    job = recorded(AVERAGES.replace("{other}", other), tmp_path, steps=2)
    kept = job.records[0, 0].averages
    assert len([name for name in kept if name.startswith(("Linear", "Around"))]) == found


WRITES = """
model = torch.nn.Linear(3, 2)
optimizer = {optimizer}
for step in range(2):
    x, y = batch(step)
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if {writes}: model.bias.data.add_(1)
        return loss
    {step}
"""
TWICE = {"optimizer": "torch.optim.LBFGS(model.parameters(), max_iter=4)",
         "step": "optimizer.step(closure)"}  # fmt: skip
ONCE = {"optimizer": "optimizer_of(model)", "step": "closure(); optimizer.step()"}


@pytest.mark.parametrize(
    ("about", "writes", "expected"),
    [
        (ONCE, "step == 1", [[], ["written/bias"]]),
        (ONCE, "False", [[], []]),
        (TWICE, "False", [[], []]),  # the optimizer itself writes between its evaluations
    ],
)
def test_what_is_written_between_backward_and_step_is_noted(
    about: dict[str, str], writes: str, expected: list[list[str]], tmp_path: Path
) -> None:
    script = WRITES.replace("{writes}", writes)
    for name, text in about.items():
        script = script.replace(f"{{{name}}}", text)
    job = recorded(script, tmp_path, steps=2)
    digests = [job.records[0, step].digests for step in (0, 1)]
    assert [[n for n in one if n.startswith("written/")] for one in digests] == expected


LAZY = """
model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 2))
model(torch.zeros(1, 3))
optimizer = optimizer_of(model)
for step in range(2):
    x, y = batch(step)
    optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
"""


def test_parameters_that_a_dry_pass_makes_are_seen(tmp_path: Path) -> None:
    job = recorded(LAZY, tmp_path, steps=2)
    assert job.parameters(0) == ("1.weight", "1.bias", "0.weight", "0.bias")
    assert [one.live for one in job.records[0, 0].passes] == [False, True]
    assert "before/0.weight" in job.tensors(0, 0)


STANDS_IN = """
model = torch.nn.Linear(3, 2)
optimizer, own = optimizer_of(model), model.weight
def stand_in(module, inputs):
    module.weight = torch.nn.Parameter(own.detach().clone())
model.register_forward_pre_hook(stand_in)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    whole, model.weight = model.weight, own
    own.grad = whole.grad
    whole.untyped_storage().resize_(0)
    optimizer.step()
"""


def test_what_stands_in_for_a_parameter_is_none(tmp_path: Path) -> None:
    """As the whole parameters of FSDP2, whose memory is released after a backward pass."""
    job = recorded(STANDS_IN, tmp_path)
    assert job.steps == (0, 1, 2)
    for step in job.steps:
        digests = job.records[0, step].digests
        assert {name for name in digests if name.startswith("before/")} == {
            "before/weight", "before/bias",
        }  # fmt: skip


REMOTE = """
class Remote(torch.nn.Module):
    def _none(self, *args, **kwargs): raise ValueError("not supported")
    named_modules = modules = parameters = named_parameters = _none
class Hybrid(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.own = Remote(), torch.nn.Linear(3, 2)
    def forward(self, x): return self.own(x)
model = Hybrid()
optimizer = optimizer_of(model.own)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_the_local_modules_next_to_a_remote_one_are_recorded(tmp_path: Path) -> None:
    """torch's RemoteModule raises ValueError if anything asks for its parameters."""
    job = recorded(REMOTE, tmp_path)
    assert job.steps == (0, 1, 2)
    assert set(job.parameters(0)) == {"weight", "bias"}


ALONE = """
import distcheck.job.inside.rank
distcheck.job.inside.rank.rank_and_world_size = lambda: (0, 2)
model = torch.nn.Linear(3, 2)
optimizer = optimizer_of(model)
for number in range(20):
    inputs, labels = batch(number)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    {exchange}
    optimizer.step()
"""


@pytest.mark.parametrize(("exchange", "steps"), [("pass", 12), ("model.weight.grad /= 2", 3)])
def test_silent_steps_extend_the_recording(exchange: str, steps: int, tmp_path: Path) -> None:
    """They may average their parameters later; four times as many, and no more."""
    run(ALONE.format(exchange=exchange), tmp_path, steps=3)
    assert len([*tmp_path.glob("rank-*/step-*.safetensors")]) == steps
