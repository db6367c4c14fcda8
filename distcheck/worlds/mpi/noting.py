"""Calls of the backend mpi, for what looks at a rank: torch neither records nor counts them."""

import threading

from distcheck.backends.mpi import calls
from distcheck.backends.mpi.group import MPIGroup
from distcheck.backends.mpi.runtime import mpi
from distcheck.backends.mpi.work import MPIWork, move_on
from distcheck.worlds import flight, postings

_noting = False


def note_calls(usual_limit_s: float) -> None:
    """Makes this process note its calls of the backend from now on, and record them. Groups whose
    calls time out sooner than usual have a limit of their own, which the code may count on.
    """
    global _noting
    if _noting:
        return
    _noting = True
    flight.record_further(flight.Recorder(calls.entries, calls.forget, _move_on))
    postings.note_calls_of(MPIGroup)
    postings.note_waits_of(MPIWork, limited=lambda work: work.timeout_s < usual_limit_s)


def _move_on() -> None:
    """Lets MPI complete what it can. What it promises does not let two threads enter it at once."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and mpi().Is_initialized() and not mpi().Is_finalized():
        move_on()
