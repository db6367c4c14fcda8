"""What differs between the ranks of a world, and that the same seed makes it again."""

import ast
import subprocess
import sys

import pytest

from distcheck.machine.seeds import derive
from distcheck.worlds.local.helper_process import shuffled_variables
from distcheck.worlds.rendezvous import Rendezvous, environment_of
from distcheck.worlds.surroundings import (
    FACTORS,
    HASH_SEED,
    HASH_SEEDS,
    TOGETHER,
    Surroundings,
    separate,
)

ALL = separate(7, delayed=True)
# What code under test is likely to have in a set of two.
PAIRS = [
    ("weight", "bias"), ("fp32", "fp16"), ("float32", "bfloat16"), ("fp32", "bf16"),
    ("conv", "fc"), ("a", "b"), ("0", "1"), ("encoder", "decoder"), ("decay", "no_decay"),
    ("norm", "other"), ("fc.weight", "fc.bias"), ("fc1", "fc2"), ("dense", "sparse"),
    ("head", "body"), ("q", "k"), ("float32", "float16"), ("torch.float32", "torch.bfloat16"),
    ("0.weight", "0.bias"), ("local", "remote"), ("small", "large"),
]  # fmt: skip


def orders(seed: int) -> list[list[str]]:
    program = f"print([list(set(pair)) for pair in {PAIRS}])"
    environment = {"PYTHONHASHSEED": str(seed)}
    said = subprocess.run(
        [sys.executable, "-S", "-c", program], env=environment, capture_output=True, check=True
    )
    return list(ast.literal_eval(said.stdout.decode()))


def test_small_sets_have_other_orders_under_the_two_seeds() -> None:
    """Two seeds that were drawn would give half of them one order."""
    one, two = map(orders, HASH_SEEDS)
    assert sum(a != b for a, b in zip(one, two, strict=True)) >= 15
    assert len({HASH_SEED, *HASH_SEEDS}) == 3


def test_together_nothing_differs() -> None:
    for rank in range(5):
        assert TOGETHER.interpreter_of(rank) is None
        assert TOGETHER.order_seed(rank) is None
        assert TOGETHER.memory_seed(rank) is None
    assert (TOGETHER.nodes_of(4), TOGETHER.delays(4)) == (1, ())


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_the_two_ranks_of_a_strided_group_have_other_interpreters(stride: int) -> None:
    """0 and 1, 2 and 3; and 0 and 2, 1 and 3, as in a grid of 2 by 2."""
    for rank in range(2 * stride):
        if not rank & stride:
            assert ALL.interpreter_of(rank) != ALL.interpreter_of(rank + stride)


@pytest.mark.parametrize("world", range(2, 17))
def test_every_world_has_both_interpreters(world: int) -> None:
    assert {ALL.interpreter_of(rank) for rank in range(world)} == {0, 1}


@pytest.mark.parametrize(
    ("world", "machines"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 5), (6, 2), (9, 3), (16, 2)]
)
def test_machines_have_the_same_number_of_ranks(world: int, machines: int) -> None:
    """Launchers start as many on each; code may rely on it."""
    assert ALL.nodes_of(world) == machines
    assert world % machines == 0


def test_ranks_are_numbered_as_launchers_do() -> None:
    meeting = [
        Rendezvous(backend="gloo", rank=rank, world=4, host="h", port=1, deadline_s=1)
        for rank in range(4)
    ]
    found = [environment_of(one, nodes=ALL.nodes_of(4)) for one in meeting]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert ["".join(one[name] for name in names) for one in found] == [
        "00202", "11202", "20212", "31212",
    ]  # fmt: skip
    alone = environment_of(meeting[3])
    assert [alone[name] for name in names] == ["3", "3", "4", "0", "1"]


def test_every_rank_is_late_and_by_a_few_milliseconds() -> None:
    delays = ALL.delays(4)
    assert {delay.rank for delay in delays} == set(range(4))
    assert {delay.collective == 0 for delay in delays} == {True, False}
    assert all(1 <= delay.ms <= 4 for delay in delays)
    assert len({(delay.collective, delay.ms) for delay in delays}) > 2
    assert (
        ALL.delays(4) == separate(7, delayed=True).delays(4) != separate(8, delayed=True).delays(4)
    )


def test_a_persons_own_delays_leave_the_rerun_without() -> None:
    undelayed = separate(7, delayed=False)
    assert undelayed.delays(4) == ()
    assert set(undelayed.factors) == set(FACTORS) - {"delays"}


def test_an_order_of_the_environment_is_drawn_and_loses_nothing() -> None:
    variables = {f"NAME_{n}": str(n) for n in range(30)}
    assert list(shuffled_variables(variables, None)) == list(variables)
    seeds = [ALL.order_seed(rank) for rank in range(4)]
    drawn = [shuffled_variables(variables, seed) for seed in seeds]
    assert all(one == variables for one in drawn)
    assert len({tuple(one) for one in drawn}) == 4
    assert list(drawn[0]) == list(shuffled_variables(variables, derive(7, "environment", 0)))


def test_the_line_says_what_differs_and_no_more() -> None:
    assert ALL.describe(4) == (
        "in separate interpreters: hash seeds 106 and 148 (first world: 0), LOCAL_RANK as on 2 "
        "machines with 2 ranks, different memory addresses, a different order of the environment, "
        "ranks up to 7 ms delayed"
    )
    one = Surroundings(("interpreters", "nodes"), 7)
    assert one.describe(1) == "in separate interpreters: hash seed 106 (first world: 0)"
    assert one.describe(3).endswith("LOCAL_RANK as on 3 machines with 1 rank")
