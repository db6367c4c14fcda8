"""The command, or pytest, in a process that has imported torch already: for tests of what it says.

Half of a short command's time is the import, and there are hundreds of them. A server, one for each
process of tests, imports torch once and forks the processes that run a command: its words, folder,
environment and exit code are those of the console script. Unlike there, front, helper and what
stands for the rerun's interpreters are forks with torch in them, the import path is the tests', and
what libraries read from the environment when they are loaded is the server's. What is about that,
or about how a command ends, runs the console script itself (`command.py`).
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from tests.world.command import BAD, Run

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.world.preloaded"])


@atexit.register  # after multiprocessing's, which would wait for them: so before it
def _end_forgotten_ones() -> None:
    for process in multiprocessing.active_children():
        process.kill()


class Command:
    """A running one, with what tests use of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], cwd: Path, env: Mapping[str, str], *, program: str = "distcheck"
    ) -> None:
        self._words = words
        self._said = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._said]
        given = (program, tuple(words), str(cwd), dict(env), files)
        self._process = _context.Process(target=_console, args=given)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Of a process that has ended; what killed it, negative."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """To a process that runs."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """At once."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(list(self._words), timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed, when it has ended. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        out, err = [(file.seek(0), file.read().decode())[1] for file in self._said]
        return out, err


def run(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 400,
    program: str = "distcheck",
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As `subprocess.run` of the console script, of `python -m pytest` or of `python -c`, with what
    it printed as text.
    """
    command = Command(words, cwd, os.environ if env is None else env, program=program)
    try:
        said = command.communicate(timeout)
    except BaseException:
        command.kill()
        raise
    return subprocess.CompletedProcess(words, command.wait(), *said)


@pytest.fixture
def distcheck(tmp_path: Path) -> Run:
    """Runs a command in a folder that holds bad.py and nothing else."""
    (tmp_path / "bad.py").write_text(BAD)

    def command(*words: str, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        return run(*words, cwd=tmp_path, env={**os.environ, "COLUMNS": "100", **env})

    return command


def _console(
    program: str, words: tuple[str, ...], folder: str, environment: dict[str, str], files: list[str]
) -> NoReturn:
    """In the forked process: the console script from its first line to its last."""
    code = 70
    try:
        _settle(folder, environment, files)
        sys.argv = [program, *(words[1:] if program == "-c" else words)]
        if program == "pytest":
            sys.path.insert(0, folder)
            code = int(pytest.main())
        elif program == "-c":
            exec(words[0], {"__name__": "__main__"})
            code = 0
        else:
            importlib.import_module("distcheck.cli").main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 70
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _settle(folder: str, environment: dict[str, str], files: list[str]) -> None:
    from distcheck.worlds import pool
    from distcheck.worlds.local.helper_process import CleanHelper, ForkedHelper

    class Helper(ForkedHelper):
        import_path = CleanHelper.import_path

        def __init__(self, **_: int) -> None:  # its hash seed is the server's
            super().__init__()

    pool.CleanHelper = Helper  # type: ignore[attr-defined, assignment, misc]
    for number, file in enumerate([os.devnull, *files]):
        opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    multiprocessing.set_start_method(None, force=True)  # a script under test may choose it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = [entry for entry in sys.path if entry not in ("", ".")]
