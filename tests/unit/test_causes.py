"""The table of causes is whole: it has what code can name, and each of its entries is shown."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from string import Formatter

import pytest
from click.testing import CliRunner

from distcheck.cli.commands.explain import command as explain
from distcheck.errors import UsageError
from distcheck.records.causes import Cause, causes, name_cause, shared_suggestions
from tests.optional import needs
from tests.sources import calls, nodes

ROOT = Path(__file__).parents[2]
OF_LEDGER = ROOT / "distcheck/judge/diagnosis/communication.py"
OF_GUARD = [ROOT / "distcheck/job/guard/explaining.py", OF_LEDGER]
OF_ENDS = ROOT / "distcheck/judge/diagnosis/outcomes.py"
OF_LAYOUTS = ROOT / "distcheck/judge/diagnosis/layouts.py"
OF_MODULES = ROOT / "distcheck/judge/divergence/modules.py"  # of two recordings of jobs
OF_GRADIENTS = [
    ROOT / f"distcheck/judge/diagnosis/{name}.py"
    for name in ("gradients", "weights", "parts", "tokens")
]
OF_JOB = [
    *(ROOT / "distcheck/job").glob("*.py"), OF_ENDS, OF_LAYOUTS, OF_LEDGER, OF_MODULES,
    *OF_GRADIENTS,
]  # fmt: skip
OF_COMPARE = [*(ROOT / "distcheck/compare").glob("*.py"), OF_MODULES]
OF_VERIFY = [
    *({*(ROOT / "distcheck/judge").rglob("*.py")} - {OF_MODULES}),
    ROOT / "distcheck/records/exit_status.py",
    ROOT / "distcheck/verification/contents.py",
    *(ROOT / "distcheck/addons/simulated").glob("judged_schedules.py"),
]  # fmt: skip
# Mutants, planted bugs, wrong programs, and mistakes in recordings, guards and machines.
SHOWN_IN = (
    "tests/mutants/causes.py", "tests/mutants/subtle/causes.py", "examples/jobs/planted.toml",
    "examples/jobs/resuming.toml", "examples/jobs/layouts/planted.toml",
    "tests/unit/test_gaps.py", "tests/wrong_programs/*.py", "tests/job/test_*.py",
    "tests/launchers/test_deaths.py", "tests/unit/test_scores.py",
)  # fmt: skip


def strings(path: Path) -> set[str]:
    constants = [node for node in nodes(path) if isinstance(node, ast.Constant)]
    return {node.value for node in constants if isinstance(node.value, str)}


def named_in(files: list[Path]) -> set[str]:
    """The names of causes that stand in code; a docstring is never one."""
    return set().union(*map(strings, files)) & set(causes())


def literals(node: ast.expr) -> list[str]:
    """What an argument may be, where it is written out."""
    if isinstance(node, ast.IfExp):
        return literals(node.body) + literals(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) else []


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def test_what_code_names_is_in_the_table_with_its_variants_and_numbers() -> None:
    seen = 0
    for file, called, call in calls():
        if called not in ("name_cause", "suggested"):
            continue
        place, first = f"{file}:{call.lineno}", 1 if called == "suggested" else 2
        given = {keyword.arg for keyword in call.keywords}
        for cause in literals(call.args[0]):
            assert cause in causes(), f"{place} names {cause}, which is not in the table"
            texts = {**shared_suggestions(), **causes()[cause].suggestions}
            variants = [v for argument in call.args[first:] for v in literals(argument)]
            for variant in variants if len(call.args) > first else ["usual"]:
                assert variant in texts, f"{place}: {cause} has no suggestion {variant}"
                assert fields(texts[variant]) <= given, f"{place}: {cause} needs more numbers"
            seen += 1
    assert seen > 100


def test_only_the_table_makes_a_diagnosis() -> None:
    makers = {file for file, called, _ in calls() if called == "Diagnosis"}
    assert makers == {"records/causes/__init__.py"}


@needs("simulated")
@pytest.mark.parametrize(
    ("command", "files"),
    [("verify", OF_VERIFY), ("job", OF_JOB), ("guard", OF_GUARD), ("compare", OF_COMPARE)],
)
def test_it_says_which_command_names_a_cause(command: str, files: list[Path]) -> None:
    # A job is not simulated, its local gradients are not recomputed, its padding is not known.
    not_in_jobs = {"unmatched-message", "buffers-differ", "wrong-local-gradient", "padding-counted"}
    names = {name for name, cause in causes().items() if command in cause.by}
    # A guard does not know which tensors a call had.
    not_in = {"job": not_in_jobs, "guard": {"reduced-twice"}}
    named = named_in(files) - not_in.get(command, set())
    assert not named - names, f"add {command!r} to `by` of {named - names}: code there names it"
    assert not names - named, f"no code of {command!r} names {names - named}, as its `by` says"


@needs("simulated")
def test_every_variant_is_used() -> None:
    written = set().union(*map(strings, [*OF_VERIFY, *OF_JOB, *OF_GUARD, *OF_COMPARE]))
    variants = {v for cause in causes().values() for v in cause.suggestions} | set(
        shared_suggestions()
    )
    assert variants - {"usual"} <= written


def test_every_cause_is_shown_by_something() -> None:
    texts = [path.read_text() for pattern in SHOWN_IN for path in ROOT.glob(pattern)]
    hidden = [name for name in causes() if not any(f'"{name}"' in text for text in texts)]
    assert not hidden, f"add a mutant with its line in tests/mutants/causes.py for {hidden}"


def test_what_is_not_in_the_table_cannot_be_named() -> None:
    with pytest.raises(KeyError):
        name_cause("no-hope", "seen")
    with pytest.raises(KeyError):
        name_cause("missing-sync", "seen", "no such variant")
    with pytest.raises(KeyError):
        name_cause("missing-division", "seen", "once")  # by how many ranks?


def test_several_suggestions_follow_each_other() -> None:
    found = name_cause("missing-division", "twice", "once", "twice", world=2)
    assert found.cause == "missing-division"
    assert found.suggestion.startswith("divide by the world size (2) once, ")
    assert found.suggestion.endswith("; if you already divide, reduce only once")


@pytest.mark.parametrize("cause", causes().values(), ids=lambda cause: cause.name)
def test_an_entry_is_whole(cause: Cause) -> None:
    assert cause.what, cause.when
    assert len(cause.what) <= 100, "one line"
    assert "\n" not in "".join((cause.what, *cause.when, cause.repair, cause.confused))
    for example in (cause.wrong, cause.right):
        assert 1 <= len(example.splitlines()) <= 10
        ast.parse(example)
    assert cause.wrong != cause.right
    for name in _mentioned(cause.confused):
        assert name in causes(), f"{cause.name} is confused with {name}, which is not in the table"


def _mentioned(text: str) -> list[str]:
    words = text.split("`")[1::2]
    return [word for word in words if "-" in word and word.islower() and not word.startswith("-")]


def test_what_was_seen_in_public_is_in_the_corpus() -> None:
    from tests.mutants.corpus import CORPUS

    known = ", ".join(one.where for one in CORPUS)
    for cause in causes().values():
        for seen in cause.seen:
            project, number = seen.split(" ")
            assert project in known, seen
            assert number in known, seen


def test_the_documentation_is_made_from_it(tmp_path: Path) -> None:
    script = ROOT / "docs" / "make_causes.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, cwd=ROOT)
    for path in tmp_path.iterdir():
        written = (ROOT / "docs" / path.name).read_text()
        assert written == path.read_text(), "run: python docs/make_causes.py"
    page = (tmp_path / "diagnosis.md").read_text()
    assert all(f"| `{name}` |" in page for name in causes())


@pytest.mark.parametrize("name", causes())
def test_every_cause_is_explained_on_a_screen(name: str) -> None:
    ran = CliRunner().invoke(explain, [name])
    lines = ran.output.splitlines()
    assert ran.exit_code == 0
    assert lines[0].startswith(f"{name}: ")
    assert {"wrong:", "right:"} <= set(lines)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert not re.search(r"`|\]\(|\x1b", ran.output)


def test_explain_lists_every_cause_and_says_what_was_meant() -> None:
    listed = CliRunner().invoke(explain, []).output
    names = re.findall(r"^  (\S+)", listed, re.MULTILINE)
    assert sorted(names) == sorted(causes())
    assert max(map(len, listed.splitlines())) <= 80
    refused = CliRunner().invoke(explain, ["missing-snc"])
    assert isinstance(refused.exception, UsageError)
    assert "did you mean missing-sync" in str(refused.exception)
