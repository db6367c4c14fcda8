"""Runs `distcheck verify` in processes that a launcher has started."""

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
from distcheck.errors.shown_text import print_displayable, without_secrets
from distcheck.plan.matrix import run_identity
from distcheck.records import Case
from distcheck.verification.own_code import AllowedCode
from distcheck.worlds.launchers import Launch
from distcheck.worlds.pool import Pool
from distcheck.worlds.remote.agent import Agent
from distcheck.worlds.remote.coordinator import Coordinator, helper_for_launch


def pool_for_launch(launch: Launch | None, cases: Sequence[Case]) -> Pool:
    """Return the pool of the process that judges: a Coordinator if a launcher has started other
    processes.
    """
    if launch is None:
        return Pool()
    pool = Coordinator(launch, deadline_s=cases[0].deadline_s, identity=run_identity(cases))
    signal.signal(signal.SIGTERM, pool.on_sigterm)  # launchers end processes by SIGTERM
    _end_with_launcher(pool, launch)
    return pool


def lend_ranks(launch: Launch, plan: Callable[[], list[Case]], *, deadline_s: float) -> int:
    """Run ranks for the process with rank 0. Return the exit code of the verdict.

    If `plan` fails because this process cannot take part, the reason is sent to rank 0.
    """
    pool = Pool(helper_for_launch(launch))
    host = Agent(pool, launch, deadline_s=deadline_s)
    _end_with_launcher(pool, launch)
    try:
        try:
            cases = plan()
        except DistcheckError as error:
            host.decline(error)
            raise
        signal.signal(signal.SIGTERM, host.on_sigterm)
        over = host.serve(run_identity(cases), AllowedCode(cases))
        # A launcher that sees another process exit may signal this one, which is exiting.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write_error_file(over.exit_code, over.summary)
        return over.exit_code
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)  # rank 0 prints it
    except DistcheckError as error:
        write_error_file(int(error.exit_code), str(error))
        raise type(error)(f"rank {', '.join(map(str, launch.ranks_here))}: {error}") from None
    finally:
        host.close()
        pool.close()


def end_other_processes(pool: Pool, exit_code: int, message: str) -> None:
    """End the other processes with the exit code of the verdict. If a launcher signals this process
    because another one has exited, this process only has to exit with the same code.
    """
    if isinstance(pool, Coordinator):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pool.dismiss(exit_code, message)
        write_error_file(exit_code, message)


def write_error_file(exit_code: int, message: str) -> None:
    """Write the file TORCHELASTIC_ERROR_FILE, in which torchelastic expects the error of a failed
    rank.
    """
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
        print_displayable(f"distcheck: {path} cannot be written: {error.strerror}", err=True)


def _end_with_launcher(pool: Pool, launch: Launch) -> None:
    """Interrupt this process when its launcher has exited, for example by SIGKILL."""
    if launch.owned:
        pool.watch(os.pidfd_open(os.getppid()), _launcher_has_ended)


def _launcher_has_ended() -> None:
    raise KeyboardInterrupt
