"""Runs a verification matrix on an engine (Ray or Slurm). Each task judges one part in a process
and returns the report as text; the front end starts the tasks and merges their reports.
"""

import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from distcheck import private
from distcheck.errors import CannotRunError, DistcheckError, ExitCode, UsageError
from distcheck.errors.shown_text import one_line, print_displayable
from distcheck.plan.matrix import Planned
from distcheck.records.decoding import read_bounded
from distcheck.reports.brief import words_without
from distcheck.reports.files import FORMATS, GITHUB, check_outputs
from distcheck.reports.live import LiveProgress
from distcheck.store.origin import command_line
from distcheck.verification.merging import MatrixPart, join, read_part, show_whole
from distcheck.worlds import scratch
from distcheck.worlds.linux import die_with_parent

Ended = tuple[int, str, str]  # exit code, the report's text or "", the end of stderr
_MOST_WORDS = 2000  # characters of stderr


def run_part(words: Sequence[str], folder: str | None, umask: int = -1) -> Ended:
    """Run `distcheck verify` with these arguments. The task's own working directory and umask are
    used, unless `folder` and a umask are given.
    """
    parent = os.getpid()
    with scratch.folder(prefix="distcheck-part-") as place:
        file = Path(place, "part.json")
        ran = subprocess.run(
            # -P: modules in the folder must not shadow distcheck's own.
            [sys.executable, "-P", "-m", "distcheck", "verify", *words, "--json", str(file)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            umask=umask,
            preexec_fn=lambda: die_with_parent(parent),
            check=False,
        )
        text = read_bounded(file).decode() if file.is_file() else ""
    return ran.returncode, text, ran.stderr[-_MOST_WORDS:]


# The module that starts tasks, the library that it requires, and the command to install that.
ENGINES = {
    "ray": ("on_ray", "ray", "pip install 'distcheck[ray]'"),
    "slurm": ("on_slurm", "submitit", "pip install 'distcheck[slurm]'"),
}
_FLAGS = ("-q", "--quiet", "-v", "--verbose")
_OF_THE_FRONT = ("--on", *(f"--{name}" for name in (*FORMATS, GITHUB)), *_FLAGS)


@dataclass(frozen=True)
class MatrixTask:
    """A part of a matrix: its number from 1, its name, arguments, and resources."""

    number: int
    name: str
    words: tuple[str, ...]
    ranks: int
    gpus: int


@dataclass(frozen=True)
class LostPart:
    """Reason why a part has no report."""

    why: str


class EngineTasks(Protocol):
    """Running parts. `code` describes how code under test reaches the tasks."""

    code: str

    def ended(self) -> Iterator[tuple[MatrixTask, Ended | LostPart]]:
        """Wait briefly, then yield the parts that have ended."""
        ...

    def close(self) -> None: ...


def run_on(
    engine: str, plan: Callable[[str | None], Planned], *, files: Mapping[str, str], quiet: bool
) -> int:
    """Run a matrix on an engine and print the report; return its exit code. Raises UsageError."""
    name, _, address = engine.partition("://")
    if name not in ENGINES:
        raise UsageError(
            f"--on {engine!r} is not an engine; expected {', '.join(ENGINES)}, or ray://HOST:PORT"
        )
    check_outputs(files)
    module, library, install = ENGINES[name]
    if importlib.util.find_spec(library) is None:
        raise CannotRunError(f"--on {name} needs {library}, which is not installed; run {install}")
    first = plan(None)
    number = len({case.sibling_key for case in first.every})
    planned = plan(f"1/{number}") if number > 1 else first
    work = _make_tasks(planned, number)
    started: EngineTasks = importlib.import_module(f"distcheck.addons.engines.{module}").start(
        address, work
    )
    with LiveProgress(Console(stderr=True, quiet=quiet)) as progress:
        progress.phase(f"{len(work)} part{'s' * (len(work) > 1)} on {name}; code: {started.code}")
        with scratch.folder(prefix="distcheck-parts-") as place:
            parts, lost, interrupted = _collect_reports(started, work, planned, place, progress)
    if not parts:
        raise CannotRunError(f"no part returned from {name}: {next(iter(lost.values()))}")
    code = show_whole(join(parts, lost), parts, files=files, quiet=quiet)
    for part, why in lost.items():
        print_displayable(
            f"distcheck: part {part} of {number} is unknown: {one_line(why)}", err=True
        )
    return int(ExitCode.INTERRUPTED) if interrupted else code


def _make_tasks(planned: Planned, parts: int) -> list[MatrixTask]:
    typed = shlex.split(command_line())[2:]
    words = words_without(typed, _OF_THE_FRONT, flags=_FLAGS)
    found: dict[int, MatrixTask] = {}
    for case in planned.whole.cases:
        part = planned.whole.assigned.get(case.id, 1)
        known = found.get(part)
        ranks = max(case.world, known.ranks if known else 0)
        found[part] = MatrixTask(
            number=part,
            name=f"{case.strategy}, {case.world} ranks",
            words=(*words, *(("--shard", f"{part}/{parts}") if parts > 1 else ())),
            ranks=ranks,
            gpus=ranks if case.device == "cuda" else 0,
        )
    return [found[number] for number in sorted(found)]


def _collect_reports(
    engine: EngineTasks,
    work: Sequence[MatrixTask],
    planned: Planned,
    place: Path,
    progress: LiveProgress,
) -> tuple[list[MatrixPart], dict[int, str], bool]:
    """Return the reports (read like untrusted files), the reason for each missing part by its
    number, and True if interrupted by Ctrl-C, which ends running parts.
    """
    parts: list[MatrixPart] = []
    lost: dict[int, str] = {}
    left = {one.number for one in work}
    interrupted = False
    try:
        while left:
            for one, end in engine.ended():
                left.discard(one.number)
                what = _take_result(one, end, planned, place, parts, lost)
                progress.counted(len(work) - len(left), len(work), f"{one.name}: {what}")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        engine.close()
    return parts, lost | dict.fromkeys(sorted(left), "interrupted before it finished"), interrupted


def _take_result(
    one: MatrixTask,
    end: Ended | LostPart,
    planned: Planned,
    place: Path,
    parts: list[MatrixPart],
    lost: dict[int, str],
) -> str:
    if isinstance(end, LostPart):
        lost[one.number] = end.why
        return "lost"
    code, text, said = end
    if not text:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing")
        lost[one.number] = f"its distcheck exited with code {code}: {last}"
        return "lost"
    file = place / f"part-{one.number}.json"
    private.write(file, text)
    try:
        part = read_part(str(file))
        plan = part.document.get("plan") or {}
        if plan.get("digest") != planned.whole.digest:
            raise UsageError(
                "it has a different plan: its files or versions differ from those here"
            )
        join([part])
    except DistcheckError as error:
        lost[one.number] = str(error)
        return "lost"
    parts.append(part)
    return str(part.document["verdict"])
