"""Modules that are watched: what is seen of them, and that a job is what it is without."""

import json
from pathlib import Path

import pytest

from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.watched import WatchedStep
from tests.job.scripts import recorded, run

TELL = """
import json
print(json.dumps([*(p.double().sum().item().hex() for p in model.parameters()),
                  torch.rand(1).item().hex()]))
"""
LOOP = """
optimizer = optimizer_of(model)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
MODELS = {
    "plain": """
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True),
                            torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
""",
    "called twice, and shared": """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(3, 3)
        self.again = self.one
        self.last = torch.nn.Linear(3, 2)
    def forward(self, x):
        return self.last(self.again(torch.tanh(self.one(x))))
model = Net()
""",
    "tuples, dictionaries, nothing": """
class Two(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), {"sign": x > 0, "none": None}
class Nothing(torch.nn.Module):
    def forward(self, x): return None
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.two, self.nothing, self.last = Two(3, 4), Nothing(), torch.nn.Linear(4, 2)
    def forward(self, x):
        h, about = self.two(x)
        self.nothing(about)
        return self.last(h)
model = Net()
""",
    "frozen": """
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
model[0].requires_grad_(False)
""",
    "checkpoints": """
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 4), torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)
    def forward(self, x):
        h = checkpoint(self.one, x, use_reentrant=False)
        return self.last(checkpoint(self.two, h, use_reentrant=True))
model = Net()
""",
    "mapped, nested and complex": """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    def forward(self, x):
        h = torch.func.vmap(self.one)(x)
        return self.last(torch.fft.ifft(torch.fft.fft(h)).real)
model = Net()
""",
    "a module that raises": """
class Raises(torch.nn.Linear):
    def forward(self, x): raise ValueError
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.raises, self.last = Raises(1, 1), torch.nn.Linear(3, 2)
    def forward(self, x):
        try: self.raises(x)
        except ValueError: pass
        return self.last(x)
model = Net()
""",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_job_whose_modules_are_watched_has_the_same_bits(name: str, tmp_path: Path) -> None:
    script = MODELS[name] + LOOP + TELL
    alone = run(script, tmp_path, watched=False)
    assert json.loads(run(script, tmp_path, modules=True)) == json.loads(alone)


def seen(job: JobRecording, step: int = 1) -> WatchedStep:
    found = job.modules(0, step)
    assert found is not None
    return found


def calls(one: WatchedStep) -> list[tuple[str, int]]:
    return [(call.name, call.call) for call in one.watched.calls]


CALLS = {
    "plain": [("0", 0), ("1", 0), ("2", 0), ("3", 0), ("", 0)],
    "called twice, and shared": [("one", 0), ("one", 1), ("last", 0), ("", 0)],
    "tuples, dictionaries, nothing": [("two", 0), ("nothing", 0), ("last", 0), ("", 0)],
    "frozen": [("0", 0), ("1", 0), ("2", 0), ("", 0)],
    "checkpoints": [("one", 0), ("two", 0), ("last", 0), ("", 0)],
    "mapped, nested and complex": [("one", 0), ("last", 0), ("", 0)],
    "a module that raises": [("last", 0), ("", 0)],
}


@pytest.mark.parametrize("name", MODELS)
def test_each_call_is_seen_once(name: str, tmp_path: Path) -> None:
    one = seen(recorded(MODELS[name] + LOOP, tmp_path, modules=True))
    assert calls(one) == CALLS[name]
    model = one.watched.calls[-1]
    logits = one.watched.tensors[model.outputs[0]]
    assert (logits.shape, logits.trains) == ((4, 2), True)
    assert logits.gradient
    assert one.sums[model.outputs[0]].isfinite().all()


def test_a_tensor_that_goes_on_is_noted_once(tmp_path: Path) -> None:
    """What one module has returned and the next is given; ReLU has written to its input."""
    one = seen(recorded(MODELS["plain"] + LOOP, tmp_path, modules=True))
    linear, relu, dropout, last, model = one.watched.calls
    assert linear.outputs == relu.inputs
    assert relu.outputs != relu.inputs
    assert (relu.outputs, dropout.outputs, last.outputs) == (
        dropout.inputs, last.inputs, model.outputs,
    )  # fmt: skip
    assert one.watched.backward == (*model.outputs, *last.inputs, *relu.outputs, *linear.outputs)


def test_nothing_is_watched_unasked(tmp_path: Path) -> None:
    job = recorded(MODELS["plain"] + LOOP, tmp_path)
    assert job.modules(0, 1) is None


COMPILED = """
import torch._dynamo.utils as counted
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        self.two = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.last = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.last(self.two(self.one(x)))
model = Net()
model.one = torch.compile(model.one, backend="eager")
model.two.compile(backend="eager")
"""
TELL_COUNTS = """
print(json.dumps([counted.counters["stats"]["unique_graphs"], len(counted.counters["graph_break"]),
                  *(p.double().sum().item().hex() for p in model.parameters())]))
"""


@pytest.mark.parametrize(
    "whole", [pytest.param(False, marks=pytest.mark.sweep), True], ids=["parts", "whole"]
)
def test_of_what_is_compiled_the_borders_are_seen(whole: bool, tmp_path: Path) -> None:
    script = COMPILED + (
        "net, model = model, torch.compile(Net(), backend='eager')\n" if whole else ""
    )
    script += LOOP + "import json\n" + TELL_COUNTS
    alone = json.loads(run(script, tmp_path, watched=False))
    one = seen(recorded(script, tmp_path, modules=True))
    assert json.loads((tmp_path / "printed-True").read_text()) == alone
    assert alone[1] == 0
    if whole:
        assert (calls(one), one.watched.compiled) == ([("", 0)], ("",))
    else:
        assert calls(one) == [("one", 0), ("two", 0), ("last", 0), ("", 0)]
        assert one.watched.compiled == ("one", "two")
