"""A job on several machines, each with `distcheck job` in front: one of them judges.

Ranks write on their own machine. When the command has ended, the port of the job's master is free
again, and every machine of the job has reached it: the one that has the master's address listens
there, and the others send what their ranks have recorded. Both ends prove that they have the run's
secret (`worlds/remote/secret.py`); what is received is read as the file of a stranger is.
"""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from distcheck import private
from distcheck.errors import CannotRunError, DistcheckError, ExitCode
from distcheck.job.running import Ran, raised_in
from distcheck.recordings.jobs.reading import MOST_BYTES
from distcheck.recordings.jobs.records import RankRecord, for_others, read_rank
from distcheck.worlds.remote import bootstrap, protocol, secret
from distcheck.worlds.remote.handshake import Handshakes

PATIENCE_S = 60.0  # chosen: torchrun gives its ranks 30 s to end, on each machine by itself
_BEAT_S, _LOST_S = 5.0, 60.0
_CHUNK = 1 << 22  # bytes of a file in one message
# What ranks write: of a rank in its folder, and notes beside it.
_OF_A_RANK = re.compile(r"rank-(\d{4})/(rank|read|step-\d{6})\.(json|safetensors)")
_NOTE = re.compile(r"raised-\d+|drawn-\d{4}-\w+-\w+")


class FileChunk(msgspec.Struct, tag=True):
    """A part of a file of the recording; parts of one file come one after the other."""

    name: str
    data: bytes


class AllSent(msgspec.Struct, tag=True):
    """Last words of a machine: how its command ended."""

    code: int


FromMachine = protocol.Joining | FileChunk | AllSent


@dataclass
class Gathered:
    """What the judging machine has: how the command ended, and who waits for the verdict."""

    ran: Ran
    hosts: tuple[str, ...] = ()
    lines: list[protocol.Connection] = field(default_factory=list)

    def tell(self, code: int, summary: str) -> None:
        """Says to the other machines what was found."""
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.send(protocol.Shutdown(exit_code=code, summary=summary))


@contextlib.contextmanager
def gathered(folder: Path, ran: Ran, *, patience_s: float = PATIENCE_S) -> Iterator[Gathered]:
    """Makes the recording whole where ranks of it are on other machines. Raises JudgedThereError on
    all but one of these, and CannotRunError where one does not come.
    """
    own = [read_rank(file) for file in sorted(folder.glob("rank-*/rank.json"))]
    if not own or len(own) >= own[0].world or not _are_elsewhere(own[0], ran):
        yield Gathered(ran)
        return
    server = _listening(own, patience_s)
    if server is None:
        raise _sent(folder, own, ran, patience_s)
    found, over = Gathered(ran), threading.Event()
    beat = threading.Thread(target=_beat, args=(found, over), daemon=True)
    beat.start()
    try:
        with server:
            _receive(found, server, folder, own, patience_s)
        yield found
    except DistcheckError as error:
        found.tell(int(error.exit_code), str(error))
        raise
    finally:
        over.set()
        beat.join()
        for line in found.lines:
            line.close()


class JudgedThereError(DistcheckError):
    """The verdict was made on another machine; `exit_code` is that of the verdict."""

    def __init__(self, code: int, summary: str) -> None:
        super().__init__(summary)
        self.exit_code = ExitCode(code)


def _are_elsewhere(rank: RankRecord, ran: Ran) -> bool:
    """Whether the ranks that are missing were started on other machines, as torchrun says. Of ranks
    that were started in another way, one may be missing since it failed.
    """
    here, master = rank.variables.get("LOCAL_WORLD_SIZE", ""), rank.variables.get("MASTER_PORT", "")
    if not master.isdecimal():
        return False
    return int(here) < rank.world if here.isdecimal() else not (ran.code or ran.raised)


def _place_of(own: list[RankRecord]) -> tuple[str, int]:
    variables = own[0].variables
    return variables.get("MASTER_ADDR", ""), int(variables["MASTER_PORT"])


def _listening(own: list[RankRecord], patience_s: float) -> socket.socket | None:
    """Listens where this machine has the master's address; None on another one. Of two that have
    it, as in a trial on one machine, the one with rank 0 is first.
    """
    host, port = _place_of(own)
    if own[0].rank:
        time.sleep(min(1.0, patience_s / 4))
    try:
        return bootstrap.listen(host, port)
    except CannotRunError:
        return None


# -- the machine that judges -------------------------------------------------------------------


def _receive(
    found: Gathered, server: socket.socket, folder: Path, own: list[RankRecord], patience_s: float
) -> None:
    missing = set(range(own[0].world)) - {one.rank for one in own}
    doors = Handshakes(server, secret.shared_secret(), FromMachine)
    coming: list[tuple[str, Future[int]]] = []
    until = time.monotonic() + patience_s
    with ThreadPoolExecutor(max_workers=16) as threads, contextlib.closing(doors):
        while missing and time.monotonic() < until:
            for line, (first, *rest) in doors.come(0.2):
                ranks = frozenset(first.ranks)
                if first.protocol != protocol.PROTOCOL or not ranks <= missing or not ranks:
                    line.close()
                    continue
                missing -= ranks
                coming.append((first.host, threads.submit(_take, line, rest, folder, ranks)))
                found.lines.append(line)
    for host, taking in coming:
        try:
            code = taking.result()
        except (EOFError, OSError, msgspec.MsgspecError, ValueError) as error:
            raise CannotRunError(
                f"the recording of {host} did not arrive whole ({error or 'it has ended'}); "
                "run the job again"
            ) from error
        found.ran = replace(found.ran, code=found.ran.code or code)
    if missing:
        refused = f" {doors.refused} came without this run's secret: {secret.ADVICE}."
        raise CannotRunError(
            f"ranks {', '.join(map(str, sorted(missing)))} were recorded on machines of which "
            f"nothing was heard for {patience_s:g} s; start distcheck job on every machine of the "
            f"job.{refused * bool(doors.refused)}"
        )
    found.ran = replace(found.ran, raised=raised_in(folder))
    found.hosts = tuple(host for host, _ in coming)


def _take(
    line: protocol.Connection, words: list[object], folder: Path, ranks: frozenset[int]
) -> int:
    """Writes the files of a machine; returns the exit code of its command there. Raises ValueError
    for what no machine sends.
    """
    line.be_patient(_LOST_S)
    heard, size, file, opened = time.monotonic(), 0, None, None
    try:
        while True:
            for word in words:
                if isinstance(word, AllSent):
                    return word.code
                if not isinstance(word, FileChunk):
                    raise ValueError("it sent something that does not belong to a recording")
                size += len(word.data)
                if size > MOST_BYTES:
                    raise ValueError(f"it sent more than {MOST_BYTES >> 30} GiB")
                place = _place(folder, word.name, ranks)
                if file is None or place != opened:
                    if file is not None:
                        file.close()
                    opened = place
                    file = private.new_file(private.folder(place.parent) / place.name)
                file.write(word.data)
            words = line.receive()
            if not words and time.monotonic() - heard > _LOST_S:
                raise ValueError(f"nothing was heard for {_LOST_S:g} s")
            heard = time.monotonic() if words else heard
    finally:
        if file is not None:
            file.close()


def _place(folder: Path, name: str, ranks: frozenset[int]) -> Path:
    of_rank = _OF_A_RANK.fullmatch(name)
    if of_rank is not None and int(of_rank[1]) in ranks:
        return folder / name
    if _NOTE.fullmatch(name):  # of two machines, processes may have one number
        return folder / name.replace("raised-", f"raised-{min(ranks)}-")
    raise ValueError(f"it sent a file that no rank of it writes: {name[:80]!r}")


def _beat(found: Gathered, over: threading.Event) -> None:
    """Says to those that wait that this machine is there."""
    while not over.wait(_BEAT_S):
        for line in found.lines:
            with contextlib.suppress(OSError):
                line.send(protocol.Heartbeat())


# -- the others --------------------------------------------------------------------------------


def _sent(folder: Path, own: list[RankRecord], ran: Ran, patience_s: float) -> JudgedThereError:
    place = _place_of(own)
    until = time.monotonic() + patience_s
    while True:
        left = max(1.0, until - time.monotonic())
        connection = bootstrap.connect(lambda: place, secret.shared_secret(), deadline_s=left)
        line = protocol.Connection(connection, protocol.FromFront, patience_s=_LOST_S)
        try:
            with contextlib.closing(line):
                _send(line, folder, own, ran)
                return _verdict_of(line, place[0])
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            if time.monotonic() < until:
                time.sleep(0.5)
                continue
            raise CannotRunError(
                f"the machine that judges ({place[0]}) has ended without a verdict "
                f"({error or 'it closed the connection'}); see what it printed"
            ) from error


def _send(line: protocol.Connection, folder: Path, own: list[RankRecord], ran: Ran) -> None:
    ranks = tuple(one.rank for one in own)
    host = socket.gethostname()
    line.send(
        protocol.Joining(protocol=protocol.PROTOCOL, ranks=ranks, world=own[0].world, host=host)
    )
    for file in sorted(folder.glob("*")) + sorted(folder.glob("rank-*/*")):
        name = str(file.relative_to(folder))
        if not (_OF_A_RANK.fullmatch(name) or _NOTE.fullmatch(name)) or file.is_symlink():
            continue
        if file.name == "rank.json":
            data = msgspec.json.encode(for_others(read_rank(file)))
            line.send(FileChunk(name=name, data=data))
            continue
        with file.open("rb") as opened:
            line.send(FileChunk(name=name, data=opened.read(_CHUNK)))
            while data := opened.read(_CHUNK):
                line.send(FileChunk(name=name, data=data))
    line.send(AllSent(code=ran.code))


def _verdict_of(line: protocol.Connection, host: str) -> JudgedThereError:
    while True:
        word, _ = line.next()
        if isinstance(word, protocol.Shutdown):
            code = word.exit_code if word.exit_code in set(ExitCode) else ExitCode.UNKNOWN
            return JudgedThereError(code, f"judged on {host}: {word.summary[:2000]}")
