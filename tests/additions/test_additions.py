"""What docs/whats-here.md says it takes to add something is what it takes: each row is done in a
copy, by the files that the table names and no other, and what was added is used.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distcheck.training.adapters.forms import FORMS
from distcheck.workloads.cells import CELLS
from tests.optional import needs_all

ROOT = Path(__file__).parents[2]
STRATEGIES = "distcheck.strategies"
QUICK = ("--world", "2", "--dtype", "float32", "--steps", "1", "--no-separate", "-q")


@dataclass(frozen=True)
class Added:
    """New files, lines put in after a line that is there, a command that uses it, and what it says.

    `named` are the words of the table's row by which the touched files are found there.
    """

    row: str
    named: tuple[str, ...]
    files: dict[str, str]
    use: tuple[str, ...]
    says: str
    lines: dict[str, tuple[str, str]] = field(default_factory=dict)
    code: int = 0


FORM = """
    Form(
        name="averages",
        example="f(model)",
        fits_row=lambda target: False,
        called="after backward",
        lacks="is not a function",
        note=", which averages",
    ),
"""
WORKLOAD = '''
"""One layer."""
from math import prod
from distcheck.workloads.mlp import MLP
from torch import nn

class Narrow(MLP):
    def model(self, *, sample_shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(sample_shape), classes))

workload = Narrow()
'''
STRATEGY = '''
"""A mean."""
from distcheck_strategies.allreduce import allreduce

def mine(model, step):
    allreduce(model, step)
'''
LAUNCHER = '''
"""Variables of a launcher that nobody has written."""
from distcheck.worlds.launchers import Launch, required_integer, tcp_address

NAME = "mine"

def detect(environ):
    if "MINE_RANK" not in environ:
        return None
    rank = required_integer(environ, "MINE_RANK", launcher=NAME)
    return Launch(launcher=NAME, rank=rank, world=required_integer(
                      environ, "MINE_RANKS", launcher=NAME),
                  ranks_here=(rank,), local_rank=0, local_world=1, meeting=tcp_address(environ),
                  owned=False)
'''
COMMAND = '''
"""`distcheck hello`."""
import click
from distcheck.cli.group import Command

@click.command("hello", cls=Command)
def command():
    """Greet."""
    click.echo("hello, ranks")
'''
FORMAT = '''
"""The verdict in one word."""

def render(document):
    return document["verdict"] + "\\n"
'''
BACKEND = '''
"""It needs a machine that is not here."""

def missing():
    return "backend mine needs a machine that is not here"
'''
CELL = '''

class Warm(_Perceptron):
    """A rate that is never 0."""

    must_happen = (LearningRateChanged(),)

    def schedule(self, optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
'''
DATA = '''
"""Files that nobody has."""
from distcheck.workloads.datasets.mnist import MNISTFiles

files = MNISTFiles()
'''
LAYER = '''
"""R once more, by another name."""
from distcheck.judge.oracles.rounding_bound import mean_of_step

def gradients(at):
    return mean_of_step(at)
'''
CHECK = '''
"""What the optimizer leaves is finite."""
from distcheck.judge.checks.comparison import Comparison, tensor_difference
from distcheck.judge.checks.matching import match_ranks
from distcheck.recordings.traces.layout import Kind

def is_finite(tensor):
    infinite = tensor_difference(float("inf"), 0.0, float("inf"), 0.0)
    return Comparison(tensor.numel(), first=None if tensor.isfinite().all() else infinite)

def compare(evidence, tally):
    for expectation in evidence.expectations:
        for index in range(len(evidence.trace.layout.model.parameters)):
            match_ranks(tally, evidence.trace, kind=Kind.PARAMETER, slot=expectation.step + 1,
                        step=expectation.step, index=index, ranks=evidence.with_data,
                        compare=is_finite)
'''

ADDED = {
    "oracle layer": Added(
        row="oracle layer",
        named=("judge/oracles/", "records/layers.py"),
        files={"distcheck/judge/oracles/mine.py": LAYER},
        lines={
            "distcheck/records/layers.py": (
                "        Layer(ROUNDING,",
                '        Layer("mine", "my own bound", "what I know", "mine", ("float32",)),',
            )
        },
        use=("verify", "--strategy", "allreduce", "--workload", "mlp", *QUICK[:-1], "-v"),
        says="my own bound",
    ),
    "check": Added(
        row="check",
        named=("judge/checks/", "ORDER"),
        files={"distcheck/judge/checks/finite.py": CHECK},
        lines={
            "distcheck/judge/checks/__init__.py": (
                '    "agreement": "",',
                '    "finite": "parameters",',
            )
        },
        use=("verify", "--strategy", "allreduce", "--workload", "mlp", *QUICK[:-1], "-v"),
        says="finite",
    ),
    "strategy": Added(
        row="strategy",
        named=("strategies/", "entry-points"),
        files={"strategies/mine.py": STRATEGY},
        lines={
            "pyproject.toml": (
                'allreduce = "distcheck_strategies.allreduce:allreduce"',
                'mine = "distcheck_strategies.mine:mine"',
            )
        },
        use=("verify", "--strategy", "mine", "--workload", "mlp", *QUICK),
        says="PASS    mine, world 2",
    ),
    "workload": Added(
        row="workload",
        named=("workloads/",),
        files={"distcheck/workloads/narrow.py": WORKLOAD},
        use=("verify", "--strategy", "allreduce", "--workload", "narrow", *QUICK),
        says="PASS    allreduce, world 2: narrow float32",
    ),
    "cell": Added(
        row="cell",
        named=("workloads/cells/", "CELLS", "contract.CellName"),
        files={},
        lines={
            "distcheck/workloads/cells/schedules.py": ("        return Layers(classes)", CELL),
            "distcheck/workloads/cells/__init__.py": (
                "CELLS: Mapping[str, Cell] = {",
                '    "warm": Cell(place="distcheck.workloads.cells.schedules:Warm", '
                'about="a rate that is never 0"),',
            ),
            "distcheck/contract.py": ("CellName = Literal[", '    "warm",'),
        },
        use=("verify", "--strategy", "allreduce", "--workload", "warm", *QUICK[:-4], "--steps", "3",
             "--no-separate", "-q"),
        says="PASS    allreduce, world 2: warm float32",
    ),
    "data set": Added(
        row="data set",
        named=("workloads/datasets/", "`__init__.py`"),
        files={"distcheck/workloads/datasets/mine.py": DATA},
        lines={"distcheck/workloads/datasets/__init__.py": ("FILE_DATASETS = (", "")},
        use=("list",),
        says="mine",
    ),
    "command": Added(
        row="command",
        named=("cli/commands/", "`__init__.py`"),
        files={"distcheck/cli/commands/hello.py": COMMAND},
        lines={"distcheck/cli/commands/__init__.py": ("COMMANDS = {", '    "hello": "Greet.",')},
        use=("hello",),
        says="hello, ranks",
    ),
    "launcher": Added(
        row="launcher",
        named=("worlds/launchers/", "`__init__.py`"),
        files={"distcheck/worlds/launchers/mine.py": LAUNCHER},
        lines={"distcheck/worlds/launchers/__init__.py": ("_LAUNCHERS = (", "")},
        use=("verify", "--strategy", "allreduce"),
        says="mine: rank 3 of 2 ranks",
        code=3,
    ),
    "backend": Added(
        row="backend",
        named=("backends/",),
        files={"distcheck/backends/mine.py": BACKEND},
        use=("verify", "--strategy", "allreduce", "--backend", "mine"),
        says="backend mine needs a machine that is not here",
        code=3,
    ),
    "form of code": Added(
        row="form of code",
        named=("training/adapters/forms/__init__.py",),
        files={},
        lines={"distcheck/training/adapters/forms/__init__.py": ("FORMS = (", FORM.strip("\n"))},
        use=("verify", "--strategy", "allreduce", "--workload", "mlp", *QUICK[:-1], "--as",
             "averages"),
        says="taken as: averages",
    ),
    "report format": Added(
        row="report format",
        named=("reports/", "files.FORMATS"),
        files={"distcheck/reports/word.py": FORMAT},
        lines={"distcheck/reports/files.py": ("FORMATS = {", '    "word": ("word", "A word."),')},
        use=("verify", "--strategy", "allreduce", "--workload", "mlp", *QUICK, "--word",
             "/dev/stderr"),
        says="pass",
    ),
}  # fmt: skip


def copied(folder: Path) -> Path:
    """A checkout of what is imported, so that nothing of it is written here."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("distcheck", "strategies"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "distcheck_strategies").symlink_to(folder / "strategies")
    return folder


def add(added: Added, folder: Path) -> None:
    """Does what the row says."""
    for name, text in added.files.items():
        assert not (folder / name).exists()
        (folder / name).write_text(text.lstrip("\n"))
    for name, (after, line) in added.lines.items():
        text = (folder / name).read_text()
        (found,) = [one for one in text.splitlines() if one.startswith(after)]
        changed = f"{found}\n{line}" if line else found.replace("(", '("mine", ', 1)
        (folder / name).write_text(text.replace(found, changed, 1))
    install(folder)


def install(folder: Path) -> None:
    """What installing the copy would make known: the strategies that pyproject.toml has gained."""
    before, after = (
        tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"][STRATEGIES]
        for root in (ROOT, folder)
    )
    lines = [f"{name} = {after[name]}" for name in after.keys() - before.keys()]
    made = folder / "added-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1\n")
    (made / "entry_points.txt").write_text("\n".join([f"[{STRATEGIES}]", *lines]) + "\n")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sweep) if "--strategy" in one.use and not one.code
        else name
        for name, one in ADDED.items()
    ],
)  # fmt: skip
def test_it_takes_what_the_table_says(name: str, tmp_path: Path) -> None:
    added = ADDED[name]
    (folder := tmp_path / "copy").mkdir()
    add(added, copied(folder))
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if name == "launcher":
        environ |= {"MINE_RANK": "3", "MINE_RANKS": "2", "MASTER_ADDR": "localhost",
                    "MASTER_PORT": "29500"}  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", "distcheck", *added.use],
        cwd=tmp_path, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    said = ran.stdout + ran.stderr
    assert ran.returncode == added.code, said
    assert re.search(rf"(^|\W){re.escape(added.says)}(\W|$)", said), said


NO_HOPE = """
[no-hope]
what = "a rank gives up"
when = ["a rank raises NoHopeError"]
repair = "hope"
suggestion = "hope"
wrong = "raise NoHopeError"
right = "pass"
"""
CAUSE = Added(
    row="cause",
    named=("records/causes/", "judge/diagnosis/"),
    files={},
    lines={
        "distcheck/judge/diagnosis/outcomes.py": (
            "    cause = bad[0]",
            '    if cause.error.startswith("NoHopeError"):\n'
            '        return [name_cause("no-hope", cause.error)]',
        ),
        "distcheck/records/causes/runs.toml": ("# Runs and exit states", NO_HOPE),
    },
    use=(),
    says="no-hope: NoHopeError: sync; hope",
)
USES_CAUSE = """
from distcheck.judge import diagnosis
from distcheck.records import CheckResult, Outcome
ends = (Outcome(rank=0, outcome="raised", error="NoHopeError: sync"),)
failed = [CheckResult(check="outcome", layer="-", verdict="fail")]
(found,) = diagnosis.diagnose(ends, failed)
print(f"{found.cause}: {found.evidence}; {found.suggestion}")
"""


def test_a_cause_takes_what_the_table_says(tmp_path: Path) -> None:
    (folder := tmp_path / "copy").mkdir()
    add(CAUSE, copied(folder))
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", USES_CAUSE],
        cwd=tmp_path, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.stdout.strip() == CAUSE.says, ran.stderr


SETTING = """
    most_cases: Annotated[
        int | None,
        Setting(kind=Annotated[int, Meta(ge=1)], takes="a number of cases", help="No more cases."),
    ] = None
"""
_FIELDS = '    """Settings of a comparison, with their defaults."""\n'
_BY_NAME = '    """Keyword arguments of `distcheck.verify(...)`, for type checkers."""\n'
# File: what stands there, and what it becomes.
OPTION = {
    "distcheck/plan/settings.py": [
        (_FIELDS, _FIELDS + SETTING),
        (_BY_NAME, f"{_BY_NAME}\n    most_cases: int | None\n"),
    ],
    "distcheck/plan/cases.py": [
        (
            "    return with_unique_ids(cases)\n",
            "    return with_unique_ids(cases)[: request.most_cases]\n",
        )
    ],
}
# The matrix on the command line and in a file; in Python, with no rank started.
USES_OPTION = """
import json, pathlib, sys
import distcheck
from distcheck.cli import main
from distcheck.testing import verifying

CASES = ["--strategy", "allreduce", "--world", "2"]

def planned(*words):
    sys.argv = ["distcheck", "plan", *words, "--json", "plan.json"]
    try:
        main()
    except SystemExit as left:
        assert not left.code, left.code
    return len(json.loads(pathlib.Path("plan.json").read_text())["cases"])

def verified(**settings):
    verifying.verify_cases = lambda cases, *rest: cases
    return len(distcheck.verify("allreduce", world=2, **settings))

pathlib.Path("two.toml").write_text('strategies = ["allreduce"]\\nworlds = [2]\\nmost_cases = 2\\n')
pathlib.Path("bad.toml").write_text('strategies = ["allreduce"]\\nmost_cases = 0\\n')
print("found", planned(*CASES) > 2, planned(*CASES, "--most-cases", "1"),
      planned("--config", "two.toml"), planned("--config", "two.toml", "--most-cases", "1"),
      verified() > 2, verified(most_cases=1))
planned("--config", "bad.toml")
"""


def test_an_option_takes_its_declaration_and_the_place_that_reads_it(tmp_path: Path) -> None:
    copied(folder := tmp_path / "copy")
    for name, edits in OPTION.items():
        text = (folder / name).read_text()
        for before, after in edits:
            assert text.count(before) == 1, name
            text = text.replace(before, after)
        (folder / name).write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", USES_OPTION],
        cwd=tmp_path, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert "found True 1 2 1 True 1\n" in ran.stdout, ran.stderr
    assert "bad.toml: most_cases is 0; most_cases takes a number of cases" in ran.stderr
    rows = (ROOT / "docs" / "whats-here.md").read_text().splitlines()
    (row,) = [line for line in rows if line.startswith("| option of `verify` |")]
    assert "plan/settings.py" in row
    assert len(OPTION) == 2


@pytest.mark.parametrize("added", [*ADDED.values(), CAUSE], ids=lambda added: added.row)
def test_the_table_names_each_place_that_is_touched(added: Added) -> None:
    rows = (ROOT / "docs" / "whats-here.md").read_text().splitlines()
    (row,) = [line for line in rows if line.startswith(f"| {added.row} |")]
    assert all(word in row for word in added.named), row
    assert len(added.files) + len(added.lines) <= len(added.named)


def test_each_kind_of_addition_is_made() -> None:
    """Those by which distcheck is meant to grow; others of the table are for its own rooms."""
    made = {"option of `verify`", CAUSE.row, *(added.row for added in ADDED.values())}
    assert made >= {
        "strategy", "workload", "check", "oracle layer", "cause", "launcher", "backend",
        "report format", "command", "cell", "form of code",
    }  # fmt: skip


def test_pages_have_a_row_for_every_strategy_cell_and_form() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    strategies = project["entry-points"]["distcheck.strategies"]
    pages = {
        "strategies/README.md": strategies,
        "docs/cells.md": CELLS,
        "docs/forms.md": [form.name for form in FORMS],
    }
    for page, names in pages.items():
        text = (ROOT / page).read_text()
        assert [name for name in names if f"`{name}`" not in text] == [], page


@needs_all
def test_each_row_names_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "whats-here.md").read_text()
    table = page.partition("## To add one")[2].partition("\n\n[strategies")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row[-1])
        assert named, row[0]
        assert all((ROOT / name).exists() for name in named), row[0]
