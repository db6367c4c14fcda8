"""Recordings are read with care; commands and sizes are checked; what is missing is said."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from distcheck.errors import CannotRunError, DistcheckError, ExitCode, UsageError
from distcheck.job import running, settings
from distcheck.job.inside import hooks, tensors
from distcheck.job.inside.listener import NullListener
from distcheck.job.inside.rank import _backend_for, numeric_settings
from distcheck.job.inside.recorder import Recorder
from distcheck.job.inside.single_process_group import SingleProcessGroup
from distcheck.job.inside.step_file import ParameterAfterStep, StepFile
from distcheck.job.options import JobOptions
from distcheck.job.running import CommandResult
from distcheck.recordings.jobs import reading, records, sketches
from distcheck.recordings.jobs.records import RankRecord
from distcheck.records import Outcome
from tests.job.recordings import make

HOOK = Path(running.__file__).parent / "hook"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_a_setting_of_any_size_is_a_number() -> None:
    """A script may keep numbers in a param group that no float or no JSON holds."""
    huge = (10**400, -(10**400), float("inf"))
    found = numeric_settings({"lr": 0.5, "flag": True, "x": "x", "nan": float("nan"), "n": huge})
    assert found.pop("n[0]") == -found.pop("n[1]") == found.pop("n[2]") > 1e307
    assert found == {"lr": 0.5, "flag": 1.0}


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: cut(f / "rank-0001" / "step-000001.json"), "is damaged"),
        (lambda f: cut(f / "rank-0000" / "rank.json"), "is damaged"),
        (lambda f: (f / "rank-0000" / "rank.json").unlink(), "the others failed, or ran on"),
        (
            lambda f: (f / "rank-0001" / "step-000001.json").rename(
                f / "rank-0001/step-000009.json"
            ),
            "a different rank or step",
        ),
    ],
)
def test_damage_is_refused(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    make(tmp_path)
    harm(tmp_path)
    with pytest.raises(UsageError, match=said):
        reading.read_recording(tmp_path)


def change(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def without_a_writer(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "harm", [cut, change, without_a_writer, Path.unlink, lambda file: file.write_bytes(b"")]
)
def test_damaged_tensors_are_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    make(tmp_path)
    harm(tmp_path / "rank-0001" / "step-000001.safetensors")
    job = reading.read_recording(tmp_path)
    with pytest.raises(UsageError, match="is damaged"):
        job.tensors(1, 1)


def test_a_rank_that_made_fewer_steps_is_seen(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "rank-0001" / "step-000002.json").unlink()
    job = reading.read_recording(tmp_path)
    assert job.steps == (0, 1)
    assert job.uneven == {0: 3, 1: 2}


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 * 10**9), ("512 kb", 512_000), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert settings.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "nanGB", "1e999GB", "4 apples", "0"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        settings.parse_size(text)


def test_commands() -> None:
    python = sys.executable
    assert running.command_of([python, "a.py"], None) == (python, "a.py")
    started = running.command_of([python, "a.py", "--lr", "1"], 4)
    assert started[1:] == (
        "-P", "-m", "torch.distributed.run", "--nproc-per-node", "4", "a.py", "--lr", "1",
    )  # fmt: skip
    for words, nproc, said in (
        ([], None, "no command was given"),
        (["no-such-program"], None, "was not found"),
        ([python, "a.py"], 0, "at least 1"),
        (["mpirun", "a.py"], 2, "--world starts a Python script"),
    ):
        with pytest.raises(UsageError, match=said):
            running.command_of(words, nproc)


@pytest.mark.parametrize(
    ("asked", "said"), [({"steps": 0}, "--steps must be"), ({"from_step": -1}, "--from-step must")]
)
def test_numbers_out_of_range_are_refused(asked: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        JobOptions(words=("python",), **asked)  # type: ignore[arg-type]


RAISED = Outcome(rank=0, outcome="raised", text="ValueError: no")
GOOD, BAD = CommandResult(0, ()), CommandResult(1, (RAISED,))


@pytest.mark.parametrize(
    ("notes", "ran", "kind", "code", "said"),
    [
        ({}, GOOD, DistcheckError, ExitCode.UNKNOWN, "without -S, -E and -I"),
        ({"python-1": ""}, GOOD, DistcheckError, ExitCode.UNKNOWN, "imported torch"),
        ({"python-1": "", "torch-1": ""}, GOOD, DistcheckError, ExitCode.UNKNOWN, "no optimizer"),
        ({"torch-1": "", "python-1": "", "missed-2": ""}, GOOD, DistcheckError, ExitCode.UNKNOWN,
         "sys.meta_path"),
        ({"python-1": ""}, BAD, DistcheckError, ExitCode.RANK_FAILED, "ValueError: no"),
        ({"no-distcheck": "/py\nx"}, GOOD, CannotRunError, ExitCode.CANNOT_RUN, "for /py"),
        ({"defect": "E: x"}, GOOD, DistcheckError, ExitCode.UNKNOWN, "recorder failed.*E: x"),
    ],
)  # fmt: skip
def test_why_nothing_was_recorded(
    tmp_path: Path, notes: dict[str, str], ran: CommandResult, kind: type[DistcheckError],
    code: ExitCode, said: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)  # a traceback is saved there
    for name, text in notes.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(kind, match=said) as error:
        running.check_recorded(tmp_path, ran, ("train",))
    assert error.value.exit_code == code


def test_the_sitecustomize_behind_still_runs_and_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("mark = 'own'\n")
    asked = tmp_path / "asked"
    asked.mkdir()
    file = settings.write(settings.JobSettings(), asked)
    program = (
        "import sys, json, sitecustomize as s; "
        "print(json.dumps([getattr(s, 'mark', None), 'torch' in sys.modules, sys.path]))"
    )
    for own, mark in (([tmp_path / "own"], "own"), ([], None)):
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            env={"PYTHONPATH": ":".join(map(str, [HOOK, *own])), "DISTCHECK_JOB": str(file)},
        )  # fmt: skip
        found, has_torch, path = json.loads(ran.stdout)
        assert found == mark
        assert not has_torch
        assert str(HOOK) not in path
    assert len([*asked.glob("python-*")]) == 2
    assert not [*asked.glob("torch-*")]


def test_sketches_are_linear() -> None:
    one, two = torch.randn(1000), torch.randn(1000)
    added = sketches.project(one) + 3 * sketches.project(two)
    assert torch.allclose(sketches.project(one.double() + 3 * two.double()), added)
    assert float(sketches.project_magnitudes(one).sum()) == pytest.approx(
        float(one.double().abs().sum())
    )


def test_names_without_wrappers() -> None:
    assert tensors.plain_name("module._orig_mod.layers.0.weight") == "layers.0.weight"


def test_leaves_are_found_in_their_order_and_get_other_data() -> None:
    @dataclass
    class Batch:
        x: torch.Tensor
        more: Any

    batch = Batch(torch.zeros(2), {"y": [torch.ones(1), ("text", torch.ones(3))]})
    leaves = tensors.leaves(batch)
    assert [t.numel() for t in leaves] == [2, 1, 3]
    data = torch.zeros(4, 2)
    view = data[:2]
    tensors.replace_data(view, torch.ones(3, 2))
    assert view.shape == (3, 2)
    assert not data.any()  # what it was a view of stays
    computed = torch.ones(2, requires_grad=True)
    assert tensors.inputs_of([computed, computed * 2, torch.nn.Parameter(computed)]) == [computed]
    assert (
        tensors.digests_of_samples([torch.zeros(3, 2), torch.arange(3)])[0]
        != tensors.digests_of_samples([torch.zeros(3, 2), torch.arange(1, 4)])[0]
    )


def test_a_group_of_one_rank_copies() -> None:
    group = SingleProcessGroup(SimpleNamespace(group_id="0", group_rank=0, group_size=1))
    given, room = torch.arange(4.0), torch.zeros(4)
    group.allreduce([given]).wait()
    assert given.tolist() == [0, 1, 2, 3]
    assert group.all_gather_single(room, given).wait()
    assert torch.equal(room, given)
    parts = [[torch.zeros(4)]]
    group.allgather(parts, [given]).wait()
    assert torch.equal(parts[0][0], given)
    group.reduce_scatter([room.zero_()], [[given]]).wait()
    assert torch.equal(room, given)
    assert group.barrier().is_completed()
    assert group.allreduce([given]).get_future().value() is not None


@pytest.mark.parametrize(("folder", "seen"), [("fsdp", 0), ("tensor", 1)])
def test_fsdp_gathers_do_not_count(monkeypatch: pytest.MonkeyPatch, folder: str, seen: int) -> None:
    """torch 2.11 gathers parameters by the function that scripts call as well."""
    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hooks, "_listener", NullListener())
    monkeypatch.setattr(hooks, "emit", lambda *given: said.append(given))
    call = hooks._collective("all_gather_into_tensor", lambda one: one)
    file = Path(torch.distributed.__file__).with_name(folder) / "_collectives.py"
    exec(compile("call(7)", file, "exec"), {"call": call})
    assert len(said) == seen


def test_what_was_recorded_can_still_be_resized() -> None:
    """FSDP2 gives the memory of what it gathered back in this way."""
    recorded = torch.arange(6.0)
    assert tensors.digest_of(recorded) == tensors.digest_of(torch.arange(6.0))
    recorded.untyped_storage().resize_(0)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert tensors.digest_of(conjugate) == tensors.digest_of(torch.tensor([1 - 2j]))
    negative = conjugate.imag
    assert negative.is_neg()
    assert tensors.digest_of(negative) == tensors.digest_of(torch.tensor([-2.0]))


@pytest.mark.parametrize("exchanging", [True, False])
def test_sizes_of_passes_are_kept_where_each_may_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanging: bool
) -> None:
    """Gradients of 1 and -0.5 leave half, and have been rounded twice where both were sent."""
    monkeypatch.setattr("distcheck.job.inside.rank.ddp_synchronizes", lambda model: exchanging)
    recorder = Recorder(settings.JobSettings(steps=1, keep_going=True), tmp_path)
    monkeypatch.setattr(hooks, "_listener", recorder)
    monkeypatch.setattr("distcheck.job.inside.rank.ddp_in", lambda model: model)
    monkeypatch.setattr("distcheck.job.inside.rank.exchange_seconds", lambda model: None)
    monkeypatch.setattr("distcheck.job.inside.rank.ranks_that_ddp_averages", lambda model: "")
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (1.0, -0.5, 1.0):
        inputs = torch.full((1, 2), size)
        recorder.enters(model, (inputs,), {})
        result = model(inputs)
        recorder.leaves(model, result)
        loss = result.sum()
        recorder.backward(loss)
        loss.backward()
        recorder.backward_over()
    recorder.steps(optimizer)
    optimizer.step()
    recorder.stepped(optimizer)
    (file,) = tmp_path.rglob("step-*.safetensors")
    kept = load_file(file)
    assert kept["local/weight"].tolist() == [[1.5, 1.5]]
    sizes = kept.get("sizes/weight")
    assert (None if sizes is None else sizes.tolist()) == ([[2.5, 2.5]] if exchanging else None)


def two_steps(folder: Path, between: Callable[[torch.Tensor], Any], budget: int) -> Path:
    """One rank's parameter, with `between` called of it when the first step is over."""
    mine = records.rank_folder(folder, 0)
    mine.mkdir()
    about = RankRecord(
        rank=0, world=1, arguments=(), folder="", backend="gloo", device="cpu", torch="2"
    )
    records.write_json(mine / "rank.json", about)
    weight = torch.arange(500.0)
    other = torch.nn.Parameter(weight.data)  # the same memory, which a file cannot hold twice
    last: dict[str, ParameterAfterStep] = {}
    for step in range(2):
        file = StepFile(mine, step, last)
        file.add_state("before/weight", weight, keep=True)
        weight += 1
        for name, one in (("weight", weight), ("other", other)):
            file.add_after(name, one, keep=True)
        file.write(
            (budget, 1 << 20)[step],
            rank=0, world=1, optimizer="", groups=(), passes=(), batches=(), iterations=(),
        )  # fmt: skip
        last = file.after
        between(weight)
    return mine / "step-000001.safetensors"


@pytest.mark.parametrize(
    ("between", "budget", "is_written"),
    [
        (lambda weight: None, 1 << 20, False),
        (lambda weight: weight.add_(1), 1 << 20, True),
        (lambda weight: None, 0, True),
    ],
    ids=["as it was left", "changed in between", "no room for the first"],
)
def test_a_parameter_is_written_once(
    between: Callable[[torch.Tensor], Any], budget: int, is_written: bool, tmp_path: Path
) -> None:
    """It is what the step before has left, and is read from there."""
    file = two_steps(tmp_path, between, budget)
    assert ("before/weight" in load_file(file)) is is_written
    job = reading.read_recording(tmp_path)
    found = job.tensors(0, 1)
    assert torch.equal(found["before/weight"] + 1, found["after/weight"])
    assert torch.equal(found["after/weight"], found["after/other"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_is_found_in_every_dtype(value: float) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        tensor = torch.ones(5, dtype=dtype)
        assert tensors.not_finite({"a": tensor, "b": tensor[:0]}) == []
        tensor[2] = value
        assert tensors.not_finite({"a": tensor}) == ["a"]
    largest = torch.full((2,), torch.finfo(torch.float32).max)
    assert tensors.not_finite({"a": torch.complex(largest, largest)}) == []


def test_a_group_without_a_name_has_the_backend_of_its_device() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _backend_for("cpu") == "gloo"
    finally:
        dist.destroy_process_group()
