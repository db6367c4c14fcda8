"""Merges the recordings of a job on several machines. `distcheck job` runs on each machine; one of
them judges.

Ranks write on their own machine. After the command has ended on every machine, the port of the
job's master is free again: the machine with the master's address listens there, and the others send
their ranks' recordings. Both ends prove that they have the user's secret and recorded the same run
(`worlds/remote/secret.py`, `RankRecord.run`); received files are treated as untrusted.
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
from distcheck.job.running import CommandResult, noted_exceptions
from distcheck.recordings.jobs.reading import MOST_BYTES
from distcheck.recordings.jobs.records import RankRecord, read_record, with_masked_command
from distcheck.worlds.remote import bootstrap, protocol, secret
from distcheck.worlds.remote.handshake import Handshakes

PATIENCE_S = 60.0  # Heuristic: torchrun gives its ranks 30 s to exit, on each machine separately
_BEAT_S, _LOST_S = 5.0, 60.0
_CHUNK = 1 << 22  # bytes of a file per message
# Files of ranks: those of a rank in its folder, and notes next to it.
_OF_A_RANK = re.compile(r"rank-(\d{4})/(rank|read|step-\d{6})\.(json|safetensors)")
_NOTE = re.compile(r"raised-\d+|drawn-\d{4}-\w+-\w+")


class FileChunk(msgspec.Struct, tag=True):
    """Part of a recorded file. The parts of a file are sent in order."""

    name: str
    data: bytes


class AllSent(msgspec.Struct, tag=True):
    """The last message of a machine, with the exit code of its command."""

    code: int


FromMachine = protocol.Joining | FileChunk | AllSent


@dataclass
class GatheredMachines:
    """The judging machine's state: how the command ended, and the machines that wait."""

    ran: CommandResult
    hosts: tuple[str, ...] = ()
    lines: list[protocol.Connection] = field(default_factory=list)

    def tell(self, code: int, summary: str) -> None:
        """Send the verdict to the other machines."""
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.send(protocol.Shutdown(exit_code=code, summary=summary))


@contextlib.contextmanager
def gather_recording(
    folder: Path, ran: CommandResult, *, patience_s: float = PATIENCE_S
) -> Iterator[GatheredMachines]:
    """Complete the recording if there are ranks on other machines. Raises JudgedThereError on all
    machines except one, and CannotRunError if a machine does not connect.
    """
    own = [read_record(file, RankRecord) for file in sorted(folder.glob("rank-*/rank.json"))]
    if not own or len(own) >= own[0].world or not _run_on_other_machines(own[0], ran):
        yield GatheredMachines(ran)
        return
    server = _listening(own, patience_s)
    if server is None:
        raise _send_recordings(folder, own, ran, patience_s)
    found, over = GatheredMachines(ran), threading.Event()
    beat = threading.Thread(target=_send_heartbeats, args=(found, over), daemon=True)
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
    """Raised if another machine has judged the job. `exit_code` is that of the verdict."""

    def __init__(self, code: int, summary: str) -> None:
        super().__init__(summary)
        self.exit_code = ExitCode(code)


def _run_on_other_machines(rank: RankRecord, ran: CommandResult) -> bool:
    """Return True if the missing ranks were started on other machines, according to torchrun.
    Without torchrun, a missing rank may have failed.
    """
    here, master = rank.variables.get("LOCAL_WORLD_SIZE", ""), rank.variables.get("MASTER_PORT", "")
    if not master.isdecimal():
        return False
    return int(here[:9]) < rank.world if here.isdecimal() else not (ran.code or ran.raised)


def _place_of(own: list[RankRecord]) -> tuple[str, int]:
    return bootstrap.address_of(_meeting_of(own))


def _meeting_of(own: list[RankRecord]) -> str:
    variables = own[0].variables
    return f"tcp://{variables.get('MASTER_ADDR', '')}:{variables['MASTER_PORT']}"


def _run_of(own: list[RankRecord]) -> secret.RunSecret:
    return secret.RunSecret(secret.shared_secret(), "job", own[0].run)


def _listening(own: list[RankRecord], patience_s: float) -> socket.socket | None:
    """Listen if this machine has the master's address; otherwise return None. If two processes have
    that address, as in a trial on one machine, the process with rank 0 is first.
    """
    host, port = _place_of(own)
    if own[0].rank:
        time.sleep(min(1.0, patience_s / 4))
    try:
        return bootstrap.listen(host, port)
    except CannotRunError:
        return None


# -- the judging machine -------------------------------------------------------------------------


def _receive(
    found: GatheredMachines,
    server: socket.socket,
    folder: Path,
    own: list[RankRecord],
    patience_s: float,
) -> None:
    missing = set(range(own[0].world)) - {one.rank for one in own}
    translated = bootstrap.translated_to(server, _meeting_of(own))
    doors = Handshakes(server, _run_of(own), FromMachine, translated=translated)
    coming: list[tuple[str, Future[int]]] = []
    until = time.monotonic() + patience_s
    with ThreadPoolExecutor(max_workers=16) as threads, contextlib.closing(doors):
        while missing and time.monotonic() < until:
            for line, (first, *rest) in doors.come(0.2):
                ranks = frozenset(first.ranks)
                is_of_world = (first.protocol, first.world) == (protocol.PROTOCOL, own[0].world)
                if not is_of_world or not ranks <= missing or not ranks:
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
                f"the recording of {host} did not arrive completely ({error or 'it exited'}); "
                "run the job again"
            ) from error
        found.ran = replace(found.ran, code=found.ran.code or code)
    if missing:
        refused = (
            f" {doors.refused} did not have this run's secret, or recorded another run: "
            f"{secret.ADVICE}."
        )
        raise CannotRunError(
            f"ranks {', '.join(map(str, sorted(missing)))} were recorded on machines that sent "
            f"nothing for {patience_s:g} s; start distcheck job on every machine of the "
            f"job.{refused * bool(doors.refused)}"
        )
    found.ran = replace(found.ran, raised=noted_exceptions(folder))
    found.hosts = tuple(host for host, _ in coming)


def _take(
    line: protocol.Connection, words: list[object], folder: Path, ranks: frozenset[int]
) -> int:
    """Write the files of a machine; return its command's exit code. Raises ValueError for other
    messages than files.
    """
    line.be_patient(_LOST_S)
    heard, size, file, opened = time.monotonic(), 0, None, None
    try:
        while True:
            for word in words:
                if isinstance(word, AllSent):
                    return word.code
                if not isinstance(word, FileChunk):
                    raise ValueError("it sent data that does not belong to a recording")
                size += len(word.data)
                if size > MOST_BYTES:
                    raise ValueError(f"it sent more than {MOST_BYTES >> 30} GiB")
                place = _path_of_file(folder, word.name, ranks)
                if file is None or place != opened:
                    if file is not None:
                        file.close()
                    opened = place
                    file = private.new_file(private.folder(place.parent) / place.name)
                file.write(word.data)
            words = line.receive()
            if not words and time.monotonic() - heard > _LOST_S:
                raise ValueError(f"it sent nothing for {_LOST_S:g} s")
            heard = time.monotonic() if words else heard
    finally:
        if file is not None:
            file.close()


def _path_of_file(folder: Path, name: str, ranks: frozenset[int]) -> Path:
    of_rank = _OF_A_RANK.fullmatch(name)
    if of_rank is not None and int(of_rank[1]) in ranks:
        return folder / name
    if _NOTE.fullmatch(name):  # two machines may have processes with one number
        return folder / name.replace("raised-", f"raised-{min(ranks)}-")
    raise ValueError(f"it sent a file that none of its ranks writes: {name[:80]!r}")


def _send_heartbeats(found: GatheredMachines, over: threading.Event) -> None:
    while not over.wait(_BEAT_S):
        for line in found.lines:
            with contextlib.suppress(OSError):
                line.send(protocol.Heartbeat())


# -- the other machines ------------------------------------------------------------------------


def _send_recordings(
    folder: Path, own: list[RankRecord], ran: CommandResult, patience_s: float
) -> JudgedThereError:
    place = _place_of(own)
    until = time.monotonic() + patience_s
    while True:
        left = max(1.0, until - time.monotonic())
        line = bootstrap.connect(lambda: place, _run_of(own), deadline_s=left)
        line.be_patient(_LOST_S)
        try:
            with contextlib.closing(line):
                _send(line, folder, own, ran)
                return _verdict_of(line, place[0])
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            if time.monotonic() < until:
                time.sleep(0.5)
                continue
            raise CannotRunError(
                f"the machine that judges ({place[0]}) exited without a verdict "
                f"({error or 'it closed the connection'}); see its output"
            ) from error


def _send(
    line: protocol.Connection, folder: Path, own: list[RankRecord], ran: CommandResult
) -> None:
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
            data = msgspec.json.encode(with_masked_command(read_record(file, RankRecord)))
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
