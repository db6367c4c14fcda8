"""torch's compiler is imported where it is used, and behaves as if it had been there."""

import subprocess
import sys

import pytest

_BEGIN = """
import sys
import torch, torch.distributed as dist
from distcheck.worlds.local import late_compiler
late_compiler.install()
assert not late_compiler.is_loaded()
"""
_TRAINS = """
import inspect, torch.utils.data
inspect.getmodule(inspect.stack()[0][0])
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
from distcheck.machine import seeds
seeds.pin_determinism()
assert torch.are_deterministic_algorithms_enabled()
assert late_compiler.modules_to_share() == []
assert not late_compiler.is_loaded(), "plain training loaded it"
assert "sympy" not in sys.modules
"""


def _runs(program: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _BEGIN + program], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.sweep
def test_plain_training_does_without_it() -> None:
    """And what is compiled afterwards is compiled: a function that torch keeps from its compiler is
    called through the compiler from then on.
    """
    _runs(
        _TRAINS
        + """
kept = sys.modules["torch._dynamo"]
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
assert late_compiler.is_loaded() and torch._dynamo is sys.modules["torch._dynamo"] is not kept
assert kept.graph_break is torch._dynamo.graph_break and kept.config is torch._dynamo.config
assert torch._inductor.config.deterministic, "it was imported before determinism was asked for"
asked = []
real = torch._dynamo.disable
torch._dynamo.disable = lambda fn, *a, **k: asked.append(fn.__name__) or real(fn, *a, **k)
optimizer.zero_grad()
optimizer.step()
assert asked == ["zero_grad"], asked
optimizer.zero_grad()
assert asked == ["zero_grad"], asked
"""
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    "use",
    [
        "assert torch._dynamo.is_compiling() is False",
        "import torch._dynamo.config as found; assert found is torch._dynamo.config",
        "late_compiler.load(); late_compiler.load()",
    ],
)
def test_any_use_of_it_loads_it_and_it_is_deterministic(use: str) -> None:
    _runs(
        """
import os
child = os.fork()
if child == 0:
    from distcheck.machine import seeds
    seeds.pin_determinism()
    assert "torch._inductor.config" not in sys.modules
    import torch._inductor.config
    assert torch._inductor.config.deterministic
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
child = os.fork()
if child == 0:
    USE
    assert late_compiler.is_loaded() and late_compiler.modules_to_share() == ["torch._dynamo"]
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""".replace("USE", use)
    )
