"""Runs a program of the set in a world, and says what is named of it.

The job of a rank is `runs`. A program that takes a search of schedules is run under a few, and its
result is what must be alike under all of them.
"""

import time
from dataclasses import dataclass

import msgspec

from distcheck import backends
from distcheck.judge.diagnosis.outcomes import explain
from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.launch import job_result, run_until_over, start_job
from distcheck.worlds.messages import Remarked
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous, environment_of, join
from distcheck.worlds.shares import RankStart
from tests.world.jobs import Asked
from tests.world.launching import run_to_end, start
from tests.wrong_programs import PROGRAMS, WORLD, Program

JOB = "tests.wrong_programs.running:runs"
SCHEDULES = 12


def runs(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """One of the programs, on one rank."""
    asked = msgspec.msgpack.decode(payload, type=Asked)
    join(asked.rendezvous, fds.get(STORE, -1))
    reporter.progress(1, "sync")
    result = PROGRAMS[asked.about["program"]].run(asked.rendezvous.rank, asked.about["wrong"])
    return repr(result).encode()


@dataclass(frozen=True)
class Named:
    """What is named: causes, all that is said, whether all ranks finished, and after how long."""

    causes: list[str]
    said: str
    finished: bool
    seconds: float

    @property
    def cause(self) -> str:
        """The first cause, or nothing."""
        return self.causes[0] if self.causes else ""

    def missing_lines(self, program: Program) -> list[str]:
        """The lines that must be named, and are not."""
        return [line for line in program.named if not _is_in(line, self.said)]


def named(
    pool: Pool, program: Program, *, wrong: bool, backend: str = "simulated", deadline_s: float = 60
) -> Named:
    """What is named of a program, or of its right twin."""
    if program.schedules and backend == "simulated":
        return _by_schedules(pool, program, wrong, deadline_s)
    ranks = start(
        pool, JOB, WORLD, backend=backend, deadline_s=deadline_s, program=program.name, wrong=wrong
    )
    outcomes, spent_s = run_to_end(pool, ranks)
    remarks = [remark for child in ranks.children for remark in child.remarks]
    return _of_outcomes(outcomes, remarks, spent_s)


def _of_outcomes(outcomes: list[Outcome], remarks: list[Remarked], spent_s: float) -> Named:
    found = explain(outcomes)
    bad = [o for o in outcomes if o.outcome != RankEnd.FINISHED]
    said = [one.evidence for one in found]
    if found and found[0].cause == "crash":
        said += [o.detail for o in bad]  # its lines are those of the traceback
    said += [remark.text for remark in remarks]
    causes = [*(one.cause for one in found), *(remark.name for remark in remarks)]
    return Named(causes, "\n".join(said), not bad, spent_s)


def _by_schedules(pool: Pool, program: Program, wrong: bool, deadline_s: float) -> Named:
    from distcheck.addons.simulated import judged_schedules as schedules
    from distcheck.addons.simulated.share import SEARCH, HostRequest, SearchRequest

    meetings = [
        Rendezvous(
            backend="simulated", rank=r, world=WORLD, host="127.0.0.1", port=1,
            deadline_s=deadline_s,
        )
        for r in range(WORLD)
    ]  # fmt: skip
    about = {"program": program.name, "wrong": wrong}
    host = HostRequest(
        target=JOB,
        order=backends.order_of("simulated"),
        deadline_s=deadline_s,
        starts=[
            RankStart(
                payload=msgspec.msgpack.encode(Asked(one, about)), environment=environment_of(one)
            )
            for one in meetings
        ],
    )
    asked = SearchRequest(host=host, schedules=SCHEDULES, deadline_s=deadline_s)
    begun = time.monotonic()
    world = start_job(pool, SEARCH, asked, {}, deadline_s=4 * deadline_s)
    run_until_over(pool, world)
    found = SEARCH.decode(job_result(world))
    world.close()
    result, causes = schedules.check_schedules(
        found, ranks=WORLD, digests=lambda result: (result.hex(),), replay="run"
    )
    finished = result.verdict == "pass"
    return Named(
        [one.cause for one in causes],
        "\n".join([*(one.evidence for one in causes), *([] if finished else [result.reason])]),
        finished,
        time.monotonic() - begun,
    )


def _is_in(line: str, said: str) -> bool:
    file, _, number = line.rpartition(":")
    shown = f'File "{file}", line {number},'  # in a traceback
    place = said.find(line)
    while place >= 0:
        if not said[place + len(line) : place + len(line) + 1].isdigit():
            return True
        place = said.find(line, place + 1)
    return shown in said
