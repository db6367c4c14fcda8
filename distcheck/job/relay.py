"""What a job prints into a pipe goes through this process: a reader that leaves ends no rank.

A terminal and a file are the job's own, as they are without distcheck.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Iterator

_LAST_S = 5.0  # for what is left in the pipe when the job has ended; others may hold it open


@contextlib.contextmanager
def relayed() -> Iterator[dict[str, int]]:
    """The job's standard output and error, as arguments of Popen; those that go into one pipe stay
    in one order.
    """
    places: dict[tuple[int, int], int] = {}
    given: dict[str, int] = {}
    pumps = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        about = os.fstat(number)
        if not stat.S_ISFIFO(about.st_mode):
            continue
        place = (about.st_dev, about.st_ino)
        if place not in places:
            reader, places[place] = os.pipe()
            pumps.append(threading.Thread(target=_pump, args=(reader, number), daemon=True))
        given[name] = places[place]
    for pump in pumps:
        pump.start()
    try:
        yield given
    finally:
        for writer in places.values():
            os.close(writer)
        for pump in pumps:
            pump.join(_LAST_S)


def _pump(reader: int, number: int) -> None:
    """Passes on what comes, until its writers have ended; when no reader is left, drops it."""
    is_read = True
    with os.fdopen(reader, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            try:
                while is_read and data:
                    data = data[os.write(number, data) :]
            except OSError:
                is_read = False
