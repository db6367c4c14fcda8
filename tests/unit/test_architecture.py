"""The shape of the house: who may import whom, what stays light, how long things may get."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import house
from tests.optional import needs_all
from tests.sources import MODULES, PACKAGE, ROOT, STRATEGIES, found, nodes, text_of


@functools.cache
def imports(path: Path) -> frozenset[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            place = "." * node.level + node.module  # a neighbor's name begins with a dot
            names |= {place, *(f"{place}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, by its dotted name."""
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    return {name.removesuffix(".__init__"): nodes(path)[0] for name, path in named.items()}  # type: ignore[misc]


def imports_of(path: Path, forbidden: tuple[str, ...]) -> set[str]:
    return {name for name in imports(path) if name.startswith(forbidden)}


def of(folder: str) -> list[Path]:
    paths = sorted((PACKAGE / folder).glob("*.py"))
    assert paths, f"{folder} has no module"
    return paths


def test_distcheck_never_imports_strategies() -> None:
    assert not found(MODULES, lambda path: imports_of(path, ("strategies", "distcheck_str")))


def test_strategies_import_the_contract_and_torch_only() -> None:
    def others(path: Path) -> set[str]:
        own = imports_of(path, ("distcheck",)) - imports_of(path, ("distcheck.contract",))
        far = {name.partition(".")[0] for name in imports(path) if not name.startswith(".")}
        own_library = {"mpi4py"} if path.stem == "mpi_allreduce" else set()
        return own | far - set(sys.stdlib_module_names) - {"torch", "distcheck"} - own_library

    assert not found(STRATEGIES, others)


def test_checks_launch_nothing() -> None:
    forbidden = ("subprocess", "multiprocessing", "os", "time", "distcheck.worlds", "distcheck.run")
    assert not found(of("judge/checks"), lambda path: imports_of(path, forbidden))


def test_reports_decide_nothing() -> None:
    allowed = (
        "distcheck.records", "distcheck.errors", "distcheck.reports", "distcheck.judge.checks.mer",
        "distcheck.private",
    )  # fmt: skip

    def others(path: Path) -> set[str]:
        own = imports_of(path, ("distcheck.",)) - imports_of(path, allowed)
        return own - {"distcheck.judge.checks"}

    assert not found([*of("reports"), *of("reports/pictures")], others)


def test_oracles_know_no_strategy_and_no_loop() -> None:
    forbidden = ("distcheck.training.loop", "distcheck.training.recorder", "distcheck_strategies")
    assert not found(of("judge/oracles"), lambda path: imports_of(path, forbidden))


def test_the_integer_oracle_shares_nothing_with_its_workload() -> None:
    exact = PACKAGE / "judge" / "oracles" / "integers.py"
    assert not imports_of(exact, ("torch",))
    own = imports_of(exact, ("distcheck",))
    assert own == {"distcheck.contract", "distcheck.contract.Contract"}


IN_RANKS = ("rank.py",)  # all the rest of the probes is plain Python


@needs_all
def test_what_is_expected_of_a_backend_is_known_without_torch() -> None:
    plain = [path for path in of("addons/backend_probe") if path.name not in IN_RANKS]
    assert not found(plain, lambda path: imports_of(path, ("torch", "numpy")))


LIGHT = (
    "distcheck", "distcheck.cli", "distcheck.plan.cases", "distcheck.verification.run",
    "distcheck.cli.show_and_keep", "distcheck.cli.commands.list", "distcheck.cli.training_run",
    "distcheck.cli.commands.doctor", "distcheck.contract", "distcheck.store.run_folder",
    "distcheck.verification.session", "distcheck.reports.terminal", "distcheck.testing.plugin",
    "distcheck.testing", "distcheck.addons.backend_probe.command", "distcheck.addons.mpi",
    "distcheck.backends.gloo", "distcheck.cli.under_launchers", "distcheck.worlds.launchers",
    "distcheck.addons.selftest.command", "distcheck.plan.matrix", "distcheck.cli.forecast",
    "distcheck.verification.merging", "distcheck.cli.commands.report",
    "distcheck.reports.html_report", "distcheck.store.earlier_runs", "distcheck.job.running",
    "distcheck.job.inside.start",
)  # fmt: skip


@needs_all
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
        ["explain", "loss jumps after resume"],
        ["skill"],
        ["plan", "--strategy", "ddp"],
    ],
    ids=" ".join,
)
@needs_all
def test_help_and_list_import_no_torch(words: list[str]) -> None:
    program = (
        "import sys; from distcheck.cli import main\n"
        f"sys.argv = ['distcheck', *{words!r}]\n"
        "try: main()\n"
        "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()


def test_long_files_and_functions_are_questioned() -> None:
    """Is there one idea in 800 lines of a file, or 70 of a function? So far always."""

    def long(path: Path) -> set[str]:
        functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]
        names = {f.name for f in functions if (f.end_lineno or 0) - f.lineno > 70}
        return names | ({"the module"} if len(text_of(path).splitlines()) > 800 else set())

    assert not found([*MODULES, *STRATEGIES], long)


# A function with many parameters is asked whether it does several things.
MANY_PARAMETERS_FOR_A_REASON = {
    "distcheck.contract.strategy": "public: the whole contract, by name",
    "distcheck.job.guard.guard": "public",
    "distcheck.compare.scoring.scores": "public",
    "distcheck.job.guard.guarding.__init__": "those of `guard`, checked",
    "distcheck.addons.explore.space.cases": "public: a strategy of Hypothesis for property tests",
    "distcheck.addons.backend_probe.command.command": "the options of a command",
    "distcheck.job.replaying.replay": "how the reference of a job runs, by name",
    "distcheck.judge.checks.matching.match_ranks": "a tensor's place, and what is expected there",
}


@needs_all
def test_what_has_many_parameters_has_them_for_a_reason() -> None:
    assert {*house.with_many_parameters(trees())} == {*MANY_PARAMETERS_FOR_A_REASON}


def test_no_modules_import_each_other() -> None:
    """Not for types or within a function either: a reader needs an order to read them in."""
    assert house.circles(house.imports(trees(), all_of_them=True)) == []


def test_a_circle_that_only_types_close_is_found() -> None:
    two = {
        "distcheck.a": ast.parse("import distcheck.b"),
        "distcheck.b": ast.parse("if TYPE_CHECKING:\n    from distcheck.a import A"),
    }
    assert house.circles(house.imports(two, all_of_them=True)) == [["distcheck.a", "distcheck.b"]]


# What is not of torch, pytest or Hypothesis, and stands in one module alone.
PRIVATE_ELSEWHERE = {
    "distcheck.job.inside.single_process_group": [
        "process: _args",
        "process: _kwargs",
    ],  # multiprocessing's
    "distcheck.addons.simulated.isolation": ["numpy: _bit_generator", "numpy: _rand"],
    "distcheck.integrations": ["accelerator: _optimizers"],  # accelerate's
}


@needs_all
def test_private_names_of_a_library_are_in_one_module() -> None:
    """So that one test of that module says what a new release of the library has moved."""
    assert house.doors(trees()) == PRIVATE_ELSEWHERE


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch._C.name()",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch.utils._pytree import tree_leaves",
        "from _pytest.scope import Scope",
        "def scope_of(item): return item._fixtureinfo",
        "def mark_of(tensor): return getattr(tensor, '_is_flat_param', False)",
    ],
)
def test_a_private_name_elsewhere_is_found(line: str) -> None:
    assert house.doors({"module": ast.parse(line)})


def test_no_drawer_for_odds_and_ends() -> None:
    assert not [path for path in MODULES if path.stem in ("utils", "helpers", "misc", "common")]


def test_one_word_per_idea() -> None:
    """A rank is a rank, never a worker, a node or a process id of a cluster."""

    def other_words(path: Path) -> set[str]:
        names = {
            node.id if isinstance(node, ast.Name) else node.arg
            for node in nodes(path)
            if isinstance(node, ast.Name | ast.arg)
        }
        return names & {"worker", "workers", "node_rank", "cluster"}

    assert not found([*MODULES, *STRATEGIES], other_words)


def named_twice(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return public classes that several modules define; those of workloads are a model's own."""
    places: dict[str, list[str]] = {}
    for name, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    shared = {".".join(name.split(".")[:2]) for name in modules} - {"distcheck.workloads"}
    return {
        name: found
        for name, several in places.items()
        if len(found := [p for p in several if ".".join(p.split(".")[:2]) in shared]) > 1
    }


def test_one_idea_per_word() -> None:
    assert named_twice(trees()) == {}
    twice = {f"distcheck.{one}": ast.parse("class Facts: ...") for one in ("plan", "judge.a")}
    assert named_twice(twice) == {"Facts": ["distcheck.plan", "distcheck.judge.a"]}


# Modules and classes, by words that say nothing of their content or that have a standard term.
VAGUE_NAMES = frozenset(
    re.findall(
        r"\w+",
        "alike alone apart asked beside blame book fleet found greetings kept mended moved parting "
        "pieces said told unlike ways yardstick",
    )
)


def test_modules_and_classes_have_standard_names() -> None:
    for name, tree in trees().items():
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        words = {one.lower() for one in [*name.split("."), *classes]}
        assert not words & VAGUE_NAMES, name


# A line of a list in a docstring: a name, two blanks or more, what it is.
NAME = r"[a-z_]+(?:/[a-z_]+)?(?:\.py|/)?"
LISTED = re.compile(rf"^ *({NAME}(?:, {NAME})*)  +\S", re.MULTILINE)


def test_what_a_room_lists_is_there() -> None:
    """Files that were moved or renamed, or another room's."""

    def missing(path: Path) -> set[str]:
        listed = LISTED.findall(ast.get_docstring(ast.parse(text_of(path))) or "")
        there = {one.name for one in path.parent.iterdir()}
        names = (name for several in listed for name in several.split(", "))
        found = {name.rstrip("/").partition("/")[0] for name in names}
        return {name for name in found if name not in there and f"{name}.py" not in there}

    rooms = sorted((ROOT / "distcheck").rglob("__init__.py"))
    assert sum(len(LISTED.findall(text_of(path))) for path in rooms) > 100
    assert not found(rooms, missing)


@needs_all
def test_files_that_the_page_names_are_there() -> None:
    """Of `docs/whats-here.md`: where a folder is given, there."""
    page = text_of(ROOT / "docs" / "whats-here.md")
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert len(named) > 60
    known = {path.name for path in ROOT.rglob("*.py")}
    missing = {n for n in named if "/" in n and not any((f / n).exists() for f in (ROOT, PACKAGE))}
    assert not missing | {n for n in named if "/" not in n} - known


def test_files_that_the_code_names_are_there() -> None:
    """In docstrings and comments; names of a reader's own files are examples."""
    known = {path.name for path in ROOT.rglob("*.py")}
    examples = re.compile(r"(FILE|my_\w+|sync|path/to/file|random|/threading)\.py|torch/.*")

    def missing(path: Path) -> set[str]:
        named = set(re.findall(r"(?<![\w/.-])([\w/]+\.py)\b", text_of(path)))
        return {n for n in named if not examples.fullmatch(n) and n.rpartition("/")[2] not in known}

    assert not found(MODULES, missing)


@needs_all
def test_no_judge_reads_what_is_written_for_people() -> None:
    rooms = ("judge", "verification", "plan", "store", "job", "addons/explore", "compare")
    readers = [path for room in rooms for path in of(room)]
    assert not [str(path) for path in readers if ".detail" in text_of(path)]


def test_nobody_but_reports_reads_a_reason() -> None:
    """Causes and verdicts are chosen by `CheckResult.kinds`, which says it as data."""
    parses = re.compile(r"reason\.(partition|r?split|startswith|endswith|find)|in (\w+\.)*reason\b")
    readers = [path for path in MODULES if "reports" not in path.parts]
    assert not [str(path) for path in readers if parses.search(text_of(path))]
