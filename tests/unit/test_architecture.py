"""The shape of the house: who may import whom, what stays light, how long things may get."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "distcheck"
MODULES = sorted(PACKAGE.rglob("*.py"))
STRATEGIES = sorted((ROOT / "strategies").glob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            place = "." * node.level + node.module  # a neighbour's name begins with a dot
            found |= {place, *(f"{place}.{alias.name}" for alias in node.names)}
    return found


def of(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).glob("*.py"))


def identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_distcheck_never_imports_strategies(path: Path) -> None:
    assert not {name for name in imports(path) if name.startswith(("strategies", "distcheck_str"))}


@pytest.mark.parametrize("path", STRATEGIES, ids=identify)
def test_strategies_import_the_contract_and_torch_only(path: Path) -> None:
    own = {name for name in imports(path) if name.startswith("distcheck")}
    assert all(name.startswith("distcheck.contract") for name in own)
    far = {name.partition(".")[0] for name in imports(path) if not name.startswith(".")}
    others = far - set(sys.stdlib_module_names)
    own_library = {"mpi4py"} if path.stem == "mpi_allreduce" else set()
    assert others <= {"torch", "distcheck"} | own_library


@pytest.mark.parametrize("path", of("judge/checks"), ids=identify)
def test_checks_launch_nothing(path: Path) -> None:
    forbidden = ("subprocess", "multiprocessing", "os", "time", "distcheck.worlds", "distcheck.run")
    assert not {name for name in imports(path) if name.startswith(forbidden)}


@pytest.mark.parametrize("path", [*of("reports"), *of("reports/pictures")], ids=identify)
def test_reports_decide_nothing(path: Path) -> None:
    allowed = (
        "distcheck.records", "distcheck.errors", "distcheck.reports", "distcheck.judge.checks.mer",
    )  # fmt: skip
    own = {name for name in imports(path) if name.startswith("distcheck.")}
    assert {name for name in own if not name.startswith(allowed)} <= {"distcheck.judge.checks"}


@pytest.mark.parametrize("path", of("judge/oracles"), ids=identify)
def test_oracles_know_no_strategy_and_no_loop(path: Path) -> None:
    forbidden = ("distcheck.training.loop", "distcheck.training.recorder", "distcheck_strategies")
    assert not {name for name in imports(path) if name.startswith(forbidden)}


def test_the_lattice_oracle_shares_nothing_with_its_workload() -> None:
    found = imports(PACKAGE / "judge" / "oracles" / "lattice.py")
    assert not {name for name in found if name.startswith("torch")}
    own = {name for name in found if name.startswith("distcheck")}
    assert own == {"distcheck.contract", "distcheck.contract.Contract"}


IN_RANKS = ("availability.py", "rank.py")  # all the rest of the probes is plain Python


@pytest.mark.parametrize(
    "path", [path for path in of("backend_probe") if path.name not in IN_RANKS], ids=identify
)
def test_what_is_owed_of_a_backend_is_known_without_torch(path: Path) -> None:
    assert not {name for name in imports(path) if name.partition(".")[0] in ("torch", "numpy")}


LIGHT = (
    "distcheck",
    "distcheck.cli",
    "distcheck.plan.cases",
    "distcheck.verification.run",
    "distcheck.cli.show_and_keep",
    "distcheck.cli.catalogue",
    "distcheck.cli.training_run",
    "distcheck.cli.doctor",
    "distcheck.contract",
    "distcheck.store.run_folder",
    "distcheck.verification.session",
    "distcheck.reports.terminal",
    "distcheck.testing.plugin",
    "distcheck.testing",
    "distcheck.backend_probe.command",
    "distcheck.backends.mpi",
    "distcheck.backends.gloo",
    "distcheck.cli.under_launchers",
    "distcheck.worlds.launchers",
    "distcheck.selftest.command",
    "distcheck.plan.matrix",
    "distcheck.cli.forecast",
    "distcheck.verification.merging",
    "distcheck.cli.rendering",
    "distcheck.reports.html_report",
    "distcheck.store.last_pass",
    "distcheck.job.running",
    "distcheck.job.inside.start",
)


def test_the_front_imports_no_torch() -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *LIGHT], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["verify", "--help"],
        ["selftest", "--help"],
        ["job", "--help"],
        ["list"],
        ["plan", "--strategy", "ddp"],
    ],
    ids=" ".join,
)
def test_help_and_list_import_no_torch(words: list[str]) -> None:
    program = (
        "import sys; from distcheck.cli import main\n"
        f"sys.argv = ['distcheck', *{words!r}]\n"
        "try: main()\n"
        "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


@pytest.mark.parametrize("path", [*MODULES, *STRATEGIES], ids=identify)
def test_modules_and_functions_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    long = {f.name for f in functions(path) if (f.end_lineno or 0) - f.lineno > 70}
    assert not long


def test_no_drawer_for_odds_and_ends() -> None:
    assert not [path for path in MODULES if path.stem in ("utils", "helpers", "misc", "common")]


def test_one_word_per_idea() -> None:
    """A rank is a rank, never a worker, a node or a process id of a cluster."""
    for path in [*MODULES, *STRATEGIES]:
        names = {
            node.id if isinstance(node, ast.Name) else node.arg
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Name | ast.arg)
        }
        assert not {name for name in names if name in ("worker", "workers", "node_rank", "cluster")}
