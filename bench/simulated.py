"""A step in a simulated world over one in a world of processes on gloo; and what many ranks take.

Both train the same: a perceptron of 26 thousand parameters, by a plain all_reduce and by DDP, on
256 samples a step. In turns, so that both meet the same machine. A step is given in seconds of the
clock, the median of rank 0's but the first two, and in seconds of a core, of all ranks together:
what a run of many steps takes more than one of few. The former depends on the cores and on what
else they do. Memory is the peak of the process that holds the simulated world, torch included.

    python bench/simulated.py [RANKS ...]      by default 2 4 8, and 64 256 without a peer
    python bench/simulated.py schedules        schedules a second at 4 ranks, by the clock
    python bench/simulated.py messages         what a message takes of a core, in rings of ranks
"""

import os
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from distcheck.plan import cases as plan
from distcheck.plan.settings import Request
from distcheck.records import Case
from distcheck.training.jobs import TRAIN, EpochFigures, RunningLoss, TrainRequest
from distcheck.verification.run import run_cases
from distcheck.worlds import root_cause
from distcheck.worlds.launch import Ranks, run_until_over, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.rendezvous import Rendezvous

ROUNDS, LEFT_OUT = 3, 2
WORKLOAD = f"{Path(__file__).parent / 'peers' / 'small_mlp.py'}:workload"
MOST_PROCESSES, SCHEDULED = 16, 4
RINGS, PARAMETERS = (8, 16, 32), 8  # what the perceptron has
FEW, MANY = 3, 23  # steps of the two runs whose difference is taken
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Ran:
    """What a run took: a step by the clock, all ranks' seconds of a core, the largest process."""

    step_s: float
    core_s: float
    peak_bytes: int


def case_of(strategy: str, backend: str, world: int) -> Case:
    """What both are asked to train."""
    request = Request(
        strategies=(strategy,), worlds=(world,), workloads=(WORKLOAD,), dtype="float32",
        backend=backend, batch=max(256, world), steps=MANY, deadline_s=300.0,
    )  # fmt: skip
    return plan.plan_cases(request)[0]


def train(pool: Pool, case: Case, steps: int) -> Ran:
    """Trains so many steps. The program ends where a rank fails."""

    def request(rendezvous: Rendezvous) -> TrainRequest:
        return TrainRequest(
            case=case, rendezvous=rendezvous, description=b"", epochs=1, steps=steps, log_every=0
        )

    ranks = Ranks(
        job=TRAIN, backend=case.backend, size=case.world, request=request,
        deadline_s=case.deadline_s,
    )  # fmt: skip
    world = start_world(pool, ranks)
    said: list[EpochFigures] = []
    core_s, peak = 0.0, 0

    def hear(payload: bytes) -> None:
        nonlocal core_s, peak
        figures = msgspec.msgpack.decode(payload, type=EpochFigures | RunningLoss)
        if isinstance(figures, EpochFigures):
            said.append(figures)
            if len(said) == case.world:
                core_s, peak = of_processes(pool)

    for child in world.children:
        child.on_said = hear
    run_until_over(pool, world)
    if not world.succeeded:
        sys.exit(root_cause.rank_outcomes(world.children, hung=world.hung)[0].detail)
    world.close()
    first = next(figures for figures in said if figures.rank == 0)
    return Ran(statistics.median(first.step_s[min(LEFT_OUT, steps - 1) :]), core_s, peak)


def of_processes(pool: Pool) -> tuple[float, int]:
    """Seconds of a core that the pool's processes have had, and the largest peak of memory."""
    core_s, peaks = 0.0, [0]
    for child in pool._children.values():
        try:
            stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{child.pid}/status").read_text()
        except OSError:
            continue
        core_s += (int(stat[11]) + int(stat[12])) / TICKS
        peaks += [int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line]
    return core_s, max(peaks)


def step_of(pool: Pool, case: Case, *, few: int = FEW, many: int = MANY) -> Ran:
    """One step of a run."""
    short, long = train(pool, case, few), train(pool, case, many)
    core_s = (long.core_s - short.core_s) / (many - few)
    return Ran(long.step_s, core_s, long.peak_bytes)


def main(worlds: list[int]) -> None:
    """Prints a line for each strategy and world."""
    pool = Pool()
    pool.wait_ready()
    try:
        for strategy in ("allreduce", "ddp"):
            for world in worlds:
                print(f"{strategy}, {world} ranks: {figures_of(pool, strategy, world)}", flush=True)
    finally:
        pool.close()


def print_schedules(pool: Pool) -> None:
    """What one schedule more takes: a search of many less one of few, over their difference."""
    few, many = 10, 110
    spent = []
    for count in (few, many):
        request = Request(
            strategies=("allreduce",), worlds=(SCHEDULED,), workloads=("mlp:small",),
            dtype="float32", backend="simulated", schedules=count, deadline_s=300.0,
        )  # fmt: skip
        case = plan.plan_cases(request)[0]
        begun = time.monotonic()
        report = run_cases([case], pool).cases[0]
        if report.verdict != "pass":
            sys.exit(f"the schedules ended in {report.verdict}")
        spent.append(time.monotonic() - begun)
    each = (spent[1] - spent[0]) / (many - few)
    print(f"schedules, {SCHEDULED} ranks: {1 / each:.1f} a second (aim: 50)")


def print_messages(pool: Pool) -> None:
    """A ring sends 2 (W - 1) messages on each rank for each parameter: what one takes should not
    grow with W.
    """
    for world in RINGS:
        ran = step_of(pool, case_of("ring", "simulated", world), few=1, many=5)
        messages = PARAMETERS * 2 * (world - 1) * world
        each = 1e6 * ran.core_s / messages
        print(f"ring, {world} ranks: {messages} messages a step, {each:.0f} us of a core each")


def figures_of(pool: Pool, strategy: str, world: int) -> str:
    """Ratios where a peer can run, and otherwise seconds and memory."""
    if world > MOST_PROCESSES:
        ran = step_of(pool, case_of(strategy, "simulated", world))
        return (
            f"{ran.step_s:.3f} s a step, {ran.core_s:.3f} s of a core, "
            f"{ran.peak_bytes / 2**30:.2f} GiB"
        )
    pairs = [
        (
            step_of(pool, case_of(strategy, "simulated", world)),
            step_of(pool, case_of(strategy, "gloo", world)),
        )
        for _ in range(ROUNDS)
    ]
    return "; ".join(
        ratio(what, [getattr(a, name) for a, _ in pairs], [getattr(b, name) for _, b in pairs])
        for what, name in (("step", "step_s"), ("of a core", "core_s"))
    )


def ratio(what: str, ours: list[float], theirs: list[float]) -> str:
    """The median ratio with its range, and the medians."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    mine, peer = (1000 * statistics.median(side) for side in (ours, theirs))
    return (
        f"{what} {statistics.median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f}; aim: "
        f"below 1), {mine:.1f} ms over {peer:.1f} ms"
    )


if __name__ == "__main__":
    if sys.argv[1:] in (["schedules"], ["messages"]):
        with closing(Pool()) as pool:
            pool.wait_ready()
            print_schedules(pool) if sys.argv[1] == "schedules" else print_messages(pool)
        sys.exit()
    main([int(word) for word in sys.argv[1:]] or [2, 4, 8, 64, 256])
