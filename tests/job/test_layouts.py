"""Ranks that train one model together: recordings are put together from parts, whole jobs pass, and
of planted bugs each is named.
"""

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from distcheck.errors import UsageError
from distcheck.job import judging, perturbed_runs
from distcheck.job.causes import diagnose
from distcheck.job.checks import checks_without_reference, exchange
from distcheck.job.checks.ranks import agreement, initial_state, random_streams
from distcheck.job.checks.reference import checks_with_reference
from distcheck.job.checks.samples import disjoint_samples
from distcheck.job.inside import arrangement
from distcheck.job.inside.parameters import Parameters
from distcheck.job.inside.recorder import move_loss_to_visited_pass
from distcheck.recordings.jobs import reading, records
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import ForwardPass, MeshAxis, Shard
from distcheck.recordings.jobs.unsharded import replica_groups, unshard_recording
from distcheck.recordings.recording import Kind
from distcheck.records import CheckResult, Compared
from distcheck.records.mesh import parse_mesh
from tests.job.planted import FOLDER
from tests.job.recordings import SHAPES, Facts, gradients, make, mean, reference
from tests.job.test_examples import judge_command

LAYOUTS = FOLDER / "layouts"
WORLDS = {"hsdp.py": 4, "fsdp2_tensor.py": 4}
OPTIONS = {"fsdp2_tensor.py": ("--tp", "2")}
BUGS = tomllib.loads((LAYOUTS / "planted.toml").read_text())["bug"]
TENSOR = MeshAxis(name="tp", kind="tensor", size=2)
DATA = MeshAxis(name="dp", kind="data", size=2)


def run(script: Path, folder: Path, world: int) -> tuple[int, dict[str, Any]]:
    command = ["python", str(script), *OPTIONS.get(script.name, ())]
    return judge_command(["--steps", "3", "--world", str(world), "--", *command], folder)


@pytest.mark.sweep
@pytest.mark.parametrize("script", sorted(LAYOUTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_right_layout_passes(script: Path, tmp_path: Path) -> None:
    code, case = run(script, tmp_path, WORLDS.get(script.name, 2))
    assert (code, case["verdict"], case["diagnosis"]) == (0, "pass", [])
    assert any(
        (c["check"], c["layer"]) == ("gradients", "full batch float32") for c in case["checks"]
    )


@pytest.mark.sweep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_a_bug_in_a_layout_is_named(bug: dict[str, Any], tmp_path: Path) -> None:
    right = (LAYOUTS / bug["script"]).read_text()
    assert right.count(bug["find"]) == 1
    wrong = tmp_path / bug["script"]
    wrong.write_text(right.replace(bug["find"], bug["put"]))
    code, case = run(wrong, tmp_path, bug.get("world", 2))
    causes = [found["cause"] for found in case["diagnosis"]]
    assert (code, case["verdict"], causes) == (1, "fail", [bug["cause"]])


# -- recordings that are made up: two ranks, each with some rows of `weight` ----------------------


def on_axes(folder: Path, *axes: MeshAxis) -> None:
    for file in folder.glob("rank-*/rank.json"):
        record = msgspec.json.decode(file.read_bytes(), type=records.RankRecord)
        records.write_json(file, replace(record, axes=axes))


def in_parts(folder: Path, *, of: int = 2, missing: bool = False) -> None:
    """Cuts `weight` into two parts by its rows, one for each of two ranks next to each other."""
    for file in folder.glob("rank-*/step-*.json"):
        record = records.read_record(file, records.StepRecord)
        tensors = reading.read_tensors(file.with_suffix(".safetensors"))
        number = record.rank % of
        first = record.rank - number
        parts, digests = dict(record.parts), dict(record.digests)
        for key in [k for k in digests if k.endswith("/weight")]:
            whole = tensors.pop(key, None)
            tensors.pop(f"sums/{key}", None)
            if whole is None:
                whole = gradients(7, 0)["weight"] if key.startswith("before") else None
            if whole is None:
                del digests[key]
                continue
            tensors[key] = whole.chunk(of)[number].clone()
            digests[key] = f"{record.rank:032x}"
            at = (number * len(whole) // of, 0)
            ranks = tuple(range(first, first + of))[: 1 if missing else of]
            parts[key] = Shard(shape=tuple(whole.shape), at=at, of=ranks)
        data = file.with_suffix(".safetensors")
        save_file(tensors, data)
        checksum = records.checksum_of(data)
        records.write_json(file, replace(record, parts=parts, digests=digests, checksum=checksum))


def alike(facts: Facts) -> None:
    """Ranks that train one model have the same samples, and each the gradient of all of them."""
    facts.rows = tuple(f"{facts.step}-{i}" for i in range(4))
    facts.passes = [facts.a_pass(0)]
    facts.local = facts.raw = mean([gradients(rank, facts.step) for rank in range(2)])


def shared(tmp_path: Path, change: Any = alike, **about: Any) -> JobRecording:
    folder = tmp_path / "recording"
    folder.mkdir()
    make(folder, change, **about)
    on_axes(folder, TENSOR)
    return perturbed_runs.read_whole(folder, tmp_path / "whole")


def test_parts_are_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    folder.mkdir()
    as_it_was = make(folder, steps=1)
    whole = as_it_was.tensors(0, 0)["raw/weight"]
    in_parts(folder)
    job = unshard_recording(reading.read_recording(folder), tmp_path / "whole")
    assert (job.world, job.processes, job.replicas) == (2, 2, ((0,), (1,)))
    for rank in range(2):
        found = job.gradient(Kind.EXCHANGED, rank, 0, "weight")
        assert found is not None
        assert torch.equal(found, whole)
    assert initial_state(job).verdict == "pass"


def test_parts_that_are_not_the_whole_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    folder.mkdir()
    make(folder, steps=1)
    in_parts(folder, missing=True)
    with pytest.raises(UsageError, match="do not cover the whole"):
        unshard_recording(reading.read_recording(folder), tmp_path / "whole")


@pytest.mark.parametrize(
    "harm",
    [
        {"shape": (1 << 40, 1 << 20)}, {"at": (7, 0)}, {"at": (-1, 0)}, {"at": ()},
        {"of": (0, 1, 0)}, {"of": (0, 7)}, {"adds": (9,)},
    ],
    ids=str,
)  # fmt: skip
def test_parts_of_a_damaged_recording_are_refused(harm: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    folder.mkdir()
    make(folder, steps=1)
    in_parts(folder)
    job = reading.read_recording(folder)
    record = job.records[1, 0]
    parts = {k: replace(p, **harm) if k == "raw/weight" else p for k, p in record.parts.items()}
    job.records[1, 0] = replace(record, parts=parts)
    try:
        found = unshard_recording(job, tmp_path / "whole")
    except UsageError:
        return
    assert found.gradient(Kind.EXCHANGED, 1, 0, "weight") is None


def test_ranks_of_one_model_are_one_rank(tmp_path: Path) -> None:
    job = shared(tmp_path)
    assert (job.world, job.processes, job.replicas) == (1, 2, ((0, 1),))
    folder = tmp_path / "reference"
    folder.mkdir()
    found = reference(job, folder)
    results, _ = checks_with_reference(job, replayed(found, job))
    assert {r.verdict for r in (*results, *checks_without_reference(job))} == {"pass"}


def replayed(found: Any, job: JobRecording) -> Any:
    """The reference of one model with the samples of both ranks."""
    for step in job.steps:
        file = found.folder / f"replay-{step:06d}.safetensors"
        tensors = reading.read_tensors(file)
        both = mean([gradients(rank, step) for rank in range(2)])
        for name in SHAPES:
            tensors[f"raw/{name}"], tensors[f"step/{name}"] = both[name], both[name].clone()
        save_file(tensors, file)
    return found


def test_the_same_samples_without_an_axis_are_a_failure(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    folder.mkdir()
    make(folder, alike)
    on_axes(folder, DATA)
    job = perturbed_runs.read_whole(folder, tmp_path / "whole")
    assert (job.world, disjoint_samples(job).verdict) == (2, "fail")
    by_hand = perturbed_runs.read_whole(folder, tmp_path / "given", "tensor=2")
    assert (by_hand.world, disjoint_samples(by_hand).verdict) == (1, "pass")
    with pytest.raises(UsageError, match="needs 3 ranks, and the world has 2"):
        perturbed_runs.read_whole(folder, tmp_path / "other", "tensor=3")


def test_other_samples_on_a_rank_of_one_model_are_named(tmp_path: Path) -> None:
    job = shared(tmp_path, lambda facts: None)
    result = disjoint_samples(job)
    assert "ranks 0 and 1 share a model, but read different samples" in result.reason
    assert [found.cause for found in diagnose(job, [result])] == ["sample-content-differs"]


def test_copies_that_part_are_seen(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        alike(facts)
        if facts.rank == 1 and facts.step == 1:
            facts.after = {n: p + 1 for n, p in facts.before.items()}

    result = agreement(shared(tmp_path, change))
    assert result.verdict == "fail"
    assert result.first is not None
    assert (result.first.rank, result.first.step) == (1, 1)


def test_unlike_tensors_without_a_reference_are_not_judged(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        alike(facts)
        facts.before = {n: p + facts.rank for n, p in facts.before.items()}

    job = shared(tmp_path, change)
    result = initial_state(job)
    assert result.verdict == "fail"
    shown = judging.unknown_if_sharded(job, result)
    assert (shown.verdict, "without a DTensor or a reference" in shown.reason) == ("unknown", True)


@pytest.mark.parametrize(
    ("factor", "cause"), [(2.0, "extra-reduction"), (0.5, "extra-division"), (0.3, "wrong-divisor")]
)
def test_a_factor_is_named_by_its_axis(factor: float, cause: str, tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        alike(facts)
        facts.raw = {name: factor * one for name, one in facts.raw.items()}

    assert named(shared(tmp_path, change, steps=1), tmp_path) == [cause]


def test_terms_of_a_sum_are_named(tmp_path: Path) -> None:
    """`bias` is of the rank's own tokens; all else is right, but for the norm that clips."""

    def change(facts: Facts) -> None:
        alike(facts)
        own = gradients(facts.rank, facts.step)["bias"] / 2
        clipped = 0.5 + facts.rank / 8
        facts.raw = {"weight": facts.raw["weight"] * clipped, "bias": own * clipped}

    assert named(shared(tmp_path, change, steps=1), tmp_path) == ["missing-reduction"]


def named(job: JobRecording, tmp_path: Path) -> list[str]:
    folder = tmp_path / "reference"
    folder.mkdir()
    found = replayed(reference(job, folder), job)
    results, _ = checks_with_reference(job, found)
    return [one.cause for one in diagnose(job, results, found)]


@pytest.mark.parametrize(
    ("axes", "replicas"),
    [
        ((), ((0,), (1,), (2,), (3,))),
        ((DATA, TENSOR), ((0, 1), (2, 3))),
        ((TENSOR, DATA), ((0, 2), (1, 3))),
        ((DATA, MeshAxis(name="ep", kind="expert", size=2)), ((0,), (1,), (2,), (3,))),
    ],
)
def test_ranks_of_one_model(
    axes: tuple[MeshAxis, ...], replicas: tuple[tuple[int, ...], ...]
) -> None:
    assert replica_groups(axes, 4) == replicas


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dp_shard", "data"), ("tp", "tensor"), ("cp", "sequence"), ("pp", "pipeline"),
     ("ep", "expert"), ("replicate", "data"), ("x", "")],
)  # fmt: skip
def test_an_axis_is_known_by_its_name(name: str, kind: str) -> None:
    assert arrangement.kind_of_axis(name) == kind


def test_a_mesh_is_read_from_text() -> None:
    assert parse_mesh("data=-1, tensor=2", 4).axes == (("data", 2), ("tensor", 2))
    for text, said in (
        ("tensor", "is malformed"), ("tensor=2,tensor=2", "named twice"),
        ("rows=2", "has the unknown axis 'rows'"), ("tensor=3", "needs 3 ranks"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            parse_mesh(text, 4)


def test_a_term_that_is_not_a_mean_leaves_a_failure_unknown(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        facts.passes = [facts.a_pass(0, unread="a product")]

    for about, verdict in ((change, "unknown"), (lambda facts: None, "fail")):
        folder = tmp_path / verdict
        folder.mkdir()
        job = make(folder, about, steps=1)
        failed = CheckResult(check="gradients", layer="full batch float32", verdict="fail")
        assert judging.unknown_if_samples_interact(job, failed, [failed]).verdict == verdict
        # The same loss as of one batch: the term is over all samples on the ranks, too.
        loss = CheckResult(
            check="loss", layer="full batch float32", verdict="pass",
            compared=Compared(elements=1, ranks=2),
        )  # fmt: skip
        assert judging.unknown_if_samples_interact(job, failed, [failed, loss]).verdict == "fail"


def test_a_loss_belongs_to_the_pass_that_backward_went_through() -> None:
    first, last = (ForwardPass(inputs=(), rows=(str(n),), random={}) for n in range(2))
    several = [first, replace(last, loss=0.5)]
    move_loss_to_visited_pass(several, last, [0])
    assert [one.loss for one in several] == [0.5, None]
    move_loss_to_visited_pass(several, last, [0, 1])
    assert [one.loss for one in several] == [0.5, None]


def test_ranks_with_pieces_of_one_sample_draw_other_numbers(tmp_path: Path) -> None:
    def change(facts: Facts) -> None:
        alike(facts)
        one = replace(facts.passes[0], inputs=(f"{facts.rank:032x}",), draws=True)
        facts.passes = [replace(one, random={"torch": f"{facts.step}"})]

    folder = tmp_path / "recording"
    folder.mkdir()
    make(folder, change, steps=1)
    on_axes(folder, MeshAxis(name="cp", kind="sequence", size=2))
    (result,) = random_streams(perturbed_runs.read_whole(folder, tmp_path / "whole"))
    assert (result.verdict, "shards of the same samples" in result.reason) == ("fail", True)


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        ({"tensor_model": 2, "data": 2}, ["data", "tensor"]),
        ({"tensor_model": 2, "context": 2, "pipeline_model": 2, "data": 1},
         ["pipeline", "sequence", "tensor"]),
        ({"expert_model": 2, "data": 4}, ["data", "expert"]),
        ({"expert_model": 4, "data": 2, "tensor_model": 2}, ["data", "tensor"]),
        ({"data": 4}, []),  # what it divides is the data alone
        ({"tensor_model": 2, "data": 4}, []),  # which are not all ranks
    ],
)  # fmt: skip
def test_megatron(sizes: dict[str, int], kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tensor_model", "context", "pipeline_model", "expert_model", "data")
    answers = {f"get_{n}_parallel_world_size": lambda n=n: sizes[n] for n in names if n in sizes}
    state = SimpleNamespace(model_parallel_is_initialized=lambda: True, **answers)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    world = 8 if "context" in sizes else 4
    found = arrangement.axes_of(Parameters(), world, "")
    assert [axis.kind for axis in found] == kinds


def test_an_optimizer_without_gradients_is_said_to_train_nothing(tmp_path: Path) -> None:
    """As torch's own beside Megatron's wrapper, which keeps them as `main_grad`."""
    job = make(tmp_path)
    job.records = {
        key: replace(record, digests={
            name: digest for name, digest in record.digests.items()
            if not name.startswith(("local/", "raw/", "step/"))
        })
        for key, record in job.records.items()
    }  # fmt: skip
    result = exchange.gradients(job, job.steps)
    assert (result.verdict, result.reason) == ("unknown", exchange.NOT_TRAINED)
