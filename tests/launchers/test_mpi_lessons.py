"""Every lesson of `examples/mpi/` prints what its docstring says, under the mpirun that is here."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.launchers.processes import finish, left_over, mpirun, start
from tests.world.command import ROOT

pytest.importorskip("mpi4py", reason="the lessons need mpi4py; pip install '.[mpi]'")
LESSONS = sorted((ROOT / "examples" / "mpi").glob("*.py"))
PAGE = (ROOT / "docs" / "mpi-lessons.md").read_text()


def stated(lesson: Path) -> tuple[str, list[str]]:
    """A lesson's command, and the lines that it must print: those up to the next empty one."""
    docstring = ast.get_docstring(ast.parse(lesson.read_text())) or ""
    (found,) = re.findall(r"^\$ (.+)\n((?:.+\n)+)$", docstring, re.MULTILINE)
    return found[0], found[1].splitlines()


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_prints_what_it_says(lesson: Path, tmp_path: Path) -> None:
    command, lines = stated(lesson)
    name = str(lesson.relative_to(ROOT))
    program, option, count, *rest = shlex.split(command)
    assert (program, option, rest) == ("mpirun", "-n", ["python", name])
    words = [*mpirun(), option, count, sys.executable, str(lesson)]
    ((code, out, err),) = finish([start(words, tmp_path)], timeout_s=120)
    assert code == 0, err
    assert sorted(out.splitlines()) == sorted(lines)
    assert left_over(tmp_path) == []


def test_a_ring_of_one_is_refused_in_words(tmp_path: Path) -> None:
    """Its receive would wait for a message from itself."""
    lesson = str(ROOT / "examples" / "mpi" / "send_receive.py")
    # A process without mpirun leaves Open MPI's shared memory behind: in the test's own folder.
    own = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    alone = start([sys.executable, lesson], tmp_path, **own)
    ((code, out, err),) = finish([alone], timeout_s=120)
    assert (code, out) == (1, "")
    assert "a ring has at least 2 ranks" in err


def test_the_page_has_every_lesson_and_its_command() -> None:
    assert len(LESSONS) == 4
    for lesson in LESSONS:
        assert f"\n{stated(lesson)[0]}\n" in PAGE
        assert f"](../examples/mpi/{lesson.name})" in PAGE
        assert len(lesson.read_text().splitlines()) <= 45, "short enough to read at once"
    (verify,) = re.findall(r"^distcheck .+$", PAGE, re.MULTILINE)
    form = ROOT / "examples" / "forms" / "mpi4py_function.py"
    assert f"$ {verify}\nPASS\n" in form.read_text(), "a command that tests run"
