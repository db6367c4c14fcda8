"""What `distcheck verify` does in a process that a launcher has started, beside verifying."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from distcheck import private
from distcheck.errors import DistcheckError, ExitCode
from distcheck.errors.shown_text import say, without_secrets
from distcheck.plan.matrix import identity_of
from distcheck.records import Case
from distcheck.verification.own_code import Allowed
from distcheck.worlds.launchers import Launch
from distcheck.worlds.pool import Pool
from distcheck.worlds.remote.agent import Agent
from distcheck.worlds.remote.coordinator import Coordinator, helper_of


def front_pool(launch: Launch | None, cases: Sequence[Case]) -> Pool:
    """The pool of the process that judges: a fleet where a launcher has started others."""
    if launch is None:
        return Pool()
    pool = Coordinator(launch, deadline_s=cases[0].deadline_s, identity=identity_of(cases))
    signal.signal(signal.SIGTERM, pool.on_sigterm)  # how launchers end what they have started
    _end_with_launcher(pool, launch)
    return pool


def lend(launch: Launch, plan: Callable[[], list[Case]], *, deadline_s: float) -> int:
    """Lends this process's ranks to the front; returns the verdict's code.

    Where `plan` finds that this process cannot take part, the front gets the reason.
    """
    pool = Pool(helper_of(launch))
    host = Agent(pool, launch, deadline_s=deadline_s)
    _end_with_launcher(pool, launch)
    try:
        try:
            cases = plan()
        except DistcheckError as error:
            host.decline(error)
            raise
        signal.signal(signal.SIGTERM, host.on_sigterm)
        over = host.serve(identity_of(cases), Allowed(cases))
        # A launcher that sees another process leave may end this one, which is leaving.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write_error_file(over.exit_code, over.summary)
        return over.exit_code
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)  # the front says so
    except DistcheckError as error:
        write_error_file(int(error.exit_code), str(error))
        raise type(error)(f"rank {', '.join(map(str, launch.ranks_here))}: {error}") from None
    finally:
        host.close()
        pool.close()


def dismiss(pool: Pool, exit_code: int, message: str) -> None:
    """Ends the other processes with the verdict's code. A launcher that sees one of them leave
    may signal this one, which has nothing more to do than to leave with the same.
    """
    if isinstance(pool, Coordinator):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pool.dismiss(exit_code, message)
        write_error_file(exit_code, message)


def write_error_file(exit_code: int, message: str) -> None:
    """What torchelastic shows of a rank that failed: TORCHELASTIC_ERROR_FILE, in its own form."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or exit_code == ExitCode.PASS:
        return
    about = {
        "message": {
            "message": f"distcheck: {message}",
            "extraInfo": {
                "py_callstack": traceback.format_exc() if sys.exc_info()[0] else message,
                "timestamp": str(int(time.time())),
            },
        }
    }
    try:
        private.write(Path(path), json.dumps(without_secrets(about)))
    except OSError as error:
        say(f"distcheck: {path} cannot be written: {error.strerror}", err=True)


def _end_with_launcher(pool: Pool, launch: Launch) -> None:
    """Interrupts this process when the launcher has ended, which may be killed without a word."""
    if launch.owned:
        pool.watch(os.pidfd_open(os.getppid()), _launcher_has_ended)


def _launcher_has_ended() -> None:
    raise KeyboardInterrupt
