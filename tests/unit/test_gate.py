"""The matrix of a gate: what a file may say, what comes of it, and how it is split."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from distcheck.cli.commands.plan import command as plan_command
from distcheck.errors import CannotRunError, UsageError
from distcheck.plan.configuration import Configuration, read_configuration
from distcheck.plan.costs import estimated_s
from distcheck.plan.matrix import Planned, assign_shards, digest_of_run, parse_shard, plan_run
from distcheck.records import Case
from distcheck.records.case import with_unique_ids
from distcheck.worlds.launchers import Launch

SYNC = "def sync(model):\n    pass\n"

USUAL = {
    "strategies": (), "worlds": (4,), "workloads": (), "steps": None, "dtype": None,
    "data": "synthetic", "data_dir": None, "download": False, "batch": 256, "seed": 0,
    "backend": "gloo", "device": "cpu", "deadline_s": 30.0, "form": None, "arguments": (),
    "variables": (), "finish": None, "reset": None, "without_data": (), "loss": "mean",
    "ranks_here": None, "separate": True,
}  # fmt: skip

MATRIX = """
[tool.distcheck]
strategies = ["ddp", "code/sync.py:sync", "fsdp"]
worlds = [2, 4]
workloads = ["exact", "mlp"]
dtypes = ["float32", "bfloat16"]
seeds = [0, 7]
batch = 64
deadline_s = 12

[tool.distcheck.strategy."code/sync.py:sync"]
worlds = [3]
seeds = [5]
as = "model"
arg = { lr = 0.5, names = ["a"] }
loss = "sum/global"

[tool.distcheck.strategy.fsdp]
dtypes = ["float64"]
backends = ["gloo"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sync.py").write_text(SYNC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "pyproject.toml") -> None:
    (folder / name).write_text(text)


def plan(
    *, launch: Launch | None = None, config: str | None = None, shard: str | None = None,
    **typed: object,
) -> Planned:  # fmt: skip
    return plan_run(
        {**USUAL, **typed}, given=frozenset(typed), launch=launch, config=config, shard=shard
    )


def launch_of(world: int) -> Launch:
    return Launch(
        launcher="torchrun", rank=0, world=world, ranks_here=(0,), local_rank=0, local_world=world,
        meeting="tcp://127.0.0.1:1",
    )  # fmt: skip


def test_a_matrix_says_where_reruns_are(folder: Path) -> None:
    """For all, or for one; and what is typed goes first."""
    write(folder, '[tool.distcheck]\nstrategies = ["ddp"]\nseparate = false\n')
    assert {case.separate for case in plan().cases} == {False}
    assert {case.separate for case in plan(separate=True).cases} == {True}
    own = 'strategies = ["ddp", "fsdp"]\nstrategy.fsdp.separate = false\n'
    write(folder, f"[tool.distcheck]\n{own}")
    assert {(c.strategy, c.separate) for c in plan().cases} == {("ddp", True), ("fsdp", False)}


def test_a_matrix_becomes_cases(folder: Path) -> None:
    write(folder, MATRIX)
    cases = plan().cases
    cells = {(c.strategy, c.world, c.workload, c.dtype, c.seed) for c in cases}
    expected = {
        ("ddp", world, workload, dtype, seed)
        for world in (2, 4)
        for workload, dtype in (("exact", "float32"), ("mlp", "float32"), ("mlp", "bfloat16"))
        for seed in (0, 7)
    }
    expected |= {
        ("code/sync.py:sync", 3, workload, dtype, 5)
        for workload, dtype in (("exact", "float32"), ("mlp", "float32"), ("mlp", "bfloat16"))
    }
    expected |= {
        ("fsdp", world, workload, "float64", seed)
        for world in (2, 4)
        for workload in ("exact", "mlp")
        for seed in (0, 7)
    }
    assert cells == expected
    assert len(cases) == len(expected) == len({case.id for case in cases})
    assert {(c.batch, c.deadline_s) for c in cases} == {(64, 12.0)}
    own = next(c for c in cases if c.world == 3)
    assert own.adaptation.form == "model"
    assert own.adaptation.arguments == (("lr", "0.5"), ("names", "['a']"))
    assert own.loss == "sum/global"
    assert {c.loss for c in cases if c.strategy != own.strategy} == {"mean"}
    siblings = [case.sibling_key for case in cases]
    assert [a for a, b in pairwise(siblings) if a != b] == list(dict.fromkeys(siblings))[:-1], (
        "those that are shown together come one after the other"
    )


def test_the_command_line_overrides_and_narrows(folder: Path) -> None:
    write(folder, MATRIX)
    typed = plan(strategies=("code/sync.py:sync",), worlds=(2,), dtype="float32", batch=32)
    assert {(c.strategy, c.world, c.dtype, c.batch, c.seed) for c in typed.cases} == {
        ("code/sync.py:sync", 2, "float32", 32, 5)
    }
    assert {c.adaptation.form for c in typed.cases} == {"model"}
    spelled = plan(strategies=("./code/../code/sync.py:sync",), dtype="float32", worlds=(2,))
    assert {c.adaptation.form for c in spelled.cases} == {"model"}
    other = plan(strategies=("allreduce",))
    assert {c.batch for c in other.cases} == {64}, "what holds for all holds for one more"


def test_named_files_and_paths_from_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, 'strategies = ["code/sync.py:sync"]\nworlds = [2]\n', "gate.toml")
    assert {c.strategy for c in plan(config="gate.toml").cases} == {"code/sync.py:sync"}
    with pytest.raises(UsageError, match="no strategy was given"):
        plan()
    write(folder, MATRIX)
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    found = plan()
    assert found.file == "../pyproject.toml"
    assert "../code/sync.py:sync" in {case.strategy for case in found.cases}


def test_without_a_file_nothing_has_changed(folder: Path) -> None:
    write(folder, "[project]\nname = 'x'\n")
    assert read_configuration(None) == Configuration()
    ids = [case.id for case in plan(strategies=("allreduce",)).cases]
    assert ids == [
        "allreduce-w4-exact-float32", "allreduce-w4-cnn-float32",
        "allreduce-w4-composite-float32", "allreduce-w4-composite-float64",
        "allreduce-w4-twelve_steps-float32", "allreduce-w4-absent_on_some-float32",
    ]  # fmt: skip


def test_strategies_may_be_the_tables_alone(folder: Path) -> None:
    write(folder, "[tool.distcheck.strategy.ddp]\nworlds = [3]\n")
    assert {(c.strategy, c.world) for c in plan().cases} == {("ddp", 3)}


def test_a_launcher_has_made_the_world(folder: Path) -> None:
    write(folder, MATRIX)
    four = plan(launch=launch_of(4), worlds=(4,))
    assert {(c.strategy, c.world) for c in four.cases} == {("ddp", 4), ("fsdp", 4)}
    three = plan(launch=launch_of(3), worlds=(3,))
    assert {c.world for c in three.cases} == {3}
    write(folder, "[tool.distcheck.strategy.ddp]\nworlds = [2]\n")
    with pytest.raises(UsageError, match=r"torchrun started 3 ranks; pyproject\.toml has no"):
        plan(launch=launch_of(3), worlds=(3,))


SLIPS = [
    ("strategis = ['ddp']", "unknown key tool.distcheck.strategis; did you mean strategies?"),
    ("qqq = 1", "unknown key tool.distcheck.qqq; known are strategies, worlds, workloads"),
    ("worlds = 4", "tool.distcheck.worlds is 4; tool.distcheck.worlds takes numbers of ranks"),
    ("worlds = [2, 'x']", r"tool.distcheck.worlds\[1\] is 'x'; tool.distcheck.worlds takes"),
    ("worlds = []", r"tool.distcheck.worlds is \[\]; tool.distcheck.worlds takes numbers of"),
    ("worlds = [0]", r"tool.distcheck.worlds\[0\] is 0; tool.distcheck.worlds takes"),
    ("worlds = [true]", r"tool.distcheck.worlds\[0\] is True"),
    ("seeds = [-1]", r"tool.distcheck.seeds\[0\] is -1; tool.distcheck.seeds takes integers"),
    ("batch = 'big'", "tool.distcheck.batch is 'big'; tool.distcheck.batch takes a number"),
    ("deadline_s = 0", "tool.distcheck.deadline_s is 0; tool.distcheck.deadline_s takes seconds"),
    ("dtypes = ['float23']", r"dtypes\[0\]: unknown dtype 'float23'.*did you mean float32\?"),
    ("backends = ['glo']", r"backends\[0\]: unknown backend 'glo'.*did you mean gloo\?"),
    ("workloads = ['cnnn']", r"workloads\[0\]: unknown workload 'cnnn'.*did you mean cnn\?"),
    ("strategies = ['dpp']", r"strategies\[0\]: unknown strategy 'dpp'.*did you mean ddp\?"),
    ("strategies = ['no.py:f']", r"strategies\[0\]: strategy file no.py does not exist"),
    ("strategies = ['code/sync.py']", "names a file but no object in it; pass code/sync.py:NAME"),
    ("loss = 'sum'",
     "tool.distcheck.loss: unknown loss 'sum'; known are mean, mean/world, sum/global"),
    ("as = 'modle'", "tool.distcheck.as: unknown form 'modle' .did you mean model"),
    ("data = 'cifar'", "tool.distcheck.data: unknown data 'cifar' .did you mean cifar10"),
    ("device = 'gpu'", "tool.distcheck.device: unknown device 'gpu' .*known are cpu, cuda"),
    ("arg = ['a']", r"tool.distcheck.arg is \['a'\]; tool.distcheck.arg takes a table"),
    ("arg = { day = 1979-05-27 }",
     r"\[tool.distcheck\]: --arg day: .* cannot be sent to another process"),
    ("strategy.ddp = 3", 'tool.distcheck.strategy."ddp" is 3; it takes a table'),
    ("strategy.ddp.world = [2]", 'strategy."ddp".world; did you mean worlds?'),
    ("strategy.ddp.data = 'mnist'", 'unknown key tool.distcheck.strategy."ddp".data'),
    ("strategies = ['ddp']\nstrategy.dpp.worlds = [2]",
     'strategy."dpp" is not one of tool.distcheck.strategies, ddp; did you mean ddp?'),
    ("batch = 2", "--batch 2 is smaller than --world 4.*with pyproject.toml, .tool.distcheck"),
    ("strategy.ddp.batch = 2", '--batch 2 is smaller.*with pyproject.toml, .tool.*strategy."ddp'),
    ("dtypes = ['bfloat16']\nworkloads = ['exact']", "exact does not run in bfloat16"),
    ("strategies = []", r"tool.distcheck.strategies is \[\]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), SLIPS, ids=[text for text, _ in SLIPS])
def test_slips_name_the_key_and_what_it_takes(folder: Path, text: str, message: str) -> None:
    strategies = "" if "strategies =" in text or "strategy." in text else 'strategies = ["ddp"]\n'
    write(folder, f"[tool.distcheck]\n{strategies}{text}\n")
    with pytest.raises(UsageError, match=message) as caught:
        plan()
    assert "pyproject.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gate.toml", "worlds = [", "gate.toml is not TOML"),
        ("pyproject.toml", "[project]\n", r"has no \[tool.distcheck\]; add the matrix there"),
        ("pyproject.toml", "[tool]\ndistcheck = 3\n", "tool.distcheck is 3; it takes a table"),
        ("nowhere/gate.toml", "", "--config nowhere/gate.toml cannot be read: No such file"),
        ("gate.toml", "worlds = [2]\n", "gate.toml: strategies is missing, and no --strategy"),
    ],
)
def test_files_that_hold_no_matrix(folder: Path, name: str, text: str, message: str) -> None:
    if "/" not in name:
        write(folder, text, name)
    with pytest.raises(UsageError, match=message):
        plan(config=name)


def test_a_backend_that_is_not_here_is_no_slip(folder: Path) -> None:
    write(folder, "[tool.distcheck]\nstrategies = ['ddp']\nbackends = ['nccl']\n")
    with pytest.raises(CannotRunError):
        plan()


@pytest.mark.parametrize("shard", ["", "2", "0/4", "5/4", "2/0", "-1/4", "a/b", "1/2/3", "1.0/2",
                                   "1/99999999", "٢/٤"])  # fmt: skip
def test_parts_that_are_none(shard: str) -> None:
    with pytest.raises(UsageError, match="expected I/N with I from 1 to N, for example 2/4"):
        parse_shard(shard)


def test_a_part_without_a_case_is_refused(folder: Path) -> None:
    write(folder, "[tool.distcheck]\nstrategies = ['ddp']\nworlds = [2, 3]\n")
    assert len(plan(shard="2/3").cases) == 6
    with pytest.raises(
        UsageError, match="--shard 3/3 has nothing to run; the 12 cases make 2 parts"
    ):
        plan(shard="3/3")


def some_cases(cells: list[tuple[str, int, str, int]]) -> list[Case]:
    return with_unique_ids(
        [
            Case(id=f"{s}-w{w}-{m}-float32", strategy=s, world=w, workload=m, seed=seed)
            for s, w, m, seed in cells
        ]
    )


CELLS = st.lists(
    st.tuples(
        st.sampled_from(["ddp", "a/sync.py:f", "b/sync.py:f", "fsdp"]),
        st.integers(1, 8),
        st.sampled_from(["exact", "mlp", "cnn", "vgg11", "own.py:w"]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=40,
)


@given(CELLS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_every_case_is_in_one_part_whatever_the_order(
    cells: list[tuple[str, int, str, int]], parts: int, chance: random.Random
) -> None:
    cases = some_cases(cells)
    assert len({case.id for case in cases}) == len(cases) == len(set(cells))
    assigned = assign_shards(cases, parts)
    assert set(assigned) == {case.id for case in cases}
    groups = {case.sibling_key for case in cases}
    assert set(assigned.values()) == set(range(1, min(parts, len(groups)) + 1))
    for group in groups:
        assert len({assigned[case.id] for case in cases if case.sibling_key == group}) == 1
    shuffled = list(cells)
    chance.shuffle(shuffled)
    again = some_cases(shuffled)
    assert assign_shards(again, parts) == assigned
    assert digest_of_run(again) == digest_of_run(cases)


@given(CELLS, st.integers(1, 6))
def test_parts_are_balanced(cells: list[tuple[str, int, str, int]], parts: int) -> None:
    """Graham's bound: no part holds more than the mean and the largest group."""
    cases = some_cases(cells)
    assigned = assign_shards(cases, parts)
    loads, groups = [0.0] * (parts + 1), dict.fromkeys((c.sibling_key for c in cases), 0.0)
    for case in cases:
        loads[assigned[case.id]] += estimated_s(case)
        groups[case.sibling_key] += estimated_s(case)
    assert max(loads) <= sum(groups.values()) / parts + max(groups.values()) + 1e-6


def test_parts_know_the_whole(folder: Path) -> None:
    write(folder, MATRIX)
    parts = [plan(shard=f"{n}/3") for n in (1, 2, 3)]
    whole = plan()
    assert {part.whole.digest for part in parts} == {whole.whole.digest}
    assert sorted(c.id for part in parts for c in part.cases) == sorted(c.id for c in whole.cases)
    assert [part.whole.shard for part in parts] == [1, 2, 3]
    assert len({part.whole.cases for part in parts}) == 1
    (folder / "code" / "sync.py").write_text(SYNC + "# changed\n")
    assert plan().whole.digest != whole.whole.digest, "other code is another plan"


def test_plan_prints_what_would_run(folder: Path) -> None:
    write(folder, MATRIX)
    ran = CliRunner().invoke(plan_command, ["--shard", "1/2"], standalone_mode=False)
    assert ran.return_value == 0
    first, heading, *rows, total, legend = ran.output.splitlines()
    assert "cases from pyproject.toml, part 1 of 2 of 23; digest" in first
    assert heading.split() == ["case", "batch", "steps", "seconds", "comparisons"]
    assert len(rows) == int(first.split()[1])
    assert all("~" in row for row in rows)
    assert "rough" in total
    assert legend.strip().startswith("bitwise applies if")
    one = ["--strategy", "code/sync.py:sync", "--workload", "exact", "--dtype", "float32"]
    ran = CliRunner().invoke(plan_command, one, standalone_mode=False)
    assert ran.output.startswith("plan    1 case from pyproject.toml; digest")


def test_what_a_file_says_of_a_typed_strategy_is_said(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(
        '[tool.distcheck]\nstrategies = ["ddp", "allreduce"]\nworkloads = ["mlp"]\nbatch = 255\n'
        "[tool.distcheck.strategy.allreduce]\nworlds = [2, 3]\n"
    )
    found = plan(strategies=("allreduce",), batch=64)
    assert found.from_file == "workloads mlp, worlds 2 3"
    assert plan(strategies=("ddp",)).from_file == "workloads mlp, batch 255"
    assert plan().from_file == "", "a matrix is run as it is written"
