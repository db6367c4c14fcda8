"""The rerun in separate interpreters: right code passes, what depends on process state fails, and
nothing of it is left behind.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import distcheck
from distcheck.plan.cases import plan_cases
from distcheck.plan.settings import Request
from distcheck.records import CaseReport, CheckResult
from distcheck.training.loading import strategy_names
from distcheck.verification.run import run_cases
from distcheck.worlds.pool import Pool
from distcheck.worlds.surroundings import HASH_SEED, HASH_SEEDS
from tests.correct import LAYOUTS
from tests.world.command import ROOT
from tests.world.test_worlds import _is_zombie, _wait_until

SMALL = "tests.mutants.small:Small"
BY_SET = "tests.mutants.process:fills_a_bucket_in_the_order_of_a_set"

CODE = """
import os, pathlib, sys
import torch, torch.distributed as dist

def good(model, step):
    for p in model.parameters():
        p.grad *= step.weight
        dist.all_reduce(p.grad)
        p.grad /= step.world_size

def says(model, step):
    names = ("PYTHONHASHSEED", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    said = [hash("name"), id(torch.float32), ",".join(os.environ), *map(os.environ.get, names)]
    with open(f"said-{step.rank}", "a") as file:
        file.write(repr(said) + "\\n") if step.index == 0 else None
    good(model, step)

def by_machine(model, step):
    # first among the ranks of a machine, then among machines: right on any, with other roundings
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    machines = [list(range(first, first + local)) for first in range(0, step.world_size, local)]
    across = [list(ranks) for ranks in zip(*machines)]
    groups = [dist.new_subgroups_by_enumeration(which)[0] for which in (machines, across)]
    for p in model.parameters():
        p.grad *= step.weight
        for group in groups:
            if group.size() > 1:
                gathered = [torch.empty_like(p.grad) for _ in range(group.size())]
                dist.all_gather(gathered, p.grad, group=group)
                p.grad = sum(gathered[1:], gathered[0])
        p.grad /= step.world_size
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    return "code.py"


def only(report: distcheck.Report) -> CaseReport:
    (case,) = report.cases
    return case


def rerun_of(case: CaseReport) -> CheckResult:
    return next(check for check in case.checks if check.check == "rerun")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_right_code_passes(code: str, world: int) -> None:
    case = only(distcheck.verify(f"{code}:good", world=world, workload=SMALL, dtype="float32"))
    lacking = {check.check for check in case.checks if check.verdict != "pass"}
    assert lacking == ({"sensitivity"} if world == 1 else set())
    assert rerun_of(case).reason.startswith("in separate interpreters: hash seed")


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("strategy", sorted({*strategy_names()} - {*LAYOUTS}))
def test_every_built_in_strategy_passes(strategy: str, world: int) -> None:
    report = distcheck.verify(strategy, world=world)
    report.raise_for_verdict()
    reasons = {rerun_of(case).reason for case in report.cases if case.case.rerun}
    assert all("in separate interpreters: hash seeds" in reason for reason in reasons)


def test_the_ranks_of_the_rerun_share_nothing_that_machines_do_not(code: str) -> None:
    distcheck.verify(f"{code}:says", workload=SMALL, dtype="float32").raise_for_verdict()
    said = [Path(f"said-{rank}").read_text().splitlines() for rank in range(4)]
    first, again = ([eval(lines[world]) for lines in said] for world in (0, 1))
    hashes, addresses, orders, seeds, *machines = zip(*first, strict=True)
    assert set(seeds) == {str(HASH_SEED)}
    assert len(set(hashes)) == len(set(addresses)) == len(set(orders)) == 1
    assert machines == [tuple("0123"), tuple("4444"), tuple("0000")]
    hashes, addresses, orders, seeds, *machines = zip(*again, strict=True)
    one, two = map(str, HASH_SEEDS)
    assert seeds == (one, two, two, one)
    assert len(set(hashes)) == len(set(addresses)) == 2
    assert {*hashes, *addresses}.isdisjoint(first[0][:2])
    assert len(set(orders)) == 4
    assert machines == [tuple("0101"), tuple("2222"), tuple("0011")]


def test_what_is_right_on_any_machines_passes_with_other_roundings(code: str) -> None:
    """An exchange in two stages adds up in another order on two machines than on one."""
    case = only(distcheck.verify(f"{code}:by_machine", workload=SMALL, dtype="float32"))
    assert (case.verdict, case.diagnosis) == ("pass", ())
    assert (
        "there the bits differ, caused only by nodes, and every check passes as well"
        in rerun_of(case).reason
    )


def test_without_separate_interpreters_it_is_not_seen_and_said() -> None:
    case = only(distcheck.verify(BY_SET, workload=SMALL, dtype="float32", separate=False))
    assert case.verdict == "pass"
    assert rerun_of(case).reason == "not in separate interpreters: because of --no-separate"


def test_chance_is_not_taken_for_process_state() -> None:
    chance = "tests.mutants.order:order_of_arrival"
    case = only(distcheck.verify(chance, workload=SMALL, dtype="float32"))
    (cause,) = case.diagnosis
    assert cause.cause == "nondeterministic"
    assert "order.py:" in cause.evidence
    assert "os.urandom" in cause.evidence


@pytest.mark.sweep
def test_a_replay_in_other_interpreters_finds_the_same_and_nothing_is_left(pool: Pool) -> None:
    """What differs is where it was, with the same numbers. An interpreter that was killed in the
    meantime is started anew.
    """
    (case,) = plan_cases(
        Request(strategies=(BY_SET,), workloads=(SMALL,), dtype="float32", steps=1)
    )
    assert case.separate
    me = psutil.Process()
    before, descriptors = set(me.children(recursive=True)), me.num_fds()
    own = Pool()
    try:
        own.wait_ready()
        helper = set(me.children()) - before
        own.open_interpreters()
        while not own.interpreters_ready:
            own.pump(0.1)
        further = set(me.children()) - before - helper
        assert (len(helper), len(further)) == (1, 2)
        killed = further.pop()
        killed.kill()
        killed.wait()
        again = run_cases([case], own)
        made = set(me.children(recursive=True)) - before
    finally:
        own.close()
    assert len(made) == 3
    assert not any(process.is_running() for process in made | further)
    assert me.num_fds() <= descriptors
    once = run_cases([case], pool)
    for report in (once, again):
        assert report.environment["hash_seeds"] == [HASH_SEED, *HASH_SEEDS]
        (cause,) = only(report).diagnosis
        assert cause.cause == "depends-on-process-state"
    assert rerun_of(only(once)) == rerun_of(only(again))
    assert only(once).diagnosis == only(again).diagnosis


def test_interpreters_die_with_the_front() -> None:
    program = (
        "from distcheck.worlds.pool import Pool\n"
        "pool = Pool()\n"
        "pool.open_interpreters()\n"
        "while pool.importing or not pool.interpreters_ready: pool.pump(0.1)\n"
        "print('ready', flush=True)\n"
        "while True: pool.pump(1)\n"
    )
    front = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert front.stdout is not None
    assert front.stdout.readline() == b"ready\n"
    family = psutil.Process(front.pid).children(recursive=True)
    assert len(family) == 3, "the helper and two interpreters"
    front.send_signal(signal.SIGKILL)
    front.wait()
    _wait_until(lambda: not any(p.is_running() and not _is_zombie(p.pid) for p in family))
