"""Rules of whole jobs that no example of a training loop shows by itself: identity, the copy that a
reference runs in, one process that knows that it is alone, weights, remarks, and hangs.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from distcheck import private
from distcheck.job import accepting, causes, checks, copying, judging, replaying
from distcheck.job.checks.ranks import finite
from distcheck.job.inside import choosing, single_process_group
from distcheck.job.inside.batch_source import ALL, BatchSource
from distcheck.job.options import JobOptions
from distcheck.job.running import CommandResult, Watch
from distcheck.job.settings import JobSettings, ReplayTask, write
from distcheck.job.term_weights import term_weights
from distcheck.recordings.jobs.records import ClipCall, CollectiveCall, LossFactor, LossTerm
from distcheck.records import CheckResult
from distcheck.records.exit_status import RankEnd
from tests.job.recordings import (
    LR,
    Facts,
    Tensors,
    gradients,
    judged,
    make,
    mean,
    reference,
    replaced,
)
from tests.job.scripts import recorded
from tests.world import warm

# -- identity, not names ---------------------------------------------------------------------------

TWO_MODELS = """
real, fake = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
optimizers = [optimizer_of(real), optimizer_of(fake)]
loose = torch.nn.Parameter(torch.ones(2))
optimizers[1].add_param_group({"params": [loose]})
for step in range(2):
    x, y = batch(step)
    for model, optimizer in zip((real, fake), optimizers):
        optimizer.zero_grad()
        F.cross_entropy(model(x) * (loose if model is fake else 1), y).backward()
        optimizer.step()
"""


def test_parameters_of_one_name_belong_to_their_optimizers(tmp_path: Path) -> None:
    """Of two models, and one that no module holds."""
    job = recorded(TWO_MODELS, tmp_path, steps=4)
    assert [job.records[0, step].number for step in job.steps] == [0, 1, 0, 1]
    names = [set(job.parameters(step)) for step in job.steps]
    assert [len(one) for one in names] == [2, 3, 2, 3]
    assert names[0].isdisjoint(names[1])
    assert names[:2] == names[2:]


# -- what is not finite ----------------------------------------------------------------------------


def test_what_is_not_finite_is_named_and_nothing_after_it(tmp_path: Path) -> None:
    def breaks(facts: Facts) -> None:
        if facts.step >= 1 and facts.rank == 1:
            facts.of_record = {"not_finite": ("the loss",)}
            facts.raw = {n: g + 1 for n, g in facts.raw.items()}

    job = make(tmp_path, breaks)
    (result,) = finite(job)
    assert result.first is not None
    assert (result.first.step, result.first.rank) == (1, 1)
    asked = JobOptions(words=("python", "train.py"), no_reference=True, steps=3)
    case = judging.judge(asked, job, CommandResult(0, ()), None, "")
    assert case.verdict == "fail"
    assert [one.cause for one in case.diagnosis] == ["nonfinite"]
    assert all(check.verdict != "fail" for check in case.checks if check.check == "gradients")


# -- the copy that a reference runs in -------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a script that imports from beside its folder, and links."""
    root = tmp_path / "project"
    (root / "examples").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "library.py").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "log").write_text("kept")
    (root / "runs").symlink_to(tmp_path / "outside")
    (root / "own").symlink_to(root / "library.py")
    (root / "system").symlink_to("/etc/hostname")
    monkeypatch.chdir(root / "examples")
    return root


def test_a_copy_reaches_as_far_as_the_checkout(project: Path, tmp_path: Path) -> None:
    copy = copying.copy_project(tmp_path / "copy")
    assert (copy.missing, copy.project) == ("", project)
    assert copy.of(project / "examples") == tmp_path / "copy" / "examples"
    assert copy.of(tmp_path / "outside") is None
    script = str(project / "library.py")
    assert copy.words(["python", script, "--lr"]) == [
        "python", str(tmp_path / "copy" / "library.py"), "--lr",
    ]  # fmt: skip


def test_a_repository_of_another_user_above_is_not_copied(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that every user can write."""
    real, git = private._owners, project / ".git"
    monkeypatch.setattr(private, "_owners", lambda path: {4242} if path == git else real(path))
    assert copying.copy_project(tmp_path / "copy").project == project / "examples"


def test_what_a_copy_writes_stays_in_it(project: Path, tmp_path: Path) -> None:
    copy = copying.copy_project(tmp_path / "copy")
    (copy.folder / "runs" / "log").write_text("changed")
    assert (tmp_path / "outside" / "log").read_text() == "kept"
    assert (copy.folder / "own").resolve() == copy.folder / "library.py"
    if os.geteuid():  # who may write everywhere has a copy of everything
        assert (copy.folder / "system").is_symlink()


def test_a_device_is_not_copied(project: Path, tmp_path: Path) -> None:
    """It may have no end; every user may write to these."""
    (project / "zero").symlink_to("/dev/zero")
    (tmp_path / "outside" / "null").symlink_to("/dev/null")
    assert copying._special_names("/dev", ["null"]) == {"null"}
    copy = copying.copy_project(tmp_path / "copy")
    assert copy.missing == ""
    assert os.readlink(copy.folder / "zero") == "/dev/zero"
    assert os.readlink(copy.folder / "runs" / "null") == "/dev/null"


def test_links_that_lead_in_a_circle_are_copied_once(project: Path, tmp_path: Path) -> None:
    """Two folders outside with links to each other and into the project."""
    outside, other = tmp_path / "outside", tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("kept")
    (outside / "other").symlink_to(other)
    (outside / "latest").symlink_to("log")
    (other / "back").symlink_to(outside)
    (other / "project").symlink_to(project)
    (project / "itself").symlink_to(project)
    copy = copying.copy_project(tmp_path / "copy")
    assert copy.missing == ""
    runs = copy.folder / "runs"
    assert (runs / "other" / "back").resolve() == runs
    assert (runs / "latest").resolve() == runs / "log"
    for link in (runs / "other" / "project", copy.folder / "itself"):
        assert link.resolve() == copy.folder
    (runs / "other" / "file").write_text("changed")
    assert (other / "file").read_text() == "kept"


def test_large_values_stay(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MOST_BYTES", 3)
    assert copying.copy_project(tmp_path / "copy").project == project / "examples"
    (project / "examples" / "data").write_text("much")
    assert "start the job in a smaller folder" in copying.copy_project(tmp_path / "other").missing


# -- one process knows that it is alone ------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--world-size 2 --lr 2", "--world-size 1 --lr 2"),
        ("--world_size=2", "--world_size=1"),
        ("--nproc-per-node=2 --batch 2", "--nproc-per-node=1 --batch 2"),
        ("--num-nodes 4", "--num-nodes 1"),
        ("--gpus 3 --ranks 2", "--gpus 3 --ranks 1"),  # of three GPUs the job had two ranks
        ("--world-size", "--world-size"),
    ],
)
def test_options_that_count_ranks_say_one(words: str, expected: str) -> None:
    found, replaced_ones = replaying.with_one_rank(words.split(), 2)
    assert found == expected.split()
    assert bool(replaced_ones) == (words != expected)


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ("python main.py --multiprocessing-distributed", False),
        ("python -c pass train.py", False),
        ("python -X dev -c", True),
    ],
)
def test_a_rank_that_python_started_is_known_by_its_command(words: str, starts: bool) -> None:
    of_python = ["from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=5)"]
    assert replaying._is_spawned(words.split() + of_python * starts) == starts


SEES = """
import sys
from distcheck.job.inside import on_cpu
import torch
on_cpu.install(int(sys.argv[1]))
bn = torch.nn.SyncBatchNorm(3)
given = torch.randn(4, 3, 2, device="cuda").half()
torch.distributed.init_process_group("NCCL", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
assert len(torch.cuda.random.get_rng_state(device="cuda"))  # where it is defined, as Megatron calls
# torch.compile asks, and has one handler per function.
assert not torch.cuda.is_current_stream_capturing()
assert torch.cuda.current_stream is not torch.cuda.stream
print(torch.cuda.device_count(), bn(given).dtype)
torch.distributed.destroy_process_group()
# As a reference has it: nothing that a fork would lose.
from distcheck.job.inside import single_process_group
single_process_group.install()
torch.distributed.init_process_group("nccl")
group = torch.distributed.new_group([0, 1], backend="nccl")
backend = torch.distributed.get_backend(group)
assert backend == single_process_group.NAME, backend
# Nothing waits for the other ranks.
torch.distributed.TCPStore("127.0.0.1", 0, 2, True).set("key", "value")
from torch.multiprocessing import Barrier
single_process_group.run_first_rank(2)
Barrier(2).wait(60)
"""


@pytest.mark.parametrize(
    ("gpus", "variables", "seen"),
    [
        (0, {"LOCAL_WORLD_SIZE": "3"}, 3),
        (0, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        (0, {}, 2),
        (1, {"LOCAL_WORLD_SIZE": "3"}, 1),
    ],
)
def test_a_cpu_script_sees_a_gpu_per_rank(
    tmp_path: Path, gpus: int, variables: dict[str, str], seen: int
) -> None:
    plain = {
        k: v for k, v in os.environ.items() if k not in ("LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    }
    env = {**plain, **variables}
    ran = warm.run(SEES, str(gpus), cwd=tmp_path, env=env, program="-c", timeout=300)
    assert ran.stdout.split() == [str(seen), "torch.float16"], ran.stderr
    assert ran.returncode == 0, ran.stderr


def test_what_starts_ranks_gives_them_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = argparse.Namespace(world_size=2, batch=2, gpus=4)
    (found,) = single_process_group.with_one_rank((given,), 2)
    assert vars(found) == {"world_size": 1, "batch": 2, "gpus": 4}
    assert single_process_group.with_one_rank((2, True, "2", {"nprocs": 2, "lr": 2}), 2) == (
        1, True, "2", {"nprocs": 1, "lr": 2},
    )  # fmt: skip


def _copies(rank_gradients: list[Any], **about: float) -> choosing.Copies:
    plain = {
        "loss": 1.0, "passes": 1.0, "count": 0.0, "sums": 0.0, "own": 1.0, "exchanges": 0.0,
        **about,
    }  # fmt: skip
    numbers = {name: torch.tensor(value) for name, value in plain.items()}
    return {ReplayTask(rank, 0): {**g, **numbers} for rank, g in enumerate(rank_gradients)}


def test_a_script_that_goes_on_dividing_by_its_ranks_is_found(tmp_path: Path) -> None:
    """Its own exchange of one rank changes its gradient by one over the old number."""

    def exchanges(facts: Facts) -> None:
        call = CollectiveCall(
            name="all_reduce", place="train.py:9", elements=9, after_backward=True
        )
        facts.of_record = {"calls": (call,)}

    job = make(tmp_path, exchanges)
    found = _copies([gradients(0, 0), gradients(1, 0)], own=0.5)
    choice = choosing.choose(job, BatchSource(job), found, "", "")
    assert "--reference COMMAND" in choice.failure
    found = _copies([gradients(0, 0), gradients(1, 0)])
    assert not choosing.choose(job, BatchSource(job), found, "", "").failure


@pytest.mark.parametrize(
    ("exchanges", "off", "fails"),
    [
        (1, 0.0, False),  # logged
        (1, 0.1, False),
        (0, 0.0, False),  # a single process logs nothing
        (0, 0.1, True),  # as SyncBatchNorm: a rank's loss depends on the other ranks
    ],
)
def test_what_is_exchanged_before_backward(
    exchanges: int, off: float, fails: bool, tmp_path: Path
) -> None:
    call = CollectiveCall(name="all_reduce", place="train.py:9", elements=9, after_backward=False)

    def calls(facts: Facts) -> None:
        facts.of_record = {"calls": (call,)}

    job = make(tmp_path, calls)
    found = _copies([gradients(0, 0), gradients(1, 0)], exchanges=exchanges)
    for task, one in found.items():
        one["loss"] = torch.tensor(job.records[task.rank, 0].loss + off)  # type: ignore[index]
    found[ReplayTask(0, 0, doubles=True)] = found[ReplayTask(0, 0)]
    choice = choosing.choose(job, BatchSource(job), found, "", "the batches are apart")
    assert ("ranks communicate before backward" in choice.failure) == fails


@pytest.mark.parametrize(
    ("parts", "retry"),
    [
        ([slice(0, 3), slice(3, 6)], "own inputs"),  # of a sequence
        ([slice(0, 6), slice(0, 6)], ""),  # all of it, as in tensor parallelism
        ([slice(0, 3), slice(0, 3)], ""),
    ],
)
def test_ranks_that_divide_a_batch_have_the_inputs_of_the_script(
    parts: list[slice], retry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.arange(24.0).view(4, 6)
    monkeypatch.setattr(BatchSource, "batch", lambda *_: [batch])
    given = [batch[:, part] for part in parts]
    monkeypatch.setattr(BatchSource, "inputs", lambda _, step, pairs: [given[pairs[0][0]]])
    job = make(tmp_path, lambda facts: None)
    found = _copies([gradients(0, 0), gradients(1, 0)])
    assert choosing.choose(job, BatchSource(job), found, "", "").retry == retry
    assert choosing.choose(job, BatchSource(job), found, "", "", owns=True).retry == ""


@pytest.mark.parametrize(("classes", "mode"), [(8, "rank by rank"), (4, "together")])
def test_class_samples_stay_on_their_rank(classes: int, mode: str, tmp_path: Path) -> None:
    """Of all ranks' batches as one, each sample would have more negatives."""
    found = _copies([gradients(0, 0), gradients(1, 0)], classes=4)
    found[ReplayTask(ALL, 0)] = {**gradients(2, 0), "classes": torch.tensor(classes)}
    job = make(tmp_path, lambda facts: None)
    choice = choosing.choose(job, BatchSource(job), found, "", "")
    assert (choice.mode, choice.interacts) == (mode, mode == "together")


@pytest.mark.parametrize(
    ("sums", "count", "expected"),
    [
        ("", 4.0, (1.0,)),
        ("sum", 4.0, (1.0,)),  # divided by what one rank has
        ("sum", 8.0, (2.0,)),
        ("sum", 1.0, (1.0, 2.0)),
        ("times", 4.0, (1.0, 2.0)),  # a mean times its samples has no scale of its own either
    ],
)
def test_a_sum_over_samples_may_be_that_of_all_ranks(
    sums: str, count: float, expected: tuple[float, ...], tmp_path: Path
) -> None:
    job = make(tmp_path, lambda facts: None)
    about = {"sums": float(choosing.SUMS.index(sums)), "count": count}
    found = _copies([gradients(0, 0), gradients(1, 0)], **about)
    choice = choosing.choose(job, BatchSource(job), found, "", "the batches are apart")
    assert choice.scales == expected


def test_a_sum_is_divided_by_what_ranks_have_unlike_numbers_of(tmp_path: Path) -> None:
    """As Trainer's: a number of its own, which is neither that of targets nor of samples."""
    found = _copies([gradients(0, 0), gradients(1, 0)], sums=float(choosing.SUMS.index("sum")))
    for number, task in enumerate(found):
        found[task]["count"] = torch.tensor(5.0 + number)  # type: ignore[index]
    job = make(tmp_path, lambda facts: None)
    choice = choosing.choose(job, BatchSource(job), found, "", "the batches are apart")
    assert choice.scales == (1.0,)


@pytest.mark.parametrize(
    ("scales", "scale", "strict", "verdict"),
    [
        ((1.0, 2.0), 2.0, True, "pass"),
        ((1.0, 2.0), 1.0, False, "pass"),
        ((0.5, 1.0), 0.5, False, "pass"),  # as one process all batches were put together
        ((1.0, 2.0), 1.0, True, "fail"),
    ],
)
def test_the_mean_of_the_ranks_sums_is_a_remark(
    scales: tuple[float, ...], scale: float, strict: bool, verdict: str, tmp_path: Path
) -> None:
    job = make(tmp_path, lambda facts: None)
    single_process_group = reference(job, tmp_path)
    replayed = msgspec.structs.replace(single_process_group.replayed, scales=scales, scale=scale)
    single_process_group = dataclasses.replace(single_process_group, replayed=replayed)
    asked = JobOptions(words=("python", "train.py"), steps=3, strict=strict)
    case = judging.judge(asked, job, CommandResult(0, ()), single_process_group, "")
    assert case.verdict == verdict
    said = [*case.remarks, *case.diagnosis]
    assert [one.cause for one in said] == ["double-division"] * (scale != max(scales))
    assert all("0.5x the single-process reference" in one.evidence for one in said)


def test_a_sum_that_is_divided_may_be_a_mean_over_other_items(tmp_path: Path) -> None:
    """The Trainer may divide by all positions of a batch, of which fewer are targets."""
    by = LossFactor(number=1 / 64, computed=True, outer=True, divides=True)

    def divided(facts: Facts) -> None:
        term = LossTerm(name="cross_entropy", reduction="sum", call=0, factors=(by,))
        facts.passes = [msgspec.structs.replace(one, terms=(term,)) for one in facts.passes]

    job = make(tmp_path, divided)
    one = reference(job, tmp_path)
    one = dataclasses.replace(
        one, replayed=msgspec.structs.replace(one.replayed, scales=(1.0, 2.0), scale=1.0)
    )
    assert not [*causes.averaged_sum_losses(job, one)]


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "rows", "asked", "expected"),
    [
        ((0.0, 0.0), (4, 4), "", [0.5, 0.5]),  # all count alike
        ((3.0, 1.0), (4, 4), "", [0.75, 0.25]),  # what the losses were divided by
        ((0.0, 0.0), (4, 2), "", None),  # nothing says so
        ((0.0, 0.0), (4, 2), "equal", [0.5, 0.5]),
        ((0.0, 0.0), (4, 2), "samples", [2 / 3, 1 / 3]),
        ((3.0, 1.0), (4, 4), "targets", [0.5, 0.5]),
    ],
)
def test_weights_come_from_what_the_losses_counted(
    counts: tuple[float, ...], rows: tuple[int, ...], asked: str, expected: Any, tmp_path: Path
) -> None:
    def unlike(facts: Facts) -> None:
        facts.rows = tuple(f"{facts.rank}-{i}" for i in range(rows[facts.rank]))
        facts.passes = [facts.a_pass(0)]

    job = make(tmp_path, unlike)
    parts = [{"count": torch.tensor(count)} for count in counts]
    found, why = choosing.weights(job, 0, parts, asked)
    assert (why == "") == (expected is not None)
    if expected is None:
        assert "--weights samples, targets or equal" in why
    else:
        assert found == pytest.approx(expected)


# -- remarks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "rates_too"), [(2.0, True), (2.0**0.5, True), (1.5, False), (1.0, False)]
)
def test_rates_scaled_by_ranks_are_a_remark(by: float, rates_too: bool, tmp_path: Path) -> None:
    job = make(tmp_path)
    single_process_group = reference(job, tmp_path, lr=lambda step: LR / by)
    kinds = accepting.kinds_that_only_warn(job, single_process_group, [])
    assert (accepting.RATES in kinds) == rates_too
    assert accepting.RANDOMNESS in kinds


@pytest.mark.parametrize(("strict", "verdict"), [(False, "pass"), (True, "fail")])
def test_one_seed_for_all_masks_is_a_remark(strict: bool, verdict: str, tmp_path: Path) -> None:
    def masks(facts: Facts) -> None:
        facts.passes = [replaced(facts.a_pass(0), draws=True, random={"torch": str(facts.step)})]

    asked = JobOptions(words=("python", "train.py"), no_reference=True, steps=3, strict=strict)
    case = judging.judge(asked, make(tmp_path, masks), CommandResult(0, ()), None, "")
    assert case.verdict == verdict
    named = case.diagnosis if strict else case.remarks
    assert [one.cause for one in named] == ["shared-rng-seed"]


@pytest.mark.parametrize(("divides", "cause"), [(1.0, "accumulation-not-scaled"), (2.0, "")])
def test_a_scale_that_one_process_has_too_is_judged_where_passes_cannot_be_one_batch(
    divides: float, cause: str, tmp_path: Path
) -> None:
    """As with dropout; a script may divide gradients between the exchange and clipping."""

    def sums(facts: Facts) -> None:
        facts.passes = [replaced(facts.a_pass(n), draws=True) for n in range(2)]
        facts.clips = (ClipCall(kind="norm", most=1.0, norm=4.0, passes=2),)
        facts.at_step = {n: g / divides / (4 + 1e-6) for n, g in facts.raw.items()}

    job = make(tmp_path, sums)
    single_process_group = reference(job, tmp_path, clipped=1 / divides / (4 + 1e-6), loss=4.0)
    asked = JobOptions(words=("python", "train.py"), steps=3)
    case = judging.judge(asked, job, CommandResult(0, ()), single_process_group, "")
    assert [one.cause for one in case.diagnosis if one.cause != "clip-by-local-norm"] == (
        [cause] if cause else []
    )


def test_a_multiple_of_one_pass_is_no_number_of_all_ranks(tmp_path: Path) -> None:
    """Two passes of 4 samples each: 8 is what both have, and 16 what two ranks have."""

    def two(facts: Facts) -> None:
        facts.passes = [facts.a_pass(number) for number in range(2)]

    job = make(tmp_path, two)
    for count, expected in ((8.0, (1.0,)), (16.0, (2.0,)), (12.0, (1.0, 2.0))):
        found = _copies([gradients(0, 0), gradients(1, 0)], sums=1.0, count=count, passes=2.0)
        choice = choosing.choose(job, BatchSource(job), found, "", "the batches are apart")
        assert choice.scales == expected, count

    def unlike(facts: Facts) -> None:
        facts.passes = [facts.a_pass(0), facts.a_pass(1, rows=facts.rows[:3])]

    (tmp_path / "unlike").mkdir()
    job = make(tmp_path / "unlike", unlike)
    found = _copies([gradients(0, 0), gradients(1, 0)], sums=1.0, count=6.0, passes=2.0)
    choice = choosing.choose(job, BatchSource(job), found, "", "the batches are apart")
    assert choice.scales == (1.0, 2.0)


# -- causes ----------------------------------------------------------------------------------------


def test_a_clip_norm_that_grows_with_the_ranks_is_named(tmp_path: Path) -> None:
    def clips(facts: Facts) -> None:
        facts.clips = (ClipCall(kind="norm", most=2.0, norm=4.0, passes=1),)
        facts.at_step = {n: g / 2 for n, g in facts.raw.items()}

    job = make(tmp_path, clips)
    single_process_group = reference(job, tmp_path, clipped=0.25, clips=((1.0, 4.0),))
    found = causes.diagnose(job, judged(job, single_process_group), single_process_group)
    assert [one.cause for one in found] == ["clip-norm-differs"]


def test_what_one_rank_changes_before_its_step_is_named(tmp_path: Path) -> None:
    """Although its parameters and gradients are others from then on."""

    def changes(facts: Facts) -> None:
        if facts.step:
            facts.locals = [{n: 3 * one for n, one in g.items()} for g in facts.locals]
            facts.local, facts.raw = facts.locals[facts.rank], mean(facts.locals)
        facts.at_step = {n: (1.0 + facts.rank) * g for n, g in facts.raw.items()}
        facts.after = {n: p - LR * facts.at_step[n] for n, p in facts.before.items()}

    job = make(tmp_path, changes)
    single_process_group = reference(job, tmp_path)
    found = causes.diagnose(job, judged(job, single_process_group), single_process_group)
    assert [one.cause for one in found] == ["gradients-modified-before-step"]


def test_a_loss_that_is_scaled_by_rank_is_named(tmp_path: Path) -> None:
    def scales(facts: Facts) -> None:
        facts.locals = [
            {n: (1 + rank) * one for n, one in g.items()} for rank, g in enumerate(facts.locals)
        ]
        facts.local, facts.raw = facts.locals[facts.rank], mean(facts.locals)

    job = make(tmp_path, scales)
    single_process_group = reference(job, tmp_path)
    (found,) = causes.diagnose(job, judged(job, single_process_group), single_process_group)
    assert found.cause == "wrong-divisor"
    assert "are 1x, 2x the single-process reference" in found.evidence


def test_what_one_rank_writes_between_backward_and_step_is_named(tmp_path: Path) -> None:
    def writes(facts: Facts) -> None:
        if facts.step == 1:
            facts.written = {n: p + facts.rank for n, p in facts.before.items()}
            facts.after = {n: p - LR * facts.raw[n] for n, p in facts.written.items()}

    job = make(tmp_path, writes)
    single_process_group = reference(job, tmp_path)
    (found,) = causes.diagnose(job, judged(job, single_process_group), single_process_group)
    assert found.cause == "parameters-modified-outside-step"
    assert "step 1: weight was modified after the forward pass" in found.evidence


def _adds(facts: Facts, of_rank_one: float, *names: str) -> None:
    """What rank 1 adds to its gradients, and the terms of its loss."""
    facts.locals[1] = {n: g + of_rank_one * (g + 1) for n, g in facts.locals[1].items()}
    facts.local, facts.raw = facts.locals[facts.rank], mean(facts.locals)
    terms = ("cross_entropy", *(names if facts.rank else ()))
    facts.passes = [
        replaced(
            facts.passes[0], terms=tuple(LossTerm(name=n, reduction="mean", call=-1) for n in terms)
        )
    ]


@pytest.mark.parametrize("much", [0.1, 1e-4])
@pytest.mark.parametrize(
    ("names", "cause"), [(("a sum",), "loss-term-on-some-ranks"), ((), "unexplained")], ids=str
)
def test_term_of_one_rank(much: float, names: tuple[str, ...], cause: str, tmp_path: Path) -> None:
    """However little it adds; and not where ranks' losses have the same terms."""
    job = make(tmp_path, lambda facts: _adds(facts, much, *names))
    single_process_group = reference(job, tmp_path)
    (found,) = causes.diagnose(job, judged(job, single_process_group), single_process_group)
    assert found.cause == cause
    if names:
        assert "rank 1 has the terms cross_entropy, a sum, but that of rank 0 has" in found.evidence


WEIGHTS = {0.5: "1/2, one over the world size", 2.0: "2, the world size", 0.7: "0.7"}


def _of_terms(folder: Path, by: float, of_term: Tensors | None = None, **changes: Any) -> Any:
    """A job in whose gradients the second term has the weight `by`, and its reference."""

    def term(step: int) -> Tensors:
        return gradients(9, step) if of_term is None else of_term

    def scales(facts: Facts) -> None:
        facts.raw = {n: g - (1 - by) * term(facts.step)[n] for n, g in facts.raw.items()}
        facts.locals = [facts.raw] * facts.world
        facts.local = facts.raw
        own = LossTerm(name="a sum", reduction="sum", call=-1)
        facts.passes = [replaced(facts.passes[0], terms=(own, own), loss=1.5)]

    job = make(folder, scales)
    return job, reference(job, folder, terms=term, **changes)


@pytest.mark.parametrize("by", WEIGHTS)
def test_a_term_of_another_weight_is_named(by: float, tmp_path: Path) -> None:
    """If samples interact in it, only by the world size; with another number it is `unknown`."""
    job, alone = _of_terms(tmp_path, by)
    results = judged(job, alone)
    (found,) = causes.diagnose(job, results, alone)
    assert found.cause == "term-scale"
    said = f"`0.1 * aux` (train.py:8) has weight {WEIGHTS[by]}; the other term has weight 1"
    assert found.evidence == f"step 0: {said}"
    verdicts = _if_samples_interact(job, alone, results)
    assert verdicts == {"pass", "unknown" if by == 0.7 else "fail"}


def _if_samples_interact(job: Any, alone: Any, results: list[CheckResult]) -> set[str]:
    changed = msgspec.structs.replace(alone.replayed, interacts=True)
    interacts = dataclasses.replace(alone, replayed=changed)
    known = [judging._unknown_without_reference(job, interacts, one, results) for one in results]
    return {one.verdict for one in known}


def test_a_sum_over_samples_has_no_weight_to_judge(tmp_path: Path) -> None:
    """Its weight may have been chosen for the batch of a rank."""
    job, alone = _of_terms(tmp_path, 0.5, growth=[1.0, 2.0])
    found = term_weights(job, alone)
    assert "`0.1 * aux` is not a mean over samples" in found.why
    assert found.cause(2) is None
    assert _if_samples_interact(job, alone, judged(job, alone)) == {"pass", "unknown"}


def test_terms_with_parallel_gradients_are_not_separated(tmp_path: Path) -> None:
    """Each of them could be the wrong one."""
    both = mean([gradients(rank, 0) for rank in range(2)])
    job, alone = _of_terms(tmp_path, 0.5, {n: 0.4 * g for n, g in both.items()})
    found = term_weights(job, alone)
    assert found.why == (
        "the weights of its terms (`ce` and `0.1 * aux`) cannot be separated by their gradients"
    )
    assert found.cause(2) is None


def test_terms_must_explain_every_gradient(tmp_path: Path) -> None:
    """A weight that fits all but one parameter is none."""
    job, alone = _of_terms(tmp_path, 0.5)
    step = alone.tensors(0)
    step["raw/bias"] += 1e-3
    step["term/0/bias"] += 1e-3
    assert term_weights(job, alone).cause(2) is None


def test_a_loss_without_terms_or_with_right_ones_has_no_cause(tmp_path: Path) -> None:
    job, alone = _of_terms(tmp_path, 1.0)
    found = term_weights(job, alone)
    assert (found.odd, found.why, len(found.weights)) == ((), "", 2)
    assert found.cause(2) is None
    (tmp_path / "other").mkdir()
    job = make(tmp_path / "other")
    assert term_weights(job, reference(job, tmp_path / "other")).weights == ()


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_whose_loss_counts_nothing_is_named(silent: int, tmp_path: Path) -> None:
    """Of rank 0 the reference's gradients are zero, too, and its loss alone differs."""

    def is_zero(facts: Facts) -> None:
        facts.locals[silent] = {n: torch.zeros_like(g) for n, g in facts.locals[silent].items()}
        facts.local, facts.raw = facts.locals[facts.rank], mean(facts.locals)
        if facts.rank == silent:
            facts.passes = [replaced(facts.passes[0], loss=0.0)]

    job = make(tmp_path, is_zero)
    single_process_group = reference(
        job, tmp_path, **({"loss": 0.0} if silent == 0 else {}), raw=float(silent)
    )
    (found,) = causes.diagnose(job, judged(job, single_process_group), single_process_group)
    assert found.cause == "dropped-rank"
    assert f"all local gradients of rank {silent} are zero" in found.evidence


def test_a_cause_is_named_by_its_own_setting(tmp_path: Path) -> None:
    """Weight decay is not a learning rate."""

    def decays(facts: Facts) -> None:
        facts.groups = ({"lr": LR, "weight_decay": 0.1 * facts.rank},)

    job = make(tmp_path, decays)
    found = causes.diagnose(job, checks.checks_without_reference(job))
    assert [one.cause for one in found] == ["optimizer-settings-differ"]


# -- it ends ---------------------------------------------------------------------------------------

WAITS = "import sys, time; from pathlib import Path; Path(sys.argv[1]).touch(); time.sleep(600)"


def test_what_does_not_go_on_has_hung(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path / "begun")]) as process:
        try:
            (found,) = Watch(process, tmp_path, 1.0).wait()
        finally:
            process.kill()
    assert found.outcome is RankEnd.HUNG


def test_what_ends_has_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        assert Watch(process, tmp_path, 60.0).wait() == ()


# -- a watched job is the job ----------------------------------------------------------------------

ASKS_FIRST = """
import importlib.util, sys
from distcheck.job.inside import start
start.begin(sys.argv[1])
assert importlib.util.find_spec("torch") is not None
assert "torch" not in sys.modules
import torch
print(start._Waiting.has_installed)
"""


def test_who_asks_where_torch_is_does_not_take_the_hook(tmp_path: Path) -> None:
    file = write(JobSettings(), tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", ASKS_FIRST, str(file)], capture_output=True, text=True, timeout=120
    )
    assert ran.stdout == "True\n", ran.stderr
    assert not (tmp_path / "defect").exists()


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_loss_that_a_replay_cannot_compute_fails_nothing(tmp_path: Path, is_seen: bool) -> None:
    """Of what the script makes itself, as an environment's rewards, the reference has its own."""

    def of_rewards(facts: Facts) -> None:
        if not is_seen:
            facts.passes = [replaced(one, losses=(), batches=()) for one in facts.passes]

    job = make(tmp_path, of_rewards)
    noise = reference(job, tmp_path, weights=[0.9, -0.3])
    asked = JobOptions(words=("python", "train.py"), steps=3)
    case = judging.judge(asked, job, CommandResult(0, ()), noise, "")
    assert case.verdict == ("fail" if is_seen else "unknown")
