"""Worlds whose ranks are threads of one process: like others, and what those cannot say."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

import distcheck
from distcheck.errors import ExitCode, LeftOutError, NotSimulatedError
from distcheck.judge.diagnosis.outcomes import explain
from distcheck.plan import cases as plan
from distcheck.plan.settings import Request
from distcheck.records import Diagnosis, Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.worlds import root_cause
from distcheck.worlds.launch import refusal_of, run_until_over
from distcheck.worlds.pool import Pool
from tests.mutants import Mutant, everything, subtle
from tests.mutants.causes import CAUSES, WHEN_SIMULATED
from tests.mutants.subtle import Subtle
from tests.mutants.subtle import causes as subtle_causes
from tests.world.launching import run, start
from tests.world.test_verify import assert_everything_compared

JOBS = "tests.addons.simulated.simulated_jobs"
STRATEGIES = (
    "allreduce", "ddp", "ddp_allreduce_hook", "ddp_bf16_hook", "ddp_bucket_view",
    "ddp_find_unused", "ddp_fp16_hook", "ddp_no_sync", "ddp_small_buckets", "ddp_static_graph",
    "fsdp", "gather_scatter", "reduce_broadcast", "ring", "zero1",
)  # fmt: skip

QUICK = ("ddp", "zero1")


def program(pool: Pool, name: str, *, deadline_s: float = 30.0) -> tuple[list[Outcome], Diagnosis]:
    """How the ranks of a simulated world of 4 end that run one of the programs of the jobs."""
    outcomes, _ = run(
        pool, f"{JOBS}:runs", 4, backend="simulated", deadline_s=deadline_s, program=name
    )
    found = explain(outcomes)
    return outcomes, found[0] if found else Diagnosis(cause="", evidence="", suggestion="")


def line_of(program: str, text: str) -> str:
    """A line of one of the programs, as messages have it."""
    path = Path(__file__).with_name("simulated_jobs.py")
    lines = path.read_text().splitlines()
    first = lines.index(f"def _{program}(rank: int) -> None:")
    return f"{path}:{next(n for n, line in enumerate(lines[first:], first + 1) if text in line)}"


def sweep(*values: object) -> list[object]:
    """Parameters for the sweep only."""
    return sweep_of(*((value,) for value in values))


def sweep_of(*values: tuple[object, ...]) -> list[object]:
    """The same, several at once."""
    return [pytest.param(*several, marks=pytest.mark.sweep) for several in values]


@pytest.mark.parametrize("world", [3, *sweep(2, 4, 5, 6, 7, 8)])
def test_every_call_leaves_the_bits_that_gloo_leaves(pool: Pool, world: int) -> None:
    results = []
    for backend in ("gloo", "simulated"):
        outcomes, digests = run(pool, f"{JOBS}:calls", world, backend=backend, deadline_s=60.0)
        assert {o.outcome for o in outcomes} == {RankEnd.FINISHED}, outcomes
        results.append([msgspec.msgpack.decode(digest) for digest in digests])
    assert results[0] == results[1]
    assert len(results[0][0]) > 40


@pytest.mark.parametrize("workload", ["mlp", *sweep("exact", "cnn", "composite")])
@pytest.mark.parametrize("world", [3, *sweep(2, 4, 5, 8)])
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero1", *sweep(*(s for s in STRATEGIES if s not in ("ddp", "zero1")))]
)
def test_training_equals_gloo(pool: Pool, strategy: str, world: int, workload: str) -> None:
    request = Request(
        strategies=(strategy,), worlds=(world,), workloads=(workload,), batch=48, steps=3,
        dtype="float32",
    )  # fmt: skip
    (case,) = plan.plan_cases(request)
    results = []
    for backend in ("gloo", "simulated"):
        about = {"case": msgspec.to_builtins(case)}
        outcomes, digests = run(
            pool, f"{JOBS}:trains", world, backend=backend, deadline_s=60.0, **about
        )
        assert {o.outcome for o in outcomes} == {RankEnd.FINISHED}, outcomes
        results.append(digests)
    assert results[0] == results[1]


def test_a_world_larger_than_the_machine_is_judged_as_any_other() -> None:
    report = distcheck.verify(
        "allreduce", backend="simulated", world=12, workload="mlp", dtype="float32", steps=2,
        batch=30,
    )  # fmt: skip
    assert_everything_compared(report)
    (case,) = report.cases
    assert {r.layer for r in case.checks if r.check == "gradients"} == {
        "bitwise", "rounding", "full batch float32",
    }  # fmt: skip
    assert any("threads of one process" in said for said in report.not_shown)
    assert any("hash seed" in said for said in report.not_shown)


# Over so many ranks no workload `exact` is left to these: distcheck refuses it and says why.
NOT_EXACT_AT_256 = {
    "ddp_bf16_hook": "in bfloat16 may have a rounding error as large as the sum .*: no bound is",
    "ddp_fp16_hook": "its gradients may reach 1179648 and float16 carries 65504",
}


@pytest.mark.sweep
@pytest.mark.parametrize(("strategy", "why"), NOT_EXACT_AT_256.items())
def test_integers_beyond_the_dtype_are_refused_at_256_ranks(strategy: str, why: str) -> None:
    with pytest.raises(LeftOutError, match=why):
        distcheck.verify(strategy, backend="simulated", world=256, workload="exact", steps=2)


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s not in NOT_EXACT_AT_256])
def test_strategies_pass_at_256_ranks(strategy: str) -> None:
    report = distcheck.verify(
        strategy, backend="simulated", world=256, workload="exact", steps=2, deadline_s=120.0
    )
    assert_everything_compared(report)


@pytest.mark.sweep
@pytest.mark.parametrize("order", ["ring", "tree", "recursive-halving", "rank"])
def test_each_order_is_judged_to_the_bit(order: str) -> None:
    report = distcheck.verify(
        "allreduce", backend=f"simulated:{order}", world=[5, 17], workload="mlp", dtype="float32"
    )
    assert_everything_compared(report)
    assert "bitwise" in {r.layer for c in report.cases for r in c.checks if r.check == "gradients"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mutant", [m for m in everything() if not m.processes], ids=lambda m: m.name
)
def test_mutants_fail_as_in_processes(mutant: Mutant) -> None:
    report = distcheck.verify(**{**mutant.asked, "backend": "simulated", "deadline_s": 60.0})
    causes = {found.cause for case in report.cases for found in case.diagnosis}
    assert causes == WHEN_SIMULATED.get(mutant.name, CAUSES[mutant.name])
    if mutant.name in WHEN_SIMULATED:
        assert report.verdict == "fail"
        return
    results = [result for case in report.cases for result in case.checks]
    assert {(r.check, r.layer) for r in results if r.verdict == "fail"} == mutant.caught
    assert int(report.exit_code) == mutant.exit_code


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mutant", [m for m in subtle.everything() if m.asked is not None], ids=lambda m: m.name
)
def test_subtle_mutants_fail_and_none_is_named_wrong(mutant: Subtle) -> None:
    assert mutant.asked is not None
    if mutant.name == "ThreadThatIsJoinedLater":
        with pytest.raises(NotSimulatedError, match="a thread that belongs to no rank calls"):
            distcheck.verify(**mutant.asked, backend="simulated")
        return
    report = distcheck.verify(**mutant.asked, backend="simulated")
    assert report.verdict == "fail"
    named = {found.cause for case in report.cases for found in case.diagnosis} - {"unexplained"}
    own = subtle_causes.CAUSES[mutant.name]
    assert named <= subtle_causes.WHEN_SIMULATED.get(mutant.name, own)


def test_what_processes_do_not_share_is_a_ranks_own(pool: Pool, tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(4)]
    for folder in folders:
        folder.mkdir()
    about = {"folders": [str(folder) for folder in folders]}
    ranks = start(pool, f"{JOBS}:own_state", 4, backend="simulated", **about)
    run_until_over(pool, ranks)
    assert ranks.results == [b"3"] * 4, root_cause.rank_outcomes(ranks.children, hung=ranks.hung)
    assert [c.output for c in ranks.children] == [f"rank {rank} prints\n" for rank in range(4)]
    ranks.close()


def test_what_code_keeps_in_a_process_is_a_ranks_own(pool: Pool) -> None:
    """In modules, torch, Python and packages: see kept_by_ranks.py."""
    outcomes, seen = run(pool, f"{JOBS}:keeps", 3, backend="simulated")
    assert seen == [b""] * 3, outcomes


@pytest.mark.sweep
def test_a_rank_by_itself_sees_what_it_keeps(pool: Pool) -> None:
    """The probes are right about processes."""
    outcomes, seen = run(pool, f"{JOBS}:keeps", 3)
    assert seen == [b""] * 3, outcomes


@pytest.mark.parametrize(
    ("name", "words", "odd", "usual"),
    [
        ("odd_operation", "they differ in the operation", "dist.reduce(", "dist.all_reduce("),
        ("other_op", "they differ in the reduce operation", "dist", "dist"),
        ("other_root", "they differ in the root", "dist", "dist"),
        ("other_size", "they differ in the number of elements", "dist", "dist"),
        ("other_dtype", "they differ in the dtype", "dist", "dist"),
        ("other_splits", "they differ in the split sizes", "dist", "dist"),
    ],
)
def test_a_mismatch_names_2_lines(pool: Pool, name: str, words: str, odd: str, usual: str) -> None:
    outcomes, cause = program(pool, name)
    assert {o.outcome for o in outcomes} == {RankEnd.HUNG}
    assert cause.cause == "collective-mismatch"
    assert words in cause.evidence
    assert "ranks 0, 1, 3 called" in cause.evidence
    assert "most ranks agree, and rank 2 made a different call" in cause.evidence
    assert line_of(name, odd) in cause.evidence
    assert line_of(name, usual) in cause.evidence


def test_a_tie_accuses_no_rank(pool: Pool) -> None:
    _, cause = program(pool, "half_and_half")
    assert "the groups are equally large, so it is unknown which is wrong" in cause.evidence


def test_messages_must_fit_each_other(pool: Pool) -> None:
    outcomes, cause = program(pool, "other_message")
    assert {o.rank: o.outcome for o in outcomes} == {
        0: RankEnd.FINISHED, 1: RankEnd.HUNG, 2: RankEnd.HUNG, 3: RankEnd.FINISHED,
    }  # fmt: skip
    assert cause.cause == "collective-mismatch"
    assert line_of("other_message", "dist.send") in cause.evidence
    assert line_of("other_message", "dist.recv") in cause.evidence


@pytest.mark.parametrize(
    ("name", "cause", "said"),
    [
        ("all_receive", "hang", "rank 3 waits in recv(from rank 0) of [2] float32"),
        ("both_send", "hang", "rank 2 waits in send(to rank 3) of [2] float32"),
        ("one_too_few", "collective-mismatch", "for rank 2; rank 2 finished"),
        ("sleeps", "hang", "rank 2 sleeps for 1000 s, longer than the deadline of 30 s"),
    ],
)
def test_ranks_that_all_wait_are_deadlocked(pool: Pool, name: str, cause: str, said: str) -> None:
    begun = time.monotonic()
    _, found = program(pool, name)
    assert found.cause == cause
    assert said in found.evidence
    assert time.monotonic() - begun < 20  # of a deadline of 30 s, on a crowded machine


@pytest.mark.parametrize(
    "name",
    ["polls", "runs_a_command", "waits_for_futures_out_of_order", "waits_for_futures_in_backward",
     "trains_until_all_have_ended", "asks_the_store", "asks_for_gloo"],
)  # fmt: skip
def test_code_that_asks_in_a_loop_or_runs_a_command_ends(pool: Pool, name: str) -> None:
    outcomes, _ = program(pool, name)
    assert {o.outcome for o in outcomes} == {RankEnd.FINISHED}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("locks", "lock.acquire()"),
        *sweep_of(
            ("waits_for_a_queue", ".get()"),
            ("waits_for_a_thread", ".wait()"),
            ("waits_for_a_socket", "own.accept()"),
            ("spins", "while rank == 2"),
        ),
    ],
)
def test_a_rank_that_blocks_outside_of_torch_is_named(pool: Pool, name: str, text: str) -> None:
    outcomes, cause = program(pool, name, deadline_s=0.5)
    assert (outcomes[0].rank, outcomes[0].outcome) == (2, RankEnd.HUNG)
    assert line_of(name, text).rpartition(":")[2] in outcomes[0].detail
    assert outcomes[-1].outcome is RankEnd.ENDED, "rank 3 had no turn, and is not to blame"
    said = f"rank 2 was in no collective, at {line_of(name, text)}, and did not yield"
    assert f"{said}; rank 3 waited for the scheduler" in cause.evidence
    assert cause.suggestion == "read the stack of rank 2: it shows where"


def test_a_rank_that_asks_a_person_gets_no_answer(pool: Pool) -> None:
    """As in processes, which have no terminal."""
    outcomes, cause = program(pool, "waits_for_a_person")
    assert cause.cause == "crash"
    assert "EOFError" in outcomes[0].detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="code that finds a GPU is refused")
def test_code_may_look_for_a_gpu_and_go_on_without(pool: Pool) -> None:
    outcomes, _ = program(pool, "looks_for_a_gpu")
    assert {o.outcome for o in outcomes} == {RankEnd.FINISHED}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("forks", "it calls os.fork at"),
        ("starts_a_process", "it starts a process at"),
        ("starts_a_pool", "it starts a process at {line of: pool.submit}"),
        ("spawns", "it starts a process at {line of: torch.multiprocessing.spawn}"),
        ("handles_a_signal", "it sets a signal handler at"),
        ("imports_another_transport", "it imports horovod, which communicates by itself at"),
        ("imports_mpi", "it imports mpi4py, which communicates by itself at"),
        ("imports_ray", "it imports ray, which communicates by itself at"),
        ("talks_from_a_pool", "a thread that belongs to no rank calls barrier"),
        ("talks_from_a_thread", "a thread that belongs to no rank calls all_reduce"),
        ("starts_rpc", "it starts RPC, which uses its own threads and sockets at"),
        ("waits_for_a_while",
         "the time limit of 2 s passes for recv(from rank 0) of [3] float32 at"),
        ("makes_a_group_with_a_limit",
         "the time limit of 3 s passes for broadcast(root 0) of [3] float32 at"),
        ("waits_for_a_key_for_a_while",
         "the time limit of 2 s passes for the store's keys 0//never at"),
        ("makes_a_world_of_its_own", "it calls init_process_group itself"),
        ("defines_an_operator", "it defines operators by torch.library"),
        ("moves_something_else", "all_reduce of a tensor of layout torch.sparse_coo at"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(pool: Pool, name: str, said: str) -> None:
    ranks = start(pool, f"{JOBS}:runs", 4, backend="simulated", program=name)
    run_until_over(pool, ranks)
    refused = refusal_of(ranks)
    ranks.close()
    assert isinstance(refused, NotSimulatedError)
    words, _, text = said.partition("{line of: ")
    said = words + line_of(name, text.removesuffix("}")) if text else words
    assert str(refused).startswith(f"backend simulated cannot run this code: {said}")
    assert str(refused).endswith("; pass --backend gloo")
    assert refused.exit_code == ExitCode.CANNOT_RUN == 3


def test_a_slow_front_gets_the_same_refusal(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for the thread raises its error as well, which says less."""
    ranks = start(pool, f"{JOBS}:runs", 4, backend="simulated", program="talks_from_a_pool")
    pump = pool.pump
    monkeypatch.setattr(pool, "pump", lambda wait_s: (time.sleep(1.0), pump(wait_s)))
    run_until_over(pool, ranks)
    refused = refusal_of(ranks)
    ranks.close()
    assert str(refused).startswith(
        "backend simulated cannot run this code: a thread that belongs to no rank"
    )


def test_a_gpu_cannot_be_simulated(pool: Pool) -> None:
    ranks = start(pool, f"{JOBS}:runs", 4, backend="simulated", program="uses_a_gpu")
    run_until_over(pool, ranks)
    refused = refusal_of(ranks)
    ranks.close()
    assert str(refused) == (
        "backend simulated cannot run this code: it uses CUDA at "
        f"{line_of('uses_a_gpu', '.cuda()')}; pass --backend gloo --device cuda"
    )


def test_the_rank_that_ends_the_process_is_blamed(pool: Pool) -> None:
    about = {"culprit": 2, "signal": int(signal.SIGSEGV)}
    outcomes, _ = run(pool, "killed", 4, backend="simulated", **about)
    assert (outcomes[0].rank, outcomes[0].outcome) == (2, RankEnd.KILLED)
    assert {o.outcome for o in outcomes[1:]} == {RankEnd.ENDED}


def test_ranks_that_raise_or_leave_are_the_cause_and_their_peers_victims(pool: Pool) -> None:
    outcomes, _ = run(pool, "raises", 4, backend="simulated", culprit=2)
    assert (outcomes[0].rank, outcomes[0].outcome) == (2, RankEnd.RAISED)
    assert "rank's own error" in outcomes[0].detail
    assert all("secondary failure (peer exited)" in o.detail for o in outcomes[1:])
    outcomes, _ = run(pool, "exits", 4, backend="simulated", culprit=1, code=7)
    assert (outcomes[0].rank, outcomes[0].outcome) == (1, RankEnd.EXITED)
    assert "exited with code 7" in outcomes[0].detail


@pytest.mark.sweep  # the lines of a screen are held by tests/addons/simulated/test_scale.py
def test_scale_names_the_first_world_that_fails(tmp_path: Path) -> None:
    (tmp_path / "sync.py").write_text(
        "import torch.distributed as dist\n"
        "def sync(model):\n"
        "    world = dist.get_world_size()\n"
        "    for parameter in model.parameters():\n"
        "        dist.all_reduce(parameter.grad)\n"
        "        parameter.grad /= world if world < 8 else world - 1\n"
    )
    words = ["--strategy", "sync.py:sync", "--world", "2,8", "--orders", "ring,tree"]
    ran = subprocess.run(
        [sys.executable, "-m", "distcheck", "scale", *words, "--html", "scale.html"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    assert "ring first fails at world size 8 (wrong-divisor)" in ran.stdout
    assert "Error against world size: order tree" in (tmp_path / "scale.html").read_text()


@pytest.mark.parametrize("used", ["group=group", ""], ids=["used", "never_called"])
def test_groups_that_are_never_destroyed_are_a_note_and_no_failure(
    used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sync.py").write_text(
        "import torch.distributed as dist\n"
        "def sync(model):\n"
        "    group = dist.new_group([0, 1])\n"
        "    for parameter in model.parameters():\n"
        f"        dist.all_reduce(parameter.grad, {used})\n"
        "        parameter.grad /= 2\n"
    )
    monkeypatch.chdir(tmp_path)
    report = distcheck.verify(
        "sync.py:sync", world=2, backend="simulated", workload="mlp:small", dtype="float32",
        steps=4, save=None,
    )  # fmt: skip
    (case,) = report.cases
    assert case.verdict == "pass"
    (note,) = [note for note in case.notes if note.startswith("groups-not-destroyed: ")]
    assert "ranks 0, 1 made 4 groups of ranks 0, 1 at " in note
    assert f"{tmp_path / 'sync.py'}:3, one after the other, and never destroyed them" in note


def test_unused_groups_of_setup_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sync.py").write_text(
        "import torch.distributed as dist\n"
        "class Sync:\n"
        "    def wrap(self, model):\n"
        "        self.groups = []\n"
        "        for parameter in model.parameters():\n"
        "            dist.broadcast(parameter.data, 0)\n"
        "            self.groups.append(dist.new_group([0, 1]))\n"
        "        return model\n"
        "    def sync(self, model, step):\n"
        "        for parameter in model.parameters():\n"
        "            dist.all_reduce(parameter.grad)\n"
        "            parameter.grad /= 2\n"
    )
    monkeypatch.chdir(tmp_path)
    report = distcheck.verify(
        "sync.py:Sync", world=2, backend="simulated", workload="mlp:small", dtype="float32",
        steps=4, save=None,
    )  # fmt: skip
    (case,) = report.cases
    assert case.verdict == "pass"
    assert not [note for note in case.notes if note.startswith("groups-not-destroyed: ")]


def test_unusual_calls_are_only_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sync.py").write_text(
        "import torch.distributed as dist\n"
        "def flat_on_one(model, step):\n"
        "    for parameter in model.parameters():\n"
        "        grad = parameter.grad.view(-1) if step.rank else parameter.grad\n"
        "        dist.all_reduce(grad)\n"
        "        parameter.grad /= 2\n"
        "def columns(model, step):\n"
        "    for parameter in model.parameters():\n"
        "        columns = parameter.grad.unbind(1) if parameter.dim() > 1 else [parameter.grad]\n"
        "        for column in columns:\n"
        "            dist.all_reduce(column)\n"
        "        parameter.grad /= 2\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, verdict, said in (
        ("flat_on_one", "pass", "other-shapes: "),
        ("columns", "fail", "tensor-with-gaps: "),
    ):
        report = distcheck.verify(
            f"sync.py:{name}", world=2, backend="simulated", workload="mlp:small",
            dtype="float32", save=None,
        )  # fmt: skip
        (case,) = report.cases
        assert case.verdict == verdict
        assert [note for note in case.notes if note.startswith(said)], case.notes


@pytest.mark.sweep  # the search is held by tests/addons/simulated/test_schedules.py
@pytest.mark.parametrize(
    ("source", "cause"), [("", "message-race"), ("s", "")], ids=["from_any", "from_each"]
)
def test_schedules_name_a_receive_from_any_and_not_its_right_twin(
    source: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sync.py").write_text(
        "import torch, torch.distributed as dist\n"
        "def sync(model):\n"
        "    rank, world = dist.get_rank(), dist.get_world_size()\n"
        "    for parameter in model.parameters():\n"
        "        for s in range(1, world):\n"
        "            if rank == 0:\n"
        "                got = torch.empty_like(parameter.grad)\n"
        f"                dist.recv(got, {source or None})\n"
        "                parameter.grad += got\n"
        "            elif rank == s:\n"
        "                dist.send(parameter.grad, 0)\n"
        "        dist.broadcast(parameter.grad, 0)\n"
        "        parameter.grad /= world\n"
    )
    monkeypatch.chdir(tmp_path)
    report = distcheck.verify(
        "sync.py:sync", world=4, backend="simulated", workload="mlp:small", dtype="float32",
        schedules=12, save=None,
    )  # fmt: skip
    first = report.cases[0]
    assert [c.cause for c in first.diagnosis] == ([cause] if cause else [])
    schedules = next(c for c in first.checks if c.check == "schedules")
    assert schedules.verdict == ("fail" if cause else "pass")


@pytest.mark.sweep  # the search is held by tests/addons/simulated/test_schedules.py
@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_ring_of_sends_needs_buffering_and_its_right_twin_does_not(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sync.py").write_text(
        "import torch, torch.distributed as dist\n"
        "def sync(model):\n"
        "    rank, world = dist.get_rank(), dist.get_world_size()\n"
        "    for parameter in model.parameters():\n"
        "        got = torch.empty_like(parameter.grad)\n"
        f"        if rank == 0 and {first == 'recv'}:\n"
        "            dist.recv(got, world - 1)\n"
        "            dist.send(parameter.grad, 1)\n"
        "        else:\n"
        "            dist.send(parameter.grad, (rank + 1) % world)\n"
        "            dist.recv(got, (rank - 1) % world)\n"
        "        dist.all_reduce(parameter.grad)\n"
        "        parameter.grad /= world\n"
    )
    monkeypatch.chdir(tmp_path)
    report = distcheck.verify(
        "sync.py:sync", world=4, backend="simulated", workload="mlp:small", dtype="float32",
        schedules=6, save=None,
    )  # fmt: skip
    causes = [c.cause for c in report.cases[0].diagnosis]
    assert causes == (["needs-buffering"] if first == "send" else [])
    assert int(report.exit_code) == (4 if first == "send" else 0)
