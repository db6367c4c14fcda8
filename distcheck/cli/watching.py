"""Implementation of `distcheck verify --watch`: repeats a run whenever its code changes.

The helper and the further interpreters, which have imported torch, are reused. Ranks are forked
again and import the current code. The cheapest cases run first, and each verdict is printed
immediately.
"""

import importlib.util
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.text import Text

from distcheck.cli.show_and_keep import OutputOptions, verify_command
from distcheck.errors import CannotRunError, DistcheckError, ExitCode
from distcheck.errors.shown_text import displayable, one_line, print_displayable
from distcheck.plan.costs import estimated_s
from distcheck.plan.matrix import Planned
from distcheck.plan.provenance import code_files
from distcheck.records import Case
from distcheck.records.decoding import read_source
from distcheck.reports.live import LiveProgress
from distcheck.store import earlier_runs
from distcheck.store.run_folder import DEFAULT_FOLDER
from distcheck.verification.run import RunOptions
from distcheck.worlds.pool import Pool

_LOOK_EVERY_MS = 1000  # polling interval: some network disks send no notices
_SETTLES_S = 0.05  # seconds; while a file is written it is empty or incomplete
_Contents = dict[Path, bytes | None]


class VerdictPrinter(LiveProgress):
    """Progress display that prints a line for each judged case."""

    def finished(self, case: Case, verdict: str) -> None:
        """Print the verdict, and the time since the run began."""
        super().finished(case, verdict)
        if self._console.is_terminal:
            spent = time.monotonic() - self._begun
            line = f"{case.workload} {case.dtype}: {verdict}, after {spent:.1f} s"
            self._console.print(Text(displayable(one_line(line))), highlight=False)


def watch_command(plan: Callable[[], Planned], showing: OutputOptions, *, download: bool) -> int:
    """Repeat the run until Ctrl-C. Return the exit code of the last run."""
    if importlib.util.find_spec("watchfiles") is None:
        raise CannotRunError(
            "--watch needs watchfiles, which is not installed; run pip install 'distcheck[watch]'"
        )
    watching = _Rounds(plan, showing, download=download)
    try:
        return watching.go_on()
    except KeyboardInterrupt:
        return watching.code
    finally:
        watching.pool.close()


class _Rounds:
    """Repeated runs of the same cases on a pool that stays open."""

    def __init__(
        self, plan: Callable[[], Planned], showing: OutputOptions, *, download: bool
    ) -> None:
        self._plan, self._showing, self._download = plan, showing, download
        self.pool, self.code = Pool(), int(ExitCode.PASS)

    def go_on(self) -> int:
        """Repeat the run until one is interrupted, and return the exit code of that run."""
        files = set[Path]()
        while True:
            before = _contents(files)
            try:
                planned = self._plan()
                files = _files_of(planned)
                before = _contents(files)
                self.code = self._run(planned)
            except DistcheckError as error:
                if not files:
                    raise  # no file to watch is known
                self.code = int(error.exit_code)
                print_displayable(f"distcheck: {error}", err=True)
            if self.code == ExitCode.INTERRUPTED:
                return self.code
            changed = _wait(files, before)
            print_displayable(f"distcheck: {', '.join(map(str, changed))} changed", err=True)

    def _run(self, planned: Planned) -> int:
        """Run once. Cases that failed before come first, then the cheapest."""
        if not self.pool.usable:
            self.pool.close()
            self.pool = Pool()
        failed = earlier_runs.ids_of_failed_cases(DEFAULT_FOLDER / "runs", planned.cases)
        return verify_command(
            earlier_runs.with_failed_first(sorted(planned.cases, key=estimated_s), failed),
            RunOptions(whole=planned.whole, extras=planned.extras, download=self._download),
            self._showing,
            save=None,
            pool=self.pool,
            progress=VerdictPrinter,
        )


def _files_of(planned: Planned) -> set[Path]:
    files = {Path(planned.file)} if planned.file else set()
    for case in planned.cases:
        files |= code_files("strategy", case.strategy) | code_files("workload", case.workload)
    return files


def _contents(files: Iterable[Path]) -> _Contents:
    found: _Contents = {}
    for file in files:
        try:
            found[file] = read_source(file)
        except OSError:  # an editor is about to replace it
            found[file] = None
    return found


def _wait(files: set[Path], before: _Contents) -> list[Path]:
    """Block until at least one of the files changes. Return the changed files."""
    from watchfiles import watch

    print_displayable(f"distcheck: watching {len(files)} files; Ctrl-C stops watching", err=True)
    folders = {file.parent for file in files if file.parent.is_dir()}
    notices = watch(
        *sorted(folders),
        recursive=False,
        watch_filter=None,
        debounce=100,
        step=20,
        rust_timeout=_LOOK_EVERY_MS,
        yield_on_timeout=True,
    )
    while True:
        now = _contents(files)
        changed = [file for file in sorted(files) if now[file] != before[file]]
        if not changed:
            next(notices)
            continue
        time.sleep(_SETTLES_S)
        if now == _contents(files) and all(now[file] is not None for file in changed):
            return changed
