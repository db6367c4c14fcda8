"""Every command in the docs is run: as it stands, in a folder that holds what the page speaks of.

`-m sweep` runs the pages that take minutes. Commands on files of `examples/forms` are those of the
examples' own test, and pages in `ELSEWHERE` have a test of their own.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from distcheck.cli import root_command
from tests.adapted.test_examples import PROMISES
from tests.world.command import COMMAND, ROOT, hear_interrupts

ELSEWHERE = {
    "launchers.md": "tests/launchers/test_docs.py",
    "gate.md": "tests/world/test_gate.py",
    "mpi-lessons.md": "tests/launchers/test_mpi_lessons.py",
}
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ELSEWHERE]
PAGES.append(ROOT / "README.md")
QUICK: tuple[str, ...] = ()  # all others are for the sweep
# What `.ci/run` runs word for word, and what only prepares a machine.
_PREPARES = re.compile(r"pip install\b")
# The README's sync forgets to divide, the page on tests shows a test that fails; gloo is wrong on
# strided views, and so is whoever hands on to it.
FAILS = {  # exit codes, one for each time that a page has the line
    ("testing.md", "pytest test_mean.py"): (1,),
    ("tutorial.md", "distcheck verify --strategy my_sync.py:sync --world 2 --world 3"): (1, 0),
    ("README.md", "distcheck verify --strategy my_sync.py:sync --world 2 --world 3"): (1,),
    ("capabilities.md", "distcheck backends"): (1,),
    ("capabilities.md", "distcheck backends --backend gloo --op all_reduce --form strided -v"): (
        1,
    ),
    ("capabilities.md", "distcheck backends --backend gloo --json gloo.json"): (1,),
    ("capabilities.md", "distcheck backends --backend my_backend.py:register"): (1,),
}
_RUN = "20260131-120000-4711"
SYNC = """
import torch.distributed as dist

def sync(model, step):
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= step.weight
            dist.all_reduce(p.grad)
            p.grad /= step.world_size
"""
CLASS = SYNC.replace("def sync(model, step):", "class {name}:\n  def sync(self, model, step):")
MATRIX = '[tool.distcheck]\nstrategies = ["allreduce", "ddp"]\nworkloads = ["mlp"]\nworlds = [2]\n'


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of what is fenced in, in its order."""
    return re.findall(r"```(sh|python)\n(.+?)\n```", page.read_text(), re.DOTALL)


def lines_of(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    bare = [" ".join(shlex.split(line, comments=True, posix=False)) for line in lines]
    return [line for line in bare if line and not _PREPARES.match(line)]


def commands(page: Path) -> list[str]:
    return [line for kind, text in blocks(page) if kind == "sh" for line in lines_of(text)]


def parts(page: Path) -> list[tuple[Path, str]]:
    return [(page, line) for line in commands(page)]


def stage(folder: Path, page: Path) -> None:
    """The files that a page names: its own where it shows them, else right ones."""
    for name in ("my_sync.py", "path/to/my_sync.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SYNC)
    (folder / "their_file.py").write_text(SYNC.replace("sync(", "their_function("))
    for package, name in (("my_package", "Sync"), ("my_pkg", "Mine")):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
        (folder / package / "sync.py").write_text(CLASS.format(name=name))
    (folder / "pyproject.toml").write_text(MATRIX)
    for kind, text in reversed(blocks(page)):  # what is shown twice begins as it is shown first
        if kind == "python":
            write_shown(folder, text)


def write_shown(folder: Path, text: str) -> None:
    """A file that a page shows, by the name in its first line."""
    if named := re.match(r"# (\w+\.py)\n", text):
        (folder / named[1]).write_text(text)


@pytest.mark.parametrize(("page", "line"), [p for page in PAGES for p in parts(page)])
def test_a_command_says_what_the_command_line_takes(page: Path, line: str) -> None:
    words = shlex.split(line)
    if "distcheck" not in words:
        is_ours = words[0] == "python" and (ROOT / words[1]).is_file()
        assert words[0] == "pytest" or is_ours, f"{page.name}: {line}"
        return
    _, name, *rest = words[words.index("distcheck") :]
    group = root_command.make_context("distcheck", ["list"])
    command = root_command.get_command(group, name)
    assert command is not None, line
    command.make_context(name, rest, parent=group)


def of_examples(page: Path) -> list[str]:
    return [
        line for line in commands(page) if "examples/forms/" in line or "ddp_comm_hooks" in line
    ]


@pytest.mark.parametrize("line", [line for page in PAGES for line in of_examples(page)])
def test_what_a_page_says_of_an_example_is_what_the_example_says(line: str) -> None:
    words = tuple(shlex.split(line)[2:])
    assert [p.verdict for p in PROMISES if p.words == words] == ["PASS"], line


def in_turn() -> list[object]:
    pages = [page for page in PAGES if set(commands(page)) - set(of_examples(page))]
    pages = [page for page in pages if page.name != "found.md"]  # it installs released packages
    sweep = pytest.mark.sweep
    return [
        pytest.param(page, id=page.name, marks=() if page.name in QUICK else sweep)
        for page in pages
    ]


@pytest.mark.parametrize("page", in_turn())
def test_the_commands_of_a_page(tmp_path: Path, page: Path) -> None:
    """One after the other, in one folder."""
    stage(tmp_path, page)
    own = tmp_path / "bin"
    own.mkdir()
    (own / "distcheck").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (own / "distcheck").chmod(0o755)
    scripts = Path(COMMAND[-1]).parent
    environment = {
        "PATH": f"{own}:{scripts}:/usr/bin:/bin", "COLUMNS": "100", "HOME": str(tmp_path),
    }  # fmt: skip
    seen: dict[str, int] = {}
    for kind, text in blocks(page):
        if kind == "python":
            write_shown(tmp_path, text)
            continue
        for line in lines_of(text):
            if line in of_examples(page):
                continue
            code = FAILS.get((page.name, line), (0,))
            expected = code[min(seen.get(line, 0), len(code) - 1)]
            seen[line] = seen.get(line, 0) + 1
            if _RUN in line:  # a run of this page's, whenever it was
                runs = tmp_path / ".distcheck" / "runs"
                line = line.replace(_RUN, max(runs.iterdir()).name)
            ran = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True,
                text=True, timeout=1200, preexec_fn=hear_interrupts,
            )  # fmt: skip
            assert ran.returncode == expected, f"{line}\n{ran.stdout[-2000:]}{ran.stderr}"
