"""Streams that cannot be written to: what is dropped, and what is said of it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distcheck.cli.streams import FaultTolerantStream

COMMAND = f"{sys.executable} -m distcheck"


def run(line: str, folder: Path) -> tuple[int, str]:
    """The exit code of the first program of a pipeline, and its standard error."""
    ran = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
        cwd=folder, stderr=subprocess.PIPE, text=True, timeout=100,
    )  # fmt: skip
    return ran.returncode, ran.stderr


def without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("opened", "lost"),
    [(without_reader, ""), (lambda: os.open("/dev/full", os.O_WRONLY), "No space left on device")],
    ids=["a pipe without a reader", "a full disk"],
)
@pytest.mark.parametrize("buffered", [True, False])
def test_unwritable_text_is_dropped(opened: Callable[[], int], lost: str, buffered: bool) -> None:
    with os.fdopen(opened(), "w", buffering=-1 if buffered else 1) as stream:
        output = FaultTolerantStream(stream)
        for _ in range(3):
            assert output.write("a line\n") == 7
            output.flush()
        assert output.lost == lost
        assert output.isatty() is False


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("list | true", 0, ""),
        ("list >&-", 0, ""),
        ("list >&- 2>&- <&-", 0, ""),
        ("list >/dev/full", 3, "standard output was not written: No space left on device"),
        ("--help >/dev/full", 3, "standard output was not written: No space left on device"),
        ("report there-is-none 2>/dev/full", 2, ""),
        ("report there-is-none 2>&-", 2, ""),
        ("report there-is-none | true", 2, "there-is-none does not exist"),
    ],
)
def test_the_exit_code_is_kept(words: str, code: int, said: str, tmp_path: Path) -> None:
    found, error = run(f"{COMMAND} {words}", tmp_path)
    assert (found, said in error, "Traceback" in error) == (code, True, False), error
    assert said or not error, error


@pytest.mark.parametrize("command", ["verify --strategy allreduce", "job -- true", "runs"])
def test_a_folder_that_is_gone(command: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code, error = run(f"cd gone && rmdir ../gone && {COMMAND} {command}", tmp_path)
    assert code == 3, error
    assert error == (
        "distcheck: the working directory no longer exists; change to an existing directory\n"
    )
