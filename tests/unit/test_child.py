"""What a forked process is to the code that runs in it: os._exit leaves, whatever is told of it."""

import os
import pickle
import signal
import time
from collections.abc import Callable

from distcheck.worlds import messages
from distcheck.worlds.jobs import Reporter, leave
from distcheck.worlds.local import child

_PATIENCE_S = 30.0


def exit_code_of(job: Callable[[Reporter], None], *, front_listens: bool) -> int:
    """Of a fork that tells where it calls os._exit, and does this job; kills one that stays."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            reporter = Reporter(writing)
            child._tell_before_exit(reporter)
            job(reporter)
        finally:
            leave(99)
    os.close(writing)
    if not front_listens:
        os.close(reading)
    end = time.monotonic() + _PATIENCE_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    if front_listens:
        os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_front_that_is_gone_ends_who_speaks_to_it() -> None:
    def speak(reporter: Reporter) -> None:
        while True:
            reporter.send(messages.Progress(0, "test"))

    assert exit_code_of(speak, front_listens=False) == 1


def test_os_exit_in_the_middle_of_a_message_leaves() -> None:
    """As from the handler of a signal."""

    def leave_inside(reporter: Reporter) -> None:
        with reporter._lock:
            os._exit(7)

    assert exit_code_of(leave_inside, front_listens=True) == 7


def test_os_exit_is_a_job_for_another_process_as_ever() -> None:
    def send(_: Reporter) -> None:
        same = pickle.loads(pickle.dumps(os._exit)) is os._exit
        os._exit(5 if same and os._exit is not leave else 6)

    assert exit_code_of(send, front_listens=True) == 5
