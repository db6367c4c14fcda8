"""Each form in a real world: taken as what it is, with the verdict that it deserves."""

import functools
import json
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import distcheck
from distcheck import backends
from distcheck.errors import UsageError
from distcheck.records import CaseReport
from distcheck.reports.json_report import as_document
from tests.firsts import firsts
from tests.world import warm

pytestmark = pytest.mark.usefixtures("no_rerun")

SMALL = "tests.mutants.small:Small"
HERE = Path(__file__).parent
MISSING = backends.missing("mpi")
needs_mpi = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is an MPI")
SCALE = {"gradients rounding", "gradients full batch float32"}
LOCAL = {"accept": "local-sgd:1"}


@dataclass(frozen=True)
class Given:
    """Code, how it is asked for, what it is taken as, and what fails (nothing: it passes)."""

    spec: str
    taken: str = ""
    fails: set[str] = field(default_factory=set)
    world: int = 2
    steps: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    cause: str = ""  # the only one; empty where another test asks for it

    def __str__(self) -> str:
        said = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.spec} {said} w{self.world}".replace(" ", "-")


def _sum(loss: str) -> dict[str, Any]:
    return {"loss": loss}


GIVEN = [
    Given("functions:average_gradients", world=3),
    Given("functions:sync_with_size", "model"),
    Given("functions:gather_scatter_as_taught", "model", world=3),
    Given("functions:rank_first", "model"),
    Given("functions:needs_a_word", "model", options={"arguments": {"divisor": 2}}),
    Given("functions:needs_a_word", "model", SCALE, options={"arguments": {"divisor": 3}}),
    Given("functions:needs_a_word", "model", options={"arguments": {"divisor": "@world_size"}}),
    Given("functions:only_sums", "", SCALE),
    Given("functions:averages_parameters", "after-step", steps=2, options=LOCAL),
    Given(
        "functions:averages_parameters_over_more", "after-step", {"parameters rounding"}, steps=2,
        options=LOCAL,
    ),
    Given("functions:only_sums", options=_sum("mean/world"), world=3),
    Given("functions:only_sums", options=_sum("sum/global"), world=3, steps=2),
    Given("functions:average_gradients", "", SCALE, options=_sum("mean/world")),
    Given("functions:rebinds_a_local", "", {*SCALE, "agreement -"}),
    Given("functions:through_the_optimizer", "model"),
    Given("functions:over_parameters", "parameters"),
    Given("functions:over_gradients", "gradients"),
    Given("functions:returns_gradients", "gradients"),
    Given("functions:replaces_entries", "gradients"),
    Given("functions:means_of_the_model", "model"),
    Given("functions:drops_the_last", "gradients", {*SCALE, "agreement -"}),
    Given("functions:ring", "tensor-mean", SCALE),
    Given("functions:ring", "tensor-sum", options={"form": "tensor-sum"}),
    # From three ranks on each adds up in an order of its own: right, and not the same bits.
    Given(
        "functions:ring",
        "tensor-sum",
        {"agreement -"},
        world=3,
        options={"form": "tensor-sum"},
    ),
    Given("functions:ring_that_adds_its_own_again", "tensor-sum", options={"form": "tensor-sum"}),
    Given(
        "functions:ring_that_adds_its_own_again",
        "tensor-sum",
        {*SCALE, "agreement -"},
        world=3,
        options={"form": "tensor-sum"},
    ),
    Given("functions:mean_in_place", "tensor-mean"),
    Given("functions:mean_returned", "tensor-mean"),
    Given("functions:asynchronous", "tensor-sum", options={"form": "tensor-sum"}),
    Given("functions:steps_itself", "step", steps=2),
    Given("functions:descends_by_hand", "steps-inside", steps=2),
    Given("functions:averages_what_it_stepped", "steps-inside", steps=2),
    Given("functions:descends_on_its_own", "steps-inside", {*SCALE, "agreement -"}),
    Given("functions:install", "hooks", steps=2),
    Given("functions:install_halfway", "hooks", {*SCALE, "agreement -"}),
    Given("functions:wrapped", "wrapper"),
    Given("functions:with_free_names", "model"),
    Given("functions:with_odd_names", options={"variables": {"HOW_MANY": 2}}),
    Given("functions:with_odd_names", options={"variables": {"HOW_MANY": "@size"}}, world=3),
    Given("functions:with_odd_names", "", SCALE, options={"variables": {"HOW_MANY": 5}}),
    Given("functions:Callable.__call__"),
    Given("classes:NaiveDDP", "wrapper", world=3, steps=2),
    Given("classes:OverlappedDDP", "wrapper", steps=2),
    Given("classes:OddlyNamed", "wrapper"),
    Given("classes:OddlyNamed", "wrapper", options={"finish": "zzz"}),
    Given("classes:OddlyNamed.zzz", "wrapper"),
    Given("classes:LeansOnReset", "wrapper", steps=2),
    Given("classes:LeansOnReset", "wrapper", steps=2, options={"reset": "start_over"}),
    # Defined in another module than the one that it is imported from.
    Given("torch.nn.parallel:DistributedDataParallel", "wrapper"),
    Given("classes:InAStepHook", steps=2),
    Given("classes:InAWrongStepHook", "", SCALE),
    Given("classes:Plain", "wrapper"),
    Given("classes:SyncsInForward", "method"),
    Given("classes:DividedInPlace", "sharded-module", world=3, steps=2),
    Given("classes:TouchesAPiece", "sharded-module", {"parameters bitwise"}, steps=2),
    Given("classes:DividedByParameter", "sharded-module", world=3, steps=2),
    Given(
        "classes:GathersOnce",
        "sharded-module",
        {*SCALE, "loss full batch float32", "loss bitwise", "parameters bitwise"},
        steps=2,
    ),
    Given("classes:Reducer", "wrapper", steps=2),
    Given("clearing:FlatViews", "wrapper", steps=2),
    Given("clearing:FlatViewsBeside", "wrapper", steps=2),
    Given("clearing:ForgetsToClear", "wrapper", {*SCALE}, steps=2),
    Given("clearing:StartsWithTheBatch", "wrapper", steps=2),
    Given("classes:Agent.average_gradients", "method"),
    Given("classes:Agent.forgets", "method", {*SCALE, "agreement -"}),
    Given("classes:Agent.with_scale", "method", options={"arguments": {"self.scale": 0.5}}),
    Given("classes:Net.sync_grads", "method"),
    Given("classes:Communicator.sync", ""),
    Given("classes:SyncingOptimizer", "optimizer", steps=2),
    Given("classes:StepsFirst", "optimizer", {*SCALE, "agreement -"}),
    Given("classes:ShardedOptimizer", "sharded-optimizer", steps=2),
    Given(
        "classes:KeepsItToItself",
        "sharded-optimizer",
        {
            "gradients full batch float32",
            "loss full batch float32",
            "parameters bitwise",
            "agreement -",
        },
        steps=2,
    ),
    Given("classes:mean_hook", "comm-hook", steps=2),
    Given("classes:sum_hook", "comm-hook", SCALE),
    Given("classes:sum_hook", "comm-hook", options=_sum("mean/world")),
    Given(
        "classes:hook_with_group",
        "comm-hook",
        options={"arguments": {"process_group": "@group"}},
    ),
    Given(
        "classes:hook_with_state",
        "comm-hook",
        options={"arguments": {"state": f"@{HERE / 'classes.py'}:HookState"}},
    ),
    Given("classes:HookOwner.hook", "comm-hook"),
    Given(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook",
        "comm-hook",
        world=3,
    ),
    Given("published:SendsParameters", "wrapper", steps=2),
    Given("published:SendsThenHooks", "wrapper", steps=2),
    Given("published:HooksThenSends", "wrapper", {*SCALE, "agreement -"}),
    Given("published:SendsAndForgets", "wrapper", SCALE),
    Given("published:averaged", "context", steps=2),
    Given("published:summed", "context", SCALE),
    Given("published:Averaging", "context", steps=2),
    Given("published:AveragingAllButOne", "context", {*SCALE, "agreement -"}),
    Given("published:Trainer.average", "method"),
    Given("published:Trainer.update", "method", steps=2),
    Given("published:Trainer.update_of_sums", "method", SCALE),
    Given("published:Trainer.update_in_the_loop", "method", {"outcome -"}),
    Given(
        "published:Trainer.average_by_args",
        "method",
        options={"arguments": {"args.num_learners": 2}},
    ),
    Given("published:names_that_are_not_reached"),
    Given("published:by_a_group_that_is_not_defined", "model"),
    Given("published:sums_in_a_group_that_is_not_defined", "model", SCALE),
    Given("published:by_a_group_called_comm", "model"),
    Given("published:is_given_a_group_called_comm", "model"),
    Given("published:module_that_is_not_imported"),
    Given("published:reads_args", "model", options={"arguments": {"args.num_learners": 2}}),
    Given("published:reads_args", "model", SCALE, options={"arguments": {"args.num_learners": 3}}),
    Given("published:may_read_args", "model"),
    Given("published:Reducer"),
    Given("published:Adder", "", SCALE),
    Given("published:reducer"),
    Given("published:OneMethod"),
    Given("published:SeveralMethods", options={"finish": "go"}),
    Given("published:SeveralMethods"),
    Given("published:HooksAlone", "wrapper", steps=2),
    Given("published:SumsByHooks", "wrapper", SCALE),
    Given("published:HooksAndASync", "wrapper", options={"finish": "none"}),
    Given("published:ScalesAlone", "", {*SCALE, "agreement -"}),
    Given("published:ScalesAndReduces", steps=2),
    Given("published:ScalesByOneArgument", "", {*SCALE, "agreement -"}),
    Given("published:ScalesByOneArgumentAndReduces", steps=2),
    Given("published:ScalesAndCollects", "wrapper", steps=2),
    Given("published:ScalesAndAverages", "wrapper", SCALE),
    Given("published:CollectsUnscaled", "wrapper", SCALE),
    Given("published:NoGradientsAtAll", "", SCALE),
    Given("libraries:DistributedOptimizer", "optimizer", world=3, steps=2),
    Given("libraries:DistributedOptimizerThatSums", "optimizer", SCALE, cause="missing-division"),
    Given("libraries:distribute_optimizer", "optimizer", steps=2),
    Given("libraries:Averages"),
    Given("libraries:Sums", "", SCALE, cause="missing-division"),
    Given("published:AveragingSGD", "own-optimizer", steps=2),
    Given("published:SummingSGD", "own-optimizer", SCALE),
    Given("published:AveragingAdam", "own-optimizer", steps=2),
    Given("published:OwnUpdate", "own-optimizer", steps=2),
    Given("published:OwnUpdateOfSums", "own-optimizer", SCALE),
    Given("published:counts_what_it_sent", "tensor-mean"),
    Given("published:counts_and_sums", "tensor-mean", SCALE),
    Given("published:after_the_group", "tensor-mean"),
    Given("published:sums_after_the_group", "tensor-mean", SCALE),
    Given("published:by_its_norm", "steps-inside", {"outcome -"}, cause="nonfinite"),
    Given("published:by_its_sum", "steps-inside", SCALE, cause="nonfinite"),
    Given("bound:takes_the_module", "model"),
    Given("bound:takes_it_by_another_name", "model"),
    Given("bound:tensor_comes_second", "tensor-mean"),
    Given("bound:group_by_its_use", "model"),
    Given("bound:model_by_its_use", "model"),
    Given("bound:gathers_on_local_rank_0", "model", world=3),
    Given("bound:Abstract.reduce_parameters", "method"),
    Given("bound:Agent.average", "method"),
    Given("bound:through_a_buffer", steps=2),
    Given("bound:by_shares", "model"),
    Given("bound:MadeOfTheOptimizer.exchange", "method", steps=2),
    Given("bound:MadeOfTheOptimizer.exchange_but_the_last", "method", {*SCALE, "agreement -"}),
    Given("bound:WithOneMethod", "wrapper"),
    Given("bound:TimedReducer", "gradients", steps=2),
    Given("bound:NotAnOptimizerYet.mean_of", "method"),
    Given("bound:NotAnOptimizerYet.means_of", "method"),
    Given("bound:NotAnOptimizerYet.sum_of", "method", SCALE),
    Given("bound:InParts.reduced", "method"),
    Given("bound:OnlyStatic", ""),
    Given("bound:OfTheClass", "", SCALE),
    Given("bound:HalfTimedReducer", "gradients", SCALE),
    Given("bound:ListsItsParameters.mingle", "method", options={"arguments": {"is_server": True}}),
    Given("guessed:Switched", "wrapper", steps=2),
    Given("guessed:SwitchedSum", "wrapper", SCALE, cause="missing-division"),
    Given("guessed:MeansInBackward", "autograd"),
    Given("guessed:AroundInner", "sharded-optimizer", steps=2),
    Given("guessed:OfOneProcess", "parameters", steps=2),
    Given("guessed:OfOneProcessSum", "parameters", SCALE, cause="missing-division"),
    Given("guessed:Sharding", "sharded-optimizer", steps=2),
    Given("guessed:Node", "step", steps=2),
    Given("guessed:Attached", steps=2),
    Given("guessed:AttachedSum", "", SCALE, cause="missing-division"),
    Given("guessed:Parallelized", "wrapper", steps=2),
    Given("guessed:ParallelizedSum", "wrapper", SCALE, cause="missing-division"),
    Given("functions:needs_a_word", "model"),
    Given("guessed:of_some_ranks", "model", steps=2),
    Given("guessed:with_a_word", "model", steps=2),
    Given("guessed:with_a_word_sum", "model", SCALE, cause="missing-division"),
    Given("bound:ListsItsParameters.mingle", "method"),
    Given("guessed:hook_of_a_state", "comm-hook", steps=2),
    Given("guessed:hook_of_a_state_sum", "comm-hook", SCALE, cause="missing-division"),
    Given("guessed:of_a_wrapper", "model", steps=2),
    Given("guessed:of_a_wrapper_sum", "model", SCALE, cause="missing-division"),
    Given("guessed:of_a_trainer", "model", steps=2),
    Given("guessed:of_a_trainer_sum", "model", SCALE, cause="missing-division"),
    Given("guessed:Collects", steps=2),
    Given("guessed:CollectsSum", "", SCALE, cause="missing-division"),
    Given("guessed:WithoutSettings", "optimizer", steps=2),
    Given("guessed:WithoutSettingsSum", "optimizer", SCALE, cause="missing-division"),
    Given("guessed:OfBoth", "wrapper", steps=2),
    Given("guessed:OfBothSum", "wrapper", SCALE, cause="missing-division"),
    Given("guessed:of_groups", "model", steps=2),
    Given("guessed:of_groups_sum", "model", SCALE, cause="missing-division"),
    Given("guessed:of_groups_sum", "model", SCALE, world=3, cause="missing-division"),
    Given("guessed:RunsBackward", "optimizer", steps=2),
    Given("guessed:RunsBackwardSum", "optimizer", SCALE, cause="missing-division"),
    Given("guessed:NeedsClosure", "optimizer", steps=2),
    Given("guessed:HooksDDP", "wrapper", steps=2),
    Given("guessed:HooksDDPSum", "wrapper", SCALE, cause="missing-division"),
    Given("guessed:HooksDDPSum", "wrapper", SCALE, world=3, cause="missing-division"),
    Given("guessed:HoldsDDP", "wrapper", steps=2),
    Given("guessed:HoldsDDPSum", "wrapper", SCALE, cause="missing-division"),
    Given("guessed:HoldsDDPSum", "wrapper", SCALE, world=3, cause="missing-division"),
    Given("guessed:if_distributed", "parameters", steps=2),
    Given("guessed:if_distributed_sum", "parameters", SCALE, cause="missing-division"),
    Given("guessed:if_distributed_sum", "parameters", SCALE, world=3, cause="missing-division"),
    Given("guessed:IfGivenClosure", "optimizer", steps=2),
    Given("guessed:SendsLater", "sharded-optimizer", steps=2),
    Given("guessed:SendsLater", "sharded-optimizer", world=3, steps=2),
    Given("guessed:PassesAllOn", "own-optimizer", steps=2),
    Given("guessed:PassesAllOnSum", "own-optimizer", SCALE, cause="missing-division"),
    Given("guessed:server", "steps-inside", steps=2),
    Given("guessed:server", "steps-inside", world=3, steps=2),
    Given("script:average_gradients"),
    Given("script:forgets_to_divide", "", SCALE, cause="missing-division"),
]  # fmt: skip


def _kind(given: Given) -> Iterator[object]:
    """Where its code stands, what it is taken as, and how it ends; options count one by one."""
    ends = (frozenset(given.fails), given.cause, given.world > 2 and given.steps > 1)
    yield str(given) if given.options else (given.spec.partition(":")[0], given.taken, ends)


OFTEN = firsts(GIVEN, _kind)


@functools.cache
def in_one_run(world: int, steps: int, *, often: bool) -> dict[str, CaseReport]:
    """All that nothing is said about, in one run per world: it is looked at once."""
    given = OFTEN if often else [one for one in GIVEN if one not in OFTEN]
    specs = [g.spec for g in given if (g.world, g.steps, g.options) == (world, steps, {})]
    report = verify(specs, world=world, steps=steps)
    return dict(zip(specs, report.cases, strict=True))


@pytest.mark.parametrize(
    "given",
    [pytest.param(g, marks=[] if g in OFTEN else [pytest.mark.sweep], id=str(g)) for g in GIVEN],
)
def test_form(given: Given) -> None:
    if given.options:
        (case,) = verify([given.spec], world=given.world, steps=given.steps, **given.options).cases
    else:
        case = in_one_run(given.world, given.steps, often=given in OFTEN)[given.spec]
    failed = {f"{c.check} {c.layer}" for c in case.checks if c.verdict == "fail"}
    assert failed == given.fails
    assert case.verdict == ("fail" if given.fails else "pass"), case.checks
    assert not given.cause or [found.cause for found in case.diagnosis] == [given.cause]
    taken = [note for note in case.notes if note.startswith("taken as: ")]
    assert [note.split()[2].rstrip(",;") for note in taken] == (
        [given.taken] if given.taken else []
    )


@pytest.mark.parametrize(
    ("name", "cause"),
    [("ShardingSum", "missing-division"), ("NodeKeepsGradients", "accumulated-gradient")],
)
def test_a_form_that_is_found_hides_no_bug(name: str, cause: str) -> None:
    (case,) = verify([f"guessed:{name}"], world=2, steps=2).cases
    assert [found.cause for found in case.diagnosis] == [cause]


@pytest.mark.parametrize(
    ("name", "causes"), [("StepsItsShare", []), ("ForgetsToSend", ["missing-broadcast"])]
)
def test_the_optimizer_of_the_workload_replaces_a_sharded_one(name: str, causes: list[str]) -> None:
    (case,) = distcheck.verify(
        f"{HERE / 'guessed.py'}:{name}", form="sharded-optimizer", workload="adamw", world=2,
        steps=2,
    ).cases  # fmt: skip
    assert [found.cause for found in case.diagnosis] == causes


@pytest.mark.parametrize("name", ["Breaks", "CallsRemoved"])
def test_what_breaks_in_every_way_is_reported(name: str) -> None:
    (case,) = verify([f"guessed:{name}"], world=2, steps=1).cases
    assert [found.cause for found in case.diagnosis] == ["crash"]


def test_parameters_that_another_rank_steps_are_sent_by_it() -> None:
    (case,) = verify(["guessed:SendsOfOne"], world=2, steps=2).cases
    assert case.verdict == "fail"


@pytest.mark.parametrize(
    ("name", "verdict", "world"),
    [
        ("in_chunks", "pass", 2),
        ("in_whole_chunks", "fail", 2),
        ("in_chunks_sum", "fail", 3),
        pytest.param("in_chunks_sum", "fail", 2, marks=pytest.mark.sweep),
        pytest.param("in_chunks", "pass", 3, marks=pytest.mark.sweep),
        pytest.param("in_whole_chunks", "fail", 3, marks=pytest.mark.sweep),
    ],
)
def test_code_that_fails_on_small_tensors_gets_a_vector(
    name: str, verdict: str, world: int
) -> None:
    report = distcheck.verify(
        f"{HERE / 'guessed.py'}:{name}", workload=["exact", "cnn"], world=world, batch=96
    )
    of_exact = [case for case in report.cases if case.case.workload == "exact"]
    forms = [(case.case.adaptation.form, case.verdict) for case in of_exact]
    assert forms == [("flat-mean", verdict)]
    assert any("small tensors are not judged" in note for note in of_exact[0].notes)


def test_a_form_that_was_found_says_how_to_pin_it() -> None:
    (case,) = verify(["guessed:Switched"], world=2, steps=2).cases
    assert any("--as wrapper --finish sync_gradients --reset switch_on" in n for n in case.notes)
    assert case.case.adaptation.reset == "switch_on", "so that a replay calls it the same way"


def test_what_begins_late_is_found_in_real_numbers() -> None:
    report = distcheck.verify(
        f"{HERE / 'functions.py'}:rounds_from_step_four", workload="twelve_steps", world=2
    )
    assert [cause.cause for cause in report.cases[0].diagnosis] == ["low-precision"]


def test_pieces_are_found_where_few_integers_are_exact() -> None:
    """bfloat16 counts to 256, so the model's 402,250 elements take three numbered copies."""
    place = f"{HERE / 'classes.py'}:DividedByParameter"
    report = distcheck.verify(
        place, workload="mlp", dtype="bfloat16", batch=48, world=2, steps=1
    ).raise_for_verdict()
    (gradients,) = [c for c in report.cases[0].checks if c.check == "gradients"]
    assert gradients.compared.elements == 2 * 402_250


def test_a_divided_module_is_prepared_as_the_model_is() -> None:
    """The workload changes its model's mode before a step; what is trained stands beside it."""
    place = f"{HERE / 'classes.py'}:DividedByParameter"
    distcheck.verify(place, workload="eval_mode", world=2).raise_for_verdict()


def test_an_optimizer_of_its_own_keeps_all_that_groups_have() -> None:
    """The composite's schedule reads the rate of each group from an entry that is no setting."""
    place = f"{HERE / 'published.py'}:AveragingSGD"
    distcheck.verify(
        place, workload="composite", dtype="float32", batch=48, world=2, steps=2
    ).raise_for_verdict()


def test_a_sharded_optimizer_gets_the_settings_that_its_kind_takes() -> None:
    """Of AdamW's defaults, decoupled_weight_decay is no argument of its constructor."""
    place = f"{HERE / 'classes.py'}:ShardedOptimizer"
    distcheck.verify(place, workload="adamw", world=2, steps=2).raise_for_verdict()


def test_a_loss_that_is_weighted_in_place() -> None:
    """On 24 and 23 samples."""
    place = f"{HERE / 'classes.py'}:WeightsInPlace"
    distcheck.verify(
        place, workload=SMALL, dtype="float32", batch=47, world=2, steps=1
    ).raise_for_verdict()


@needs_mpi
@pytest.mark.parametrize(
    ("name", "form", "fails"),
    [
        ("allreduce_model", None, set()),
        ("drops_the_result", None, {*SCALE, "agreement -"}),
        pytest.param("Communicator.my_allreduce", "tensor-sum", set(), marks=pytest.mark.sweep),
        pytest.param("by_the_rank_of_its_module", None, set(), marks=pytest.mark.sweep),
        pytest.param("sums_for_its_module", None, SCALE, marks=pytest.mark.sweep),
    ],
)
def test_mpi4py(tmp_path: Path, name: str, form: str | None, fails: set[str]) -> None:
    words = ["--backend", "mpi", *(["--as", form] if form else [])]
    ran = command("with_mpi.py", name, *words, "--json", str(tmp_path / "report.json"))
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    failed = {f"{c['check']} {c['layer']}" for c in case["checks"] if c["verdict"] == "fail"}
    assert (failed, ran.returncode) == (fails, 1 if fails else 0), ran.stderr


@needs_mpi
@pytest.mark.parametrize(
    ("file", "name"), [("with_mpi.py", "allreduce_model"), ("published.py", "needs_a_communicator")]
)
def test_mpi4py_on_another_backend(file: str, name: str) -> None:
    ran = command(file, name, "--backend", "gloo")
    assert ran.returncode == 3
    assert "works only on backend mpi, not on gloo; pass --backend mpi" in ran.stderr


@needs_mpi
def test_mpi4py_without_a_backend_gets_the_one_that_it_needs() -> None:
    ran = command("with_mpi.py", "allreduce_model")
    assert (ran.returncode, "taking --backend mpi" in ran.stderr) == (0, True), ran.stderr


def test_a_replay_calls_it_the_same_way(tmp_path: Path) -> None:
    words = ["--arg", "divisor=3", "--loss", "mean/world", "--save", str(tmp_path / "kept")]
    assert command("functions.py", "needs_a_word", *words).returncode == 1
    (case,) = (tmp_path / "kept" / "cases").glob("*.json")
    report = tmp_path / "again.json"
    again = warm.run("replay", "--trust", str(case), "--json", str(report), cwd=tmp_path)
    assert again.returncode == 1
    (found,) = json.loads(report.read_text())["cases"]
    assert found["case"]["adaptation"]["arguments"] == [["divisor", "3"]]
    assert found["case"]["loss"] == "mean/world"


def command(file: str, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    quick = ["--workload", SMALL, "--dtype", "float32", "--batch", "48", "--steps", "1"]
    spec = ["--strategy", f"{HERE / file}:{name}", "--world", "2", *quick]
    return warm.run("verify", *spec, *words, cwd=HERE)


def verify(specs: list[str], **options: Any) -> distcheck.Report:
    """On 48 samples, so that shards are equal in every world."""
    places = [
        spec if "." in spec.partition(":")[0] else f"{HERE / spec.replace(':', '.py:')}"
        for spec in specs
    ]
    return distcheck.verify(
        places, workload=SMALL, dtype="float32", batch=48, deadline_s=10.0, **options
    )


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("guessed:by_twice_its_argument", {}, "unknown parameters denominator; pass --arg"),
        ("guessed:of_a_loss_scale", {}, "unknown parameters denominator; pass --arg"),
        ("guessed:sums_over_a_scale", {}, "unknown parameters loss_scale; pass --arg"),
        ("functions:with_odd_names", {}, "uses HOW_MANY, which its module does not define"),
        ("functions:average_gradients", {"finish": "x"}, "--finish x is for a wrapper"),
        ("functions:average_gradients", {"arguments": {"lr": 1}}, "takes no 'lr'; it takes model"),
        ("functions:average_gradients", {"form": "magic"}, "unknown form --as magic; known are"),
        ("functions:average_gradients", {"loss": "half"}, "unknown loss contract --loss half"),
        ("functions:average_gradients", {"arguments": {"a": object()}}, "cannot be sent to"),
        ("functions:needs_a_word", {"arguments": {"divisor": "@none"}}, "@none is unknown"),
        ("functions:mean_in_place", {"arguments": {"tensor": 1}}, "is what it is called with"),
        ("functions:adds_its_step", {}, "updates the parameters itself"),
        ("functions:decays", {}, "even if every gradient is zero: by weight decay"),
        ("functions:descends_by_hand", {"arguments": {"lr": 0.1}}, "is not a power of two"),
        ("functions:average_gradients", {"form": "steps-inside"}, "which is unknown; make it"),
        ("functions:averages_with_rate", {"form": "steps-inside"}, "did not update zero "
            "parameters"),
        ("classes:NaiveDDP", {"form": "sharded-module"}, "every parameter on every rank; pass "
            "--as wrapper"),
        ("classes:DividedInPlace", {"form": "wrapper"}, "pass --as sharded-module"),
        ("classes:NaiveDDP", {"finish": "finnish"}, "NaiveDDP has no such method; it has finish_"),
        ("classes:Copies", {}, "trains parameters other than those"),
        ("classes:Agent.uses_unknown", {}, "self.replay_buffer, which distcheck does not know"),
        ("published:SeveralMethods", {"finish": "run"}, "no such method; it has stop, go"),
        ("published:averaged", {"form": "hooks"}, "never enter; pass --as context"),
        ("published:reads_args", {}, "reads args.num_learners, .* pass --arg args.num_learners="),
        ("published:Trainer.average_by_args", {}, "pass --arg args.num_learners=@world_size"),
        ("published:needs_a_communicator_of_its_module", {}, "pass --set comm_dp=@comm"),
        ("published:ScalesByOptimizer", {}, r"expected scale_loss\(loss\) or scale_loss"),
        ("guessed:EitherWay", {}, r"passes in 2 different forms. Pass the (.|\n)*--as wrapper "
            r"--finish one"),
        ("guessed:sum_or_mean", {}, r"passes in 2 different forms. (.|\n)*--as tensor-sum\n.* "
            r"average=True"),
        ("guessed:of_marked_parameters", {}, "reads the attribute is_replicated, which these"),
        ("guessed:needs_to_be_set_up", {}, "not set up (.|\n)*before its first collective"),
        ("guessed:of_a_part", {}, "no attribute 'encoder'"),
        ("guessed:server_sum", {}, r"fails in all (.|\n)*--as steps-inside --arg world_size=@wor"),
        ("guessed:of_models", {}, "its file calls no collective; pass the function that commu"),
        ("guessed:ClosesTwice", {}, "calls its closure more than once in a step"),
        ("guessed:needs_a_setting", {}, "before its first collective: it needs state that the "
            "training"),
        ("published:ScalesToNothing", {}, "scale_loss of .* returned a NoneType; expected the"),
        ("published:steps_in_backward", {}, "updates the parameters in backward and leaves no gr"),
        ("published:StepsInBackward", {}, "updates the parameters in backward and leaves no gr"),
        ("published:Normed", {}, r"0.weight is gone, and 0.parametrizations.weight.original0 is n"),
        ("published:OwnMomentum", {}, "even if every gradient is zero: by weight decay"),
        ("classes:NeverSteps", {}, "took 0 steps instead of one"),
        ("distcheck_strategies.allreduce:allreduce", _sum("sum/global"), "remove --loss"),
    ],
)  # fmt: skip
def test_an_unknown_form_is_refused(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify([spec], world=2, steps=1, **options)


@pytest.mark.parametrize(("spec", "edits"), [("classes:Both.average", {"ATTRIBUTE": "actor"})])
def test_a_refusal_shows_a_working_file(tmp_path: Path, spec: str, edits: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        verify([spec], world=2)
    sentences, *lines = str(caught.value).splitlines()
    assert len(str(caught.value)) < 900
    assert sentences.count(". ") == 1
    source = textwrap.dedent("\n".join(lines))
    source = f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{source}"
    for capitals, given in edits.items():
        assert capitals in source
        source = source.replace(capitals, given)
    (tmp_path / "beside.py").write_text(source)
    name = sentences.rpartition("FILE.py:")[2].rstrip(":")
    place = f"{tmp_path / 'beside.py'}:{name}"
    (case,) = distcheck.verify(
        place, world=2, workload=SMALL, dtype="float32", batch=48, steps=1
    ).cases
    assert case.verdict == "pass", case.checks


def test_the_report_holds_all_that_was_said() -> None:
    report = verify(
        ["functions:needs_a_word"], world=2, steps=1, loss="mean", arguments={"divisor": 2}
    )
    (case,) = as_document(report)["cases"]
    adaptation = case["case"]["adaptation"]
    assert (adaptation["form"], adaptation["arguments"]) == (None, (("divisor", "2"),))
    assert case["case"]["loss"] == "mean"
    assert case["replay"].endswith("--arg divisor=2")
