"""Every command in a docstring of `examples/` ends as the line below it says.

    $ distcheck verify --strategy examples/forms/...
    PASS                      or
    FAIL cause, cause         exactly the causes that are named over all cases, or
    refused: words            a usage error whose sentence holds them

All run on a small model here, in worlds of one pool; `-m sweep` runs each as it stands,
through the console script.
"""

import ast
import json
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from distcheck import backends
from distcheck.cli.commands.verify import command
from distcheck.errors import ExitCode, UsageError
from distcheck.plan.cases import plan_cases
from distcheck.plan.settings import Request, with_adaptation
from distcheck.records import Case, Report
from distcheck.training.adapters.forms import trained_with
from distcheck.verification.run import run_cases
from distcheck.worlds.pool import Pool
from tests.firsts import firsts
from tests.world.command import COMMAND

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "forms").glob("*.py"))
SMALL = f"{Path(__file__).with_name('small.py')}:Small"
RANK_FAILED = {"crash", "hang", "collective-mismatch", "unreachable"}
PROOF = "function_of_model.py:sums_gradients"


@dataclass(frozen=True)
class Promise:
    """A command line, and how its docstring says that it ends."""

    file: Path
    words: tuple[str, ...]
    verdict: str
    causes: frozenset[str] = frozenset()
    sentence: str = ""

    @property
    def exit_code(self) -> ExitCode:
        if self.verdict == "refused":
            return ExitCode.USAGE
        if self.verdict == "PASS":
            return ExitCode.PASS
        return ExitCode.RANK_FAILED if self.causes & RANK_FAILED else ExitCode.MISMATCH

    def __str__(self) -> str:
        return "-".join(self.words).replace("examples/forms/", "").replace("--", "").lstrip("-")


def promises(file: Path) -> Iterator[Promise]:
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    lines = docstring.splitlines()
    for line, answer in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("$ "):
            continue
        program, verb, *words = shlex.split(line.removeprefix("$ "))
        assert (program, verb) == ("distcheck", "verify"), line
        verdict, _, rest = answer.partition(" ")
        if verdict == "refused:":
            yield Promise(file, tuple(words), "refused", sentence=rest)
        else:
            causes = frozenset(cause.strip() for cause in rest.split(",") if cause)
            assert (verdict == "PASS" and not causes) or (verdict == "FAIL" and causes), answer
            yield Promise(file, tuple(words), verdict, causes)


PROMISES = [promise for file in FILES for promise in promises(file)]


def skip_without_mpi(promise: Promise) -> None:
    if "mpi" in promise.words and (missing := backends.missing("mpi")):
        pytest.skip(missing)


def quickest(promise: Promise) -> list[Case]:
    """What click makes of the command, on a small model in float32 for two steps, run once."""
    asked = with_adaptation(dict(command.make_context("verify", list(promise.words)).params))
    known = {name: asked[name] for name in asked if name in Request.__struct_fields__}
    steps = asked["steps"] if "--steps" in promise.words or "--accept" in promise.words else 2
    trained = trained_with(known["adaptation"].form)
    quick = {"workloads": (trained or SMALL,), "dtype": "float32", "steps": steps}
    cases = plan_cases(msgspec.convert({**known, **quick}, Request))
    return [msgspec.structs.replace(case, rerun=False) for case in cases]


def quick_run(promises: Sequence[Promise], pool: Pool) -> Report:
    return run_cases([case for promise in promises for case in quickest(promise)], pool)


def _kinds(promise: Promise) -> Iterator[object]:
    """A file's passes, its failures, and each cause wherever it stands."""
    yield promise.file, promise.verdict
    yield from promise.causes


RUN = [promise for promise in PROMISES if promise.verdict != "refused"]
OFTEN = firsts(RUN, _kinds)


def together(promises: Sequence[Promise]) -> list[list[Promise]]:
    """Commands that differ in nothing but the strategy, up to a dozen in one run."""
    groups: dict[tuple[str, ...], list[Promise]] = {}
    for promise in promises:
        groups.setdefault(promise.words[2:], []).append(promise)
    return [g[i : i + 12] for g in groups.values() for i in range(0, len(g), 12)]


def name_of(group: list[Promise]) -> str:
    return f"{group[0]}-and-{len(group) - 1}"


SELDOM = [
    pytest.param(group, marks=pytest.mark.sweep, id=name_of(group))
    for group in together([promise for promise in RUN if promise not in OFTEN])
]


@pytest.mark.parametrize(
    "group", [*(pytest.param(g, id=name_of(g)) for g in together(OFTEN)), *SELDOM]
)
def test_examples(group: list[Promise], pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_mpi(group[0])
    monkeypatch.chdir(ROOT)
    report = quick_run(group, pool)
    found = [(case.verdict, {d.cause for d in case.diagnosis}) for case in report.cases]
    actual = dict(zip(map(str, group), found, strict=True))
    assert actual == {str(p): (p.verdict.lower(), set(p.causes)) for p in group}
    for promise, case in zip(group, report.cases, strict=True):
        assert msgspec.structs.replace(report, cases=(case,)).exit_code == promise.exit_code


@pytest.mark.parametrize("promise", [p for p in PROMISES if p.verdict == "refused"], ids=str)
def test_refused_example(
    promise: Promise, pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    if promise.sentence.startswith("unknown parameters"):  # after values for them were tried
        check_console(promise, tmp_path)
        return
    with pytest.raises(UsageError) as caught:
        quick_run([promise], pool)
    assert promise.sentence in str(caught.value)


def of_console(promise: Promise, tmp_path: Path) -> tuple[int, str, set[str], str]:
    """Exit code, first verdict, causes and complaint of the command as it stands."""
    file = tmp_path / "report.json"
    ran = subprocess.run(
        [*COMMAND, "verify", *promise.words, "--json", str(file)], cwd=ROOT, capture_output=True,
        text=True, timeout=400,
    )  # fmt: skip
    causes = set()
    if file.exists():
        cases = json.loads(file.read_text())["cases"]
        causes = {found["cause"] for case in cases for found in case["diagnosis"]}
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    return ran.returncode, lines[0][:4] if lines else "refused", causes, ran.stderr


def check_console(promise: Promise, tmp_path: Path) -> None:
    code, verdict, causes, complaint = of_console(promise, tmp_path)
    assert (code, verdict, causes) == (promise.exit_code, promise.verdict, promise.causes)
    assert promise.sentence in " ".join(complaint.split())


@pytest.mark.sweep
def test_an_example_as_it_stands(tmp_path: Path) -> None:
    (promise,) = [p for p in PROMISES if PROOF in str(p)]
    check_console(promise, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("promise", PROMISES, ids=str)
def test_every_example_as_it_stands(promise: Promise, tmp_path: Path) -> None:
    skip_without_mpi(promise)
    check_console(promise, tmp_path)


def test_every_example_promises_something_and_imports_nothing_of_distcheck() -> None:
    assert len(FILES) >= 20
    for file in FILES:
        assert any(p.file == file and p.verdict == "PASS" for p in PROMISES), file
        assert any(p.file == file and p.verdict != "PASS" for p in PROMISES), file
        nodes = ast.walk(ast.parse(file.read_text()))
        froms = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        assert not any(name.startswith("distcheck") for name in froms), file


def test_every_object_of_an_example_is_shown() -> None:
    """Or is used by one that is."""
    for file in FILES:
        tree = ast.parse(file.read_text())
        shown = " ".join(word for p in promises(file) for word in p.words)
        names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        assert all(f":{name}" in shown or name in used for name in names), file
