"""Operators that are heard: the first that makes other bits of the same, and that a job is what it
is without.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from distcheck.judge.divergence.job_recordings import (
    compare_recordings,
    divergent_op,
    first_divergent_op,
)
from distcheck.recordings.jobs.records import COMPILED, OpCall, RecordedOps
from tests.job.test_modules_watched import COMPILED as PARTS
from tests.job.test_modules_watched import LOOP, MODELS, TELL, TELL_COUNTS
from tests.job.worlds import record

HEAD = """
import sys, os, torch
import torch.nn.functional as F
torch.manual_seed(0)
def batch(number, rows=4):
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(rows, 3, generator=drawn), torch.randint(0, 2, (rows,), generator=drawn)
def optimizer_of(*models):
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
"""


EVERYDAY = ("plain", "checkpoints", "mapped, nested and complex")


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.sweep) for n in MODELS]
)
def test_a_job_whose_operators_are_heard_has_the_same_bits(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + MODELS[name] + LOOP + TELL)
    heard = {"modules": True, "ops": True, "keep_going": True}
    alone = record(script, tmp_path / "alone", world=1, keep_going=True)
    job = record(script, tmp_path / "heard", world=1, **heard)
    printed = [(one.folder / "printed").read_text() for one in (alone, job)]
    assert json.loads(printed[1]) == json.loads(printed[0])
    ops = job.records[0, 1].ops
    assert ops is not None
    assert {"forward", "the loss", "backward"} <= {one.part for one in ops.calls}
    assert {one.module for one in ops.calls} >= {"", "last" if "Net" in MODELS[name] else "0"}


TRAIN = """
how, other = sys.argv[1:]
noise = torch.Generator()
noise.manual_seed(int(other))
class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        return torch.ops.planted.noisy(g) if how == "backward" else g
@torch.library.custom_op("planted::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 1e-7 * int(other)
noisy.register_autograd(lambda ctx, g: g)
class Middle(torch.nn.Linear):
    def forward(self, x):
        h = Added.apply(super().forward(x))
        if how == "draws": h = h + 1e-7 * torch.randn(h.shape, generator=noise)
        if how == "forward": h = torch.ops.planted.noisy(h)
        if how == "data": h = h + torch.frombuffer(bytearray([int(other)] * 4), dtype=torch.uint8)
        if how == "others" and other == "2": h = h * 1.5
        return h
model = torch.nn.Sequential(torch.nn.Linear(3, 4), Middle(4, 4), torch.nn.Linear(4, 2))
"""
FOUND = {
    "same": "",
    "forward": "planted.noisy in 1: its inputs are bit-identical, but its outputs are not",
    "backward": "planted.noisy, in backward: its inputs are bit-identical, but its outputs are not",
    "draws": "aten.randn.generator in 1 draws different random numbers than in the earlier job",
    "data": "inputs of aten.add.Tensor in 1 are not bit-identical; they come from no operator",
    "others": "different operators run: ",
}


@pytest.mark.parametrize(
    "how", [h if h == "forward" else pytest.param(h, marks=pytest.mark.sweep) for h in FOUND]
)
def test_the_first_operator_that_parts_is_named(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + TRAIN + LOOP)
    one, two = (
        record(script, tmp_path / other, how, other, world=1, modules=True, ops=True, kept=True)
        for other in "12"
    )
    if how == "same":
        other = record(script, tmp_path / "again", how, "1", world=1, modules=True, ops=True)
        assert said_of([(0, 0, one.records[0, 0].ops, other.records[0, 0].ops)]).startswith(  # type: ignore[list-item]
            "none of "
        )
        return
    walk = compare_recordings(one, two, [])
    assert FOUND[how] in walk.first_divergent_op()[1], walk.first_divergent_op()[1]
    assert "(step 0, rank 0, number " in walk.first_divergent_op()[1]


@pytest.mark.sweep
def test_what_is_compiled_is_one_operator(tmp_path: Path) -> None:
    """It is compiled as it is without, and its module is named."""
    script = tmp_path / "train.py"
    script.write_text(HEAD + PARTS.replace('"eager"', '"aot_eager"') + LOOP + "import json\n"
                      + TELL_COUNTS)  # fmt: skip
    heard = {"modules": True, "ops": True, "keep_going": True}
    alone = record(script, tmp_path / "alone", world=1, keep_going=True)
    job = record(script, tmp_path / "heard", world=1, **heard)
    printed = [(one.folder / "printed").read_text() for one in (alone, job)]
    assert json.loads(printed[1]) == json.loads(printed[0])
    ops = job.records[0, 1].ops
    assert ops is not None
    assert [one.module for one in ops.calls if one.name == COMPILED] == ["one", "two"]


def said_of(steps: Any) -> str:
    return first_divergent_op(steps)[1]


def op(name: str, inputs: str, outputs: str, **about: str) -> OpCall:
    return OpCall(name, inputs, outputs, **about)  # type: ignore[arg-type]


def test_what_comes_from_an_exchange_or_a_region_is_said() -> None:
    exchange = op("c10d.allreduce_", "a", "")
    later = [op("aten.div", given, "c", part="backward") for given in ("b", "x")]
    one, two = (RecordedOps((exchange, last)) for last in later)
    assert "they come from communication, c10d.allreduce_" in said_of([(3, 1, one, two)])
    one, two = (RecordedOps((op(COMPILED, "a", made, module="net.0"),)) for made in "bc")
    assert "within net.0, which torch.compile has compiled" in said_of([(0, 0, one, two)])


def test_of_ranks_the_one_that_makes_other_bits_is_named() -> None:
    given = [RecordedOps((op("aten.div", one, "c"),)) for one in "ab"]
    made = [RecordedOps((op("aten.mm", "a", "a"), op("aten.mul", "a", one))) for one in "ab"]
    said = said_of([(0, 0, *given), (0, 1, *made), (1, 0, *given)])  # type: ignore[arg-type]
    assert "aten.mul: its inputs are bit-identical" in said
    assert "(step 0, rank 1, number 1)" in said
    assert divergent_op(made[0], made[0]) is None
