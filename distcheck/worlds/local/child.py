"""The lifecycle of a forked process: setup, job, reports, exit."""

import contextlib
import faulthandler
import importlib
import os
import random
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from distcheck.errors import DistcheckError, FolderGoneError
from distcheck.errors.defects import is_defect
from distcheck.errors.shown_text import text_to_report
from distcheck.records import Collective
from distcheck.worlds import call_recorder, flight, linux, messages, mpi_segments
from distcheck.worlds.jobs import Descriptors, Reporter, flush, leave
from distcheck.worlds.local import late_compiler
from distcheck.worlds.waiting import LOOK_EVERY_S, RankInspector

# The descriptors that come with a Spawn, in this order; the job's follow.
EVENTS, OUTPUT, STACKS, RELEASE, DUMP, FIRST_OF_JOB = range(6)

_LAST_WORDS_S = 0.2  # for the caller of os._exit, which may hold the lock needed here


Target = Callable[[bytes, Descriptors, Reporter], bytes]


def run(request: messages.Spawn, fds: list[int], parent: int) -> None:
    linux.die_with_parent(parent)
    reporter = Reporter(fds[EVENTS])
    code = 0
    inherited = len(sys.modules)
    try:
        _set_up(request, fds)
        look = RankInspector(reporter)
        asked = (fds[DUMP], reporter, look)
        threading.Thread(
            target=_dump_when_asked, args=asked, name=linux.LOOK_THREAD, daemon=True
        ).start()
        _tell_before_exit(reporter)
        module, _, name = request.target.partition(":")
        target: Target = getattr(importlib.import_module(module), name)
        end = FIRST_OF_JOB + len(request.given)
        own = dict(zip(request.given, fds[FIRST_OF_JOB:end], strict=True))
        call_recorder.log_to(fds[STACKS])
        result = target(request.payload, own, reporter)
        flush()
        reporter.send(
            messages.Done(result, _imported_since(inherited) + late_compiler.modules_to_share())
        )
        look.over = True
        os.read(fds[RELEASE], 1)  # linger: a rank that exits breaks the connections of its peers
    except BaseException as error:
        flush()
        reporter.send(message_of_exception(error))
        code = 1
    finally:
        flush()
        if "mpi4py.MPI" in sys.modules:
            mpi_segments.remove(mpi_segments.own_segments())
        leave(code)


def _tell_before_exit(reporter: Reporter) -> None:
    """Make `os._exit` report its caller first, because the caller cannot be determined afterwards.
    Processes that this process forks exit without a report.
    """
    own = os.getpid()

    def tell_and_leave(status: int) -> NoReturn:
        try:
            if os.getpid() == own:
                flight.incomplete_collectives(
                    _LAST_WORDS_S
                )  # a call that has just returned is complete
                stack = displayed_stack(sys._getframe())
                said = messages.Stacks(stack, last_collective(), flight.latest())
                reporter.send(said, patience_s=_LAST_WORDS_S)
        finally:
            leave(status)

    # It is pickled by name, for example as the target of another process, which has its own
    # `os._exit`.
    tell_and_leave.__module__ = "os"
    tell_and_leave.__name__ = tell_and_leave.__qualname__ = "_exit"
    os._exit = tell_and_leave


def _imported_since(inherited: int) -> list[str]:
    """Return the modules of distcheck that were imported after the fork. Only the newest entries of
    `sys.modules` are read: reading an inherited entry copies its memory page, and thousands of them
    would take longer than many jobs.
    """
    count = max(0, len(sys.modules) - inherited)
    try:
        newest = list(islice(reversed(sys.modules), count))
    except RuntimeError:  # another thread is importing; the list only saves time
        return []
    return [name for name in reversed(newest) if is_distcheck_module(name)]


def is_distcheck_module(module: str) -> bool:
    return module.startswith("distcheck.")


def is_shared(module: str) -> bool:
    """Return True if a helper may import the module for all children. Code under test is never
    shared.
    """
    return is_distcheck_module(module) or module == late_compiler.NAME


def _set_up(request: messages.Spawn, fds: list[int]) -> None:
    """Set up this process's environment, working directory, streams, signals and Python RNG."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(fds[OUTPUT], 1)
    os.dup2(fds[OUTPUT], 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    faulthandler.enable(fds[STACKS], all_threads=True)
    faulthandler.register(signal.SIGUSR1, fds[STACKS], all_threads=True)
    os.environ.clear()
    os.environ.update(request.env)
    named = fds[FIRST_OF_JOB + len(request.given) :]
    os.environ.update({n: str(fd) for n, fd in zip(request.fd_names, named, strict=True)})
    try:
        os.chdir(request.cwd)
    except OSError:  # removed between the request and the fork
        raise FolderGoneError from None
    sys.path[:] = request.path
    random.seed(0)  # the state inherited from the helper was seeded by the system


def require_working_directory() -> None:
    """Make Python raise if a rank removes or renames the working directory or a parent of it. All
    ranks and the front end share this directory.
    """
    here = Path.cwd()
    kept = [os.stat(folder) for folder in (here, *here.parents)]

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event == "os.rmdir":
            path, dir_fd = given
        elif event == "os.rename":  # also raised by os.replace and shutil.move
            path, _, dir_fd, _ = given
        else:
            return
        with contextlib.suppress(OSError, TypeError, ValueError):
            found = os.stat(path, dir_fd=None if dir_fd == -1 else dir_fd, follow_symlinks=False)
            if any(os.path.samestat(found, one) for one in kept):
                raise _FolderError(
                    "this is the working directory of the run or one of its parents, which other "
                    "ranks need; remove and rename only folders that your code created"
                )

    sys.addaudithook(hear)


class _FolderError(RuntimeError):
    """Raised if a rank removes or renames the working directory."""


def message_of_exception(error: BaseException) -> messages.Raised:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_own(f.filename)]
    text = "".join(traceback.format_list(frames))
    text += "".join(traceback.format_exception_only(error))
    whole = "".join(traceback.format_exception(error))
    kind, exit_code = type(error).__qualname__, None
    defect = whole if is_defect(kind, whole) else ""
    if isinstance(error, DistcheckError):  # a message for the user; the frames are distcheck's own
        exit_code, text, defect = int(error.exit_code), str(error), ""
    return messages.Raised(
        kind=kind,
        message=messages.printable(text_to_report(messages.exception_text(error))),
        traceback=messages.printable(text_to_report(text)),
        at=time.monotonic(),
        exit_code=exit_code,
        collective=last_collective(),
        collectives=flight.latest(),
        defect=messages.printable(text_to_report(defect)),
        within_call=call_recorder.raised_in(error) is not None,
    )


def _dump_when_asked(dump_fd: int, reporter: Reporter, look: RankInspector) -> None:
    """Wait until the front end closes the pipe, then send the stacks of all threads. Meanwhile, if
    calls are recorded, check regularly whether the rank is blocked.

    This thread needs the GIL. A rank that holds the GIL in C code answers only through
    faulthandler.
    """
    linux.name_thread(linux.LOOK_THREAD)
    asked = select.poll()
    asked.register(dump_fd, select.POLLIN)
    while not asked.poll(LOOK_EVERY_S * 1000):
        if call_recorder.is_installed():
            look.again()
    os.read(dump_fd, 1)
    if reporter.tell_stacks is not None:
        reporter.tell_stacks()
        return
    own = threading.get_ident()
    parts = []
    for ident, current in sys._current_frames().items():
        if ident != own:
            parts.append(displayed_stack(current))
    reporter.send(messages.Stacks("\n".join(parts), last_collective(), flight.latest()))


def displayed_stack(current: FrameType) -> str:
    """Format a stack without distcheck's frames, and without torch's frames if others remain."""
    shown = [f for f in _since_fork(traceback.extract_stack(current)) if not _is_own(f.filename)]
    while shown and shown[0].filename == threading.__file__:  # the start of a thread
        del shown[0]
    theirs = [f for f in shown if "/torch/" not in f.filename]
    return "".join(traceback.format_list(theirs or shown))


def _since_fork(summary: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames after the fork. Frames up to `run` belong to the parent."""
    begun = [i for i, f in enumerate(summary) if f.filename == __file__ and f.name == "run"]
    return summary[begun[-1] + 1 :] if begun else list(summary)


_OWN_FOLDERS = tuple(
    os.path.join(str(Path(__file__).parents[2]), part)
    for part in ("worlds", "training", "testing", "backends", "addons")
)


def _is_own(filename: str) -> bool:
    """Return True if a frame is internal to distcheck and does not help the user."""
    return filename == "<string>" or filename.startswith(_OWN_FOLDERS)


def last_collective(found: list[dict[str, Any]] | None = None) -> Collective | None:
    """Return the last collective that this process entered, with the line that called it; None if
    none is recorded. `found` are the recorder's entries, if the caller has already read them.
    """
    found = flight.entries() if found is None else found
    if not found:
        return None
    names = [f for f in found[-1]["frames"] if "/torch/" not in f["filename"]]
    frames = [f for f in names if not _is_own(f["filename"])]
    place = f"{frames[0]['filename']}:{frames[0]['line']}" if frames else ""
    (call,) = flight.latest(found[-1:])
    return msgspec.structs.replace(call, place=place)
