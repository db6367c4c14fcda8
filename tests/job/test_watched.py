"""A watched job is the job: the same bits with distcheck and without, and hooks called as often."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distcheck.job.settings import JobSettings, write
from tests.job.planted import FOLDER, SCRIPTS
from tests.job.scripts import both, run

TELL = """
import json
print(json.dumps([calls, *(p.double().sum().item().hex() for p in model.parameters())]))
"""
LOOP = """
calls = []
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = optimizer_of(model)
{before}
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
BEFORE = {
    "hooks on parameters": """
def note(name, gradient):
    calls.append(name)
    return 2 * gradient
for name, parameter in model.named_parameters():
    parameter.register_hook(lambda g, name=name: note(name, g))
""",
    "hooks after .grad": """
for name, parameter in model.named_parameters():
    def double(p, n=name): calls.append(n); p.grad.mul_(2)
    parameter.register_post_accumulate_grad_hook(double)
""",
    "hooks on nodes": """
from torch.autograd.graph import get_gradient_edge
nodes = [get_gradient_edge(p).node for p in model.parameters()]
for number, node in enumerate(nodes):
    node.register_prehook(lambda g, n=number: calls.append(n))
    node.register_hook(lambda i, o, n=number: calls.append(n))
""",
    "hooks on several": """
torch.autograd.graph.register_multi_grad_hook(
    [*model.parameters()], lambda given: calls.append(len(given))
)
""",
    "hooks on modules": """
model.register_forward_hook(lambda m, i, o: calls.append(len(o)))
model[0].register_full_backward_hook(lambda m, i, o: calls.append(len(o)))
model.register_forward_pre_hook(lambda m, i: (2 * i[0],))
""",
    "hooks on optimizers": """
optimizer.register_step_pre_hook(lambda o, a, k: calls.append(len(a)))
optimizer.register_step_post_hook(lambda o, a, k: calls.append(len(k)))
""",
    "a hook that is taken back": """
handle = model[0].weight.register_hook(lambda g: calls.append(0))
handle.remove()
model[0].weight.register_hook(lambda g: calls.append(1) or g.neg())
""",
}


@pytest.mark.parametrize("name", BEFORE)
def test_hooks_of_a_script_are_called_as_often(name: str, tmp_path: Path) -> None:
    alone, watched = both(LOOP.replace("{before}", BEFORE[name]) + TELL, tmp_path)
    assert watched == alone
    assert alone[0] or "given" in BEFORE[name], "something was called"


ROOTS = """
import itertools
calls = []
body, actor, critic = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
model = torch.nn.ModuleList([body, actor, critic])
optimizer = optimizer_of(body, actor, critic)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    h = torch.tanh(body(x))
    (F.cross_entropy(actor(h), y) + critic(h).square().mean()).backward()
    optimizer.step()
"""
# Objects that break what distcheck might take for granted.
ODD = """
calls = []
class Odd(torch.nn.Linear):
    __hash__ = object.__hash__
    def __eq__(self, other): raise RuntimeError("not to be compared")
model = Odd(3, 2)
optimizer = optimizer_of(model)
for step in range(3):
    x, y = batch(step)
    loss = F.cross_entropy(target=y, input=model(x))
    torch.autograd.backward((t for t in [loss]))
    torch.nn.utils.clip_grad_norm_(norm_type=2.0, max_norm=1.0, parameters=model.parameters())
    optimizer.step(closure=None)
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("script", [ROOTS, ODD], ids=["roots of one name", "odd objects"])
def test_a_script_goes_on_as_it_would(script: str, tmp_path: Path) -> None:
    alone, watched = both(script + TELL, tmp_path)
    assert watched == alone


DEFECT = """
from distcheck.job.inside.recorder import Recorder
calls = []
def raises(*_): raise RuntimeError("a defect")
if {watched}:
    setattr(Recorder, "{event}", raises)
"""


@pytest.mark.parametrize("event", ["gradient", "enters", "reaches", "steps", "losses", "batch"])
def test_what_the_recorder_raises_never_reaches_the_script(event: str, tmp_path: Path) -> None:
    """It stops listening, and says so beside the recording."""
    loop = LOOP.replace("{before}", "data = torch.utils.data.DataLoader([1, 2]); next(iter(data))")
    script = DEFECT.replace("{event}", event) + loop + TELL
    alone = run(script.replace("{watched}", "False"), tmp_path, watched=False)
    watched = run(script.replace("{watched}", "True"), tmp_path, defect=True)
    assert json.loads(watched) == json.loads(alone)


LISTS = """
calls = []
class Lists(torch.nn.Linear):
    def parameters(self, recurse=True):
        return [*super().parameters(recurse)]
model = Lists(3, 2)
optimizer = optimizer_of(model)
for step in range(3):
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("reads", ["[*super().parameters(recurse)]", "1 / 0"])
def test_what_is_asked_of_a_model_never_reaches_the_script(reads: str, tmp_path: Path) -> None:
    """Its own `parameters` may return a list, or raise."""
    script = LISTS.replace("[*super().parameters(recurse)]", reads).replace(
        "optimizer_of(model)", "torch.optim.SGD([model.weight, model.bias], lr=0.1)"
    )
    tell = TELL.replace("model.parameters()", "model._parameters.values()")
    alone = run(script + tell, tmp_path, watched=False)
    watched = run(script + tell, tmp_path, defect=reads == "1 / 0")
    assert json.loads(watched) == json.loads(alone)


def test_names_that_a_model_has_for_itself(tmp_path: Path) -> None:
    """Megatron's wrapper keeps its buckets as `buffers`."""
    script = LISTS.replace("    def parameters(self, recurse=True):\n", "").replace(
        "        return [*super().parameters(recurse)]", "    buffers = []"
    )
    alone, watched = both(script + TELL, tmp_path)
    assert watched == alone


BEATS = """
from distcheck.job.inside import hooks
from distcheck.job.inside.recorder import Recorder
def raises(*_): raise RuntimeError("a defect")
Recorder.enters = raises
beats = []
hooks.heartbeat = lambda: beats.append(0)
model = torch.nn.Linear(3, 2)
optimizer = optimizer_of(model)
for step in range(3):
    seen = len(beats)
    F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
    optimizer.step()
    assert len(beats) > seen, step
"""


def test_a_job_goes_on_where_the_recorder_failed(tmp_path: Path) -> None:
    """And says so: what waits for it does not take it for one that hangs."""
    run(BEATS, tmp_path, defect=True)


INSTALLS = """
import sys
from distcheck.job.inside import start
sys.modules["distcheck.job.inside.recorder"] = None  # its import raises
start.begin(sys.argv[1])
import torch
print(torch.ones(2).sum().item())
"""


def test_hooks_that_cannot_be_put_in_leave_the_script_alone(tmp_path: Path) -> None:
    """Hooks that can be are in test_rules.py: who asks where torch is does not take the hook."""
    file = write(JobSettings(), tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", INSTALLS, str(file)], capture_output=True, text=True, timeout=300
    )
    assert ran.stdout == "2.0\n", ran.stderr
    assert (tmp_path / "defect").exists()


PROBE = """
import os, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
calls = {"hooks": 0}
register = torch.Tensor.register_hook

def register_hook(tensor, hook):
    def called(gradient):
        calls["hooks"] += 1
        return hook(gradient)
    return register(tensor, called if tensor.is_leaf else hook)

def note(optimizer, args, kwargs):
    held = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    held = [p.to_local() if hasattr(p, "to_local") else p for p in held]
    bits = [p.double().sum().item().hex() for p in held]
    with open(f"{os.environ['BITS']}-{os.environ.get('RANK', '')}", "a") as file:
        print(bits, calls["hooks"], file=file)

torch.Tensor.register_hook = register_hook
register_optimizer_step_post_hook(note)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_example_is_the_same_job(name: str, tmp_path: Path) -> None:
    """Bit for bit after every step of every rank."""
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "sitecustomize.py").write_text(PROBE)
    python = [sys.executable, "-m"]
    job = [*python, "torch.distributed.run", "--nproc-per-node", "2", str(FOLDER / name)]
    watched = [*python, "distcheck", "job", "--keep-going", "--no-reference", "-q", "--", *job]
    for kind, words in (("alone", job), ("watched", watched)):
        about = {"PYTHONPATH": str(tmp_path / "probe"), "BITS": str(tmp_path / kind)}
        subprocess.run(
            words, cwd=tmp_path, env={**os.environ, **about}, timeout=300, check=False,
            capture_output=True,
        )  # fmt: skip
    for rank in range(2):
        found = [tmp_path / f"{kind}-{rank}" for kind in ("alone", "watched")]
        if name.startswith("with_") and not found[0].exists():
            pytest.skip("its framework is not installed")
        assert found[0].read_text() == found[1].read_text()
