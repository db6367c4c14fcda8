"""What a request becomes: cases, the checks they owe, and what is refused."""

from pathlib import Path

import msgspec
import pytest

from distcheck.contract import BackendAllReduce, Contract, DDPBuckets
from distcheck.errors import CannotRunError, UsageError
from distcheck.plan.case_remarks import notes_on_case, why_left_out, why_no_full_batch
from distcheck.plan.cases import check_case, plan_cases, plan_checks
from distcheck.plan.cells_to_run import counts_only_if_finished
from distcheck.plan.matrix import run_identity
from distcheck.plan.settings import Request
from distcheck.records import Adaptation, Case, Compared, ModelLayout, PlannedCheck, TensorSpec
from distcheck.training.jobs import CaseFacts
from distcheck.training.loading import load_strategy
from distcheck.verification.case_run import is_separate
from tests.correct import LAYOUTS
from tests.optional import needs

MODEL = ModelLayout(
    parameters=(TensorSpec(name="w", shape=(10,), dtype="float32"),),
    buffers=(TensorSpec(name="mean", shape=(3,), dtype="float32"),),
    optimizer=(TensorSpec(name="w/momentum_buffer", shape=(10,), dtype="float32"),),
)


ORDERED = Contract(order=BackendAllReduce(), scale="divide-after")


def cases(**options: object) -> list[Case]:
    return plan_cases(msgspec.convert({"strategies": ["allreduce"], **options}, Request))


def facts_of(contract: Contract, *, draws: bool = False, **others: bool) -> CaseFacts:
    return CaseFacts(
        contract=contract, strategy_file="", model=MODEL, train_size=1000,
        saved_bytes_per_sample=0, own_sampler=False, draws_random_numbers=draws, **others,
    )  # fmt: skip


def checks(
    case: Case, contract: Contract = ORDERED, *, failure: str = "", draws: bool = False,
    sizes: tuple[int, ...] = (64, 64, 64, 64),
) -> dict[tuple[str, str], PlannedCheck]:  # fmt: skip
    facts = facts_of(contract, draws=draws)
    planned = plan_checks(case, facts, sizes=[sizes] * case.steps, calibration_failure=failure)
    return {(p.check, p.layer): p for p in planned}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_brings_its_own_workload(name: str) -> None:
    """Read without an import, as it stands in the decorator, and as it is after one."""
    promised = load_strategy(name).contract.workload
    planned = cases(strategies=[name, "allreduce"])
    own = [case for case in planned if case.strategy == name]
    assert promised in ("mlp", "cnn", "transformer", "experts")
    assert [(case.workload, case.dtype) for case in own] == [
        (promised, "float32"), (promised, "float64"),
    ]  # fmt: skip
    assert own[0].rerun
    assert planned[len(own) :] == cases()
    assert {case.workload for case in cases(strategies=[name], workloads=["mlp:small"])} == {
        "mlp:small"
    }


def test_a_promised_workload_that_is_not_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("@strategy(workload='mpl')\nclass Mine: ...\n")
    with pytest.raises(UsageError, match="unknown workload 'mpl'"):
        cases(strategies=[f"{file}:Mine"])
    assert cases(strategies=[f"{file}:Mine"], workloads=["mlp"])[0].workload == "mlp"


def test_the_default_run() -> None:
    exact, cnn, composite, semantic, late, absent = cases()
    assert [c.id for c in cases()] == [
        "allreduce-w4-exact-float32", "allreduce-w4-cnn-float32",
        "allreduce-w4-composite-float32", "allreduce-w4-composite-float64",
        "allreduce-w4-twelve_steps-float32", "allreduce-w4-absent_on_some-float32",
    ]  # fmt: skip
    assert [c.steps for c in cases()] == [3, 3, 3, 2, 12, 3]
    assert [c.steps for c in cases(workloads=["exact"])] == [12]
    assert (cnn.batch, cnn.steps, cnn.world, cnn.seed) == (256, 3, 4, 0)
    assert {layer for check, layer in checks(exact)} == {"exact", "bitwise", "-"}
    assert {layer for check, layer in checks(cnn)} == {
        "bitwise", "rounding", "full batch float32", "-",
    }  # fmt: skip
    assert {layer for check, layer in checks(composite, draws=True)} == {"bitwise", "rounding", "-"}
    assert {layer for check, layer in checks(semantic)} == {"full batch float64", "bitwise", "-"}
    assert {layer for check, layer in checks(late)} == {"bitwise", "rounding", "-"}
    assert [c.rerun for c in cases()] == [False, True, False, False, False, False]
    assert [counts_only_if_finished(c) for c in cases()] == [False] * 5 + [True]
    assert (absent.deadline_s, cnn.deadline_s) == (3.0, 30.0)


@pytest.mark.parametrize(
    "asked",
    [
        {"workloads": ["cnn"]}, {"dtype": "float32"}, {"accept": "quantized:8"}, {"worlds": [1]},
        {"adaptation": {"without_data": [0]}}, {"without": ["absent_on_some"]},
        pytest.param({"backend": "mpi"}, marks=needs("mpi")),
    ],
    ids=str,
)  # fmt: skip
def test_unneeded_is_skipped(asked: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcheck.backends.missing", lambda name: "")
    assert not any(counts_only_if_finished(case) for case in cases(**asked))


def test_what_the_default_run_need_not_finish_keeps_its_steps_and_may_be_asked_for() -> None:
    """Fewer would not show what it is for; asked for, it counts whatever happens."""
    (absent,) = (c for c in cases(steps=1, batch=8, deadline_s=2.0) if counts_only_if_finished(c))
    assert (absent.steps, absent.batch, absent.deadline_s) == (3, 256, 2.0)
    assert check_case(absent) == absent
    thorough = [c for c in cases(thorough=True) if c.workload == "absent_on_some"]
    for asked in (cases(workloads=["absent_on_some"]), thorough):
        (case,) = asked
        assert not counts_only_if_finished(case)


def test_what_is_asked_for_by_name_is_run_in_full() -> None:
    named = cases(workloads=["exact", "cnn", "composite"])
    assert [(c.workload, c.dtype, c.rerun) for c in named] == [
        ("exact", "float32", True),
        ("cnn", "float32", True), ("cnn", "float64", False),
        ("composite", "float32", True), ("composite", "float64", False),
    ]  # fmt: skip
    assert {c.steps for c in cases(steps=5) if not counts_only_if_finished(c)} == {5}
    (alone,) = cases(workloads=["composite"], dtype="float64")
    assert (alone.steps, alone.layers) == (3, ("bitwise", "rounding", "full batch float64"))


def test_out_of_sight_owes_no_local_gradients_and_says_so() -> None:
    _, cnn, *_ = cases()
    hidden = Contract(weighting="loss", sync="out-of-sight")
    seen, unseen = checks(cnn, Contract(weighting="loss")), checks(cnn, hidden)
    assert set(seen) - set(unseen) == {("local gradients", "bitwise")}
    assert ("gradients", "rounding") in unseen
    gradients = cnn.world * cnn.steps * 10
    rerun = ("rerun", "-")
    assert unseen[rerun].required.elements == seen[rerun].required.elements - gradients
    assert "no hook can record the local gradients" in " ".join(
        notes_on_case(cnn, [(64,) * 4], hidden)
    )


def test_sharded_state_is_owed_once_by_all_ranks_together() -> None:
    _, cnn, *_ = cases()
    sharded = Contract(order=BackendAllReduce(), scale="divide-after", optimizer_state="sharded")
    whole, parts = checks(cnn), checks(cnn, sharded)
    momentum = cnn.steps * 10
    for check in (("parameters", "bitwise"), ("agreement", "-")):
        assert parts[check].required.ranks == cnn.world
    here, there = whole["parameters", "bitwise"].required, parts["parameters", "bitwise"].required
    assert there.tensors == here.tensors == 2
    assert there.elements == here.elements - (cnn.world - 1) * momentum
    assert parts["agreement", "-"].required.tensors == 1
    assert "sharded" in " ".join(notes_on_case(cnn, [(64,) * 4], sharded))


def test_updates_of_pieces_are_owed_where_position_does_not_matter() -> None:
    cut = Contract(weighting="loss", optimizer_state="cut")
    _, cnn, *_ = cases()
    assert checks(cnn, cut) == checks(cnn, Contract(weighting="loss"))
    (short,) = cases(workloads=["cnn"], dtype="bfloat16")
    assert ("parameters", "bitwise") in checks(short, Contract(weighting="loss"))
    assert ("parameters", "bitwise") not in checks(short, cut)
    assert "so it is not checked" in " ".join(notes_on_case(short, [(64,) * 4], cut))


def test_what_a_wire_makes_inexact_or_cannot_carry() -> None:
    exact, cnn, *_ = cases()
    wired = Contract(order=DDPBuckets(), scale="divide-before", wire="bfloat16")
    assert {layer for check, layer in checks(exact, wired) if check == "gradients"} == {
        "bitwise",
        "rounding",
    }
    half = facts_of(Contract(wire="float16"))
    assert why_left_out(exact, half, [(64,) * 4]) == ""
    assert "float16 carries 65504" in why_left_out(exact, half, [(86, 85, 85)])
    assert why_left_out(exact, facts_of(wired), [(86, 85, 85)]) == ""
    assert why_left_out(cnn, half, [(86, 85, 85)]) == ""


def test_micro_batches_are_exact_where_they_halve() -> None:
    exact, *_ = cases()
    halved = Contract(order=DDPBuckets(), scale="divide-before", micro_batches=2)
    assert ("gradients", "exact") in checks(exact, halved)
    assert ("gradients", "exact") not in checks(exact, halved, sizes=(85, 85, 43, 43))
    thirds = Contract(order=DDPBuckets(), scale="divide-before", micro_batches=3)
    assert ("gradients", "exact") not in checks(exact, thirds, sizes=(66, 66, 66, 66))


def test_vgg11_runs_in_float32_and_in_float64_on_request() -> None:
    assert [c.dtype for c in cases(workloads=["vgg11"])] == ["float32"]
    (asked,) = cases(workloads=["vgg11"], dtype="float64")
    assert asked.layers == ("bitwise", "rounding", "full batch float64")
    assert asked.rerun


def test_every_strategy_meets_every_world_once() -> None:
    found = cases(strategies=["allreduce", "ddp", "ddp"], worlds=[2, 3, 2], workloads=["mlp"])
    pairs = [(c.strategy, c.world, c.dtype) for c in found]
    assert len(pairs) == len(set(pairs)) == 8


def test_names_that_shorten_alike_keep_ids_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    files = [tmp_path_factory.mktemp("x") / "sync.py" for _ in range(2)]
    for file in files:
        file.write_text("f = print")
    found = cases(strategies=[f"{file}:f" for file in files], workloads=["mlp"])
    assert len({case.id for case in found}) == len(found)


@pytest.mark.parametrize("name", ["my sync (v2)", ".hidden", "a" * 240, "文" * 80, "-v"])
def test_any_name_of_a_file_gives_cases_that_can_be_kept(tmp_path: Path, name: str) -> None:
    """Kept under a name that a file may have, and read again from there."""
    (tmp_path / f"{name}.py").write_text("f = W = print")
    found = cases(strategies=[f"{tmp_path}/{name}.py:f"], workloads=[f"{tmp_path}/{name}.py:W"])
    for case in [*found, *cases(workloads=["generated:conv2.strided-linear3.bias;adam"])]:
        assert len(f"{case.id}.json".encode()) < 255
        (tmp_path / f"{case.id}.json").touch()
        assert check_case(case) == case


def test_low_precision_leaves_exact_out() -> None:
    assert [(c.workload, c.dtype) for c in cases(dtype="bfloat16")] == [
        ("cnn", "bfloat16"), ("composite", "bfloat16"),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="workload exact does not run in bfloat16"):
        cases(dtype="bfloat16", workloads=["exact"])


def test_a_case_comes_back_as_it_was_planned() -> None:
    for case in [*cases(), *cases(dtype="float64"), *cases(workloads=["vgg11"], worlds=[3])]:
        assert check_case(case) == case


@pytest.mark.parametrize(
    "edit",
    [
        {"layers": ()}, {"layers": ("bitwise",)}, {"layers": ("foo",)}, {"world": 0}, {"world": -1},
        {"steps": 0}, {"steps": 10**9}, {"seed": -5}, {"deadline_s": 0.0}, {"batch": 1},
        {"dtype": "float12"}, {"data": "zzz"}, {"id": "../../evil"}, {"id": ".."}, {"id": ""},
        {"id": "x" * 201}, {"id": "a b"}, {"id": "a\n"},
    ],
    ids=str,
)  # fmt: skip
def test_an_edited_case_is_refused(edit: dict[str, object]) -> None:
    """A case without layers would compare nothing, and pass."""
    _, cnn, *_ = cases()
    with pytest.raises(UsageError):
        check_case(msgspec.structs.replace(cnn, **edit))


def test_an_edited_device_cannot_run() -> None:
    _, cnn, *_ = cases()
    for edit in ({"device": "cuda"}, {"backend": "nccl"}):
        with pytest.raises(CannotRunError):
            check_case(msgspec.structs.replace(cnn, **edit))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": []}, "no strategy was given; pass --strategy path"),
        ({"worlds": [0]}, "--world 0 is out of range"),
        ({"worlds": [-3]}, "--world -3 is out of range"),
        ({"worlds": [1000]}, "--batch 256 is smaller than --world 1000"),
        ({"batch": 0}, "--batch 0 is out of range; it takes 1 to"),
        ({"steps": 0}, "--steps 0 is out of range"),
        ({"seed": 2**63}, "--seed 9223372036854775808 is out of range"),
        ({"steps": 10**9}, "--steps 1000000000 is out of range"),
        ({"deadline_s": float("inf")}, "--deadline inf is out of range"),
        ({"worlds": []}, "no world size was given"),
        ({"seed": -1}, "--seed -1 is out of range"),
        ({"deadline_s": 0.0}, "--deadline 0.0 is out of range"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; known are float32"),
        ({"data": "imagenet"}, "unknown data 'imagenet'; known are synthetic"),
        ({"workloads": ["resnet"]}, "unknown workload 'resnet'"),
    ],
)
def test_nonsense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cases(**options)


def test_without_an_order_nothing_is_owed_to_the_bit_after_the_sync() -> None:
    _, cnn, *_ = cases()
    assert ("gradients", "bitwise") not in checks(cnn, Contract())
    assert ("gradients", "rounding") in checks(cnn, Contract())
    assert ("local gradients", "bitwise") in checks(cnn, Contract())


def test_a_failed_calibration_falls_back_to_the_bound_and_says_so() -> None:
    _, cnn, *_ = cases()
    planned = checks(cnn, failure="another order")
    assert ("gradients", "bitwise") not in planned
    assert planned["gradients", "rounding"].note == "bitwise falls back to rounding: another order"


def test_random_forward_passes_have_no_full_batch() -> None:
    _, cnn, _, semantic, *_ = cases()
    assert ("gradients", "full batch float32") not in checks(cnn, draws=True)
    planned = checks(semantic, draws=True)
    assert ("gradients", "full batch float64") not in planned
    assert "random numbers" in planned["gradients", "rounding"].note


@pytest.mark.parametrize(
    ("dtype", "rounds_to", "why"),
    [
        ("float32", ("float32",), ""),
        ("float32", ("complex64", "float32", "float64"), ""),
        ("float32", ("bfloat16", "float32"), "also computes in bfloat16"),
        ("float32", ("float16", "float32", "float8_e4m3fn"), "in float16 and float8_e4m3fn,"),
        ("float64", ("float64",), ""),
        ("float64", ("complex64", "float32", "float64"), "in complex64 and float32,"),
        ("bfloat16", ("bfloat16",), ""),
    ],
)
def test_low_precision_full_batch(dtype: str, rounds_to: tuple[str, ...], why: str) -> None:
    """What is left out is said, and X and R are required in any case."""
    (case,) = cases(workloads=["my.workloads:Mine"], dtype=dtype)
    facts = msgspec.structs.replace(facts_of(ORDERED), rounds_to=rounds_to)
    sizes = [(64,) * 4] * case.steps
    planned = plan_checks(case, facts, sizes=sizes, calibration_failure="")
    layers = {check.layer for check in planned if check.check == "gradients"}
    given = set(case.layers) - ({"full batch float32", "full batch float64"} if why else set())
    assert {"bitwise", "rounding"} <= layers == given
    against = msgspec.structs.replace(case, reference_device="cpu")
    for said in (why_no_full_batch(case, facts, sizes), why_left_out(against, facts, sizes)):
        assert why in said
        assert bool(why) == bool(said)


def test_rows_apart_leave_the_full_batch_nothing_to_go_by() -> None:
    _, cnn, _, semantic, *_ = cases()
    facts = facts_of(ORDERED, normalizes_batches=True, rows_apart=True)
    for case in (cnn, semantic):
        planned = plan_checks(case, facts, sizes=[(64,) * 4] * 3, calibration_failure="")
        layers = {check.layer for check in planned if check.check == "gradients"}
        assert "rounding" in layers
        assert layers.isdisjoint({"full batch float32", "full batch float64"})
        assert "not in sample order" in why_no_full_batch(case, facts, [(64,) * 4])


def test_exact_is_judged_differently_if_no_bits_are_required() -> None:
    (exact,) = cases(workloads=["exact"], worlds=[7])
    ddp = Contract(order=DDPBuckets(), scale="multiply-before")
    planned = checks(exact, ddp, sizes=(37, 37, 37, 37, 36, 36, 36))
    assert ("gradients", "exact") not in planned
    assert "1/7" in planned["gradients", "rounding"].note


def test_checks_owe_everything_on_every_rank_at_every_step() -> None:
    _, cnn, *_ = cases()
    planned = checks(cnn)
    gradients = planned["gradients", "bitwise"].required
    assert gradients == Compared(tensors=1, elements=10 * 4 * 3, ranks=4, steps=3)
    assert planned["parameters", "bitwise"].required.elements == 20 * 4 * 3
    assert planned["agreement", "-"].required.elements == 30 * 4 * 3
    assert planned["data", "-"].required.elements == 768
    assert planned["rerun", "-"].required.elements == 4 * (3 * (20 + 23) + 23)


def test_notes() -> None:
    (one, *_), (two, *_) = cases(worlds=[1]), cases(worlds=[2])
    assert "world size 1 has nothing to synchronize" in notes_on_case(one, [(256,)])[0]
    assert "cannot distinguish reduction orders" in notes_on_case(two, [(128, 128)])[0]
    (three, *_) = cases(worlds=[3])
    assert notes_on_case(three, [(86, 85, 85)]) == [
        "uneven shards (86 + 85 + 85): each must be weighted by its number of samples (step.weight)"
    ]


def test_a_case_says_whether_its_rerun_is_in_separate_interpreters() -> None:
    """A replay, and the command line without a case file, repeat it."""
    assert {case.separate for case in cases()} == {True}
    assert not any("separate" in case.command_line for case in cases())
    for case in cases(separate=False, device="cpu"):
        assert not case.separate
        assert "--no-separate" in case.command_line.split()
        assert check_case(case) == case


@pytest.mark.parametrize(
    ("change", "separate"),
    [
        ({}, True),
        ({"separate": False}, False),
        ({"rerun": False}, False),
        ({"device": "cuda"}, False),  # where LOCAL_RANK chooses the GPU
        ({"backend": "mpi"}, False),  # whose ranks are a job's
    ],
    ids=str,
)
def test_where_separate_interpreters_are_of_use(change: dict[str, object], separate: bool) -> None:
    case = msgspec.structs.replace(cases()[0], **{"rerun": True, **change})
    assert is_separate(case) is separate


@pytest.mark.parametrize("file", ["s.py", "helper.py", "wire.py", "values.py"])
def test_processes_of_a_run_compare_all_code_that_it_loads(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the named file was compared: a different module that it imports was not noticed."""
    texts = {"s.py": "import helper\ndef sync(model): pass\n", "helper.py": "", "wire.py": "",
             "values.py": "x = 1\n"}  # fmt: skip
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for one, text in texts.items():
            Path(one).write_text(text + "# changed\n" * (name == "b" and one == file))
        case = Case(
            id="a", strategy="s.py:sync", world=2, workload="exact", backend="wire.py:make",
            adaptation=Adaptation(variables=(("x", "@values.py:x"),)),
        )  # fmt: skip
        found.append(run_identity([case]))
        assert run_identity([case]) == found[-1]
    (changed,) = (name for name in found[0] if found[0][name] != found[1][name])
    assert changed.startswith("the code of ")
