"""What a pass does not show, from what its cases had in them."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from distcheck.contract import Contract, Training
from distcheck.records import (
    Case,
    CaseContents,
    CaseReport,
    CheckResult,
    Delay,
    ModelLayout,
    TensorSpec,
    VerdictName,
)
from distcheck.records.expected_events import (
    PURPOSE,
    InitialParametersDiffer,
    NonfiniteGradient,
    ParameterUnfrozen,
    StepInEvalMode,
)
from distcheck.records.mistakes import NOTHING, RevealedMistakes, merge_two_revealed_mistakes
from distcheck.records.schedules import ScheduleRun, ScheduleSearchResult
from distcheck.training.jobs import TRAITS, CaseFacts
from distcheck.verification import followups
from distcheck.verification.contents import _FEATURES, contents_of, not_shown
from distcheck.verification.preparation import SharedDataset
from distcheck.verification.session import Session, SilentListener
from distcheck.worlds.pool import Pool
from distcheck.worlds.surroundings import FACTORS, Surroundings
from tests.optional import needs

SHOWN = msgspec.structs.replace(NOTHING, absent=False, zero=False)
PLAIN = Case(id="a", strategy="allreduce", world=4, steps=3)


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


@dataclass
class Run:
    """A case with nothing special in it, but for what a test says."""

    case: Case = PLAIN
    parameters: tuple[TensorSpec, ...] = (spec("a.weight", 3, 4), spec("a.bias", 3))
    buffers: tuple[TensorSpec, ...] = ()
    facts: dict[str, object] = field(default_factory=dict)
    shown: RevealedMistakes = SHOWN
    factors: tuple[str, ...] = ()
    happened: bool = True

    @property
    def contents(self) -> CaseContents:
        known = {
            "contract": Contract(), "strategy_file": "", "train_size": 1024,
            "saved_bytes_per_sample": 0, "own_sampler": False, "draws_random_numbers": False,
            "kinds": ("Linear",),
        }  # fmt: skip
        model = ModelLayout(parameters=self.parameters, buffers=self.buffers, optimizer=())
        facts = CaseFacts(model=model, **{**known, **self.facts})  # type: ignore[arg-type]
        result = CheckResult(
            check="gradients", layer="rounding", verdict="pass", shown={"a.weight": self.shown}
        )
        verdict: VerdictName = "pass" if self.happened else "unknown"
        purpose = CheckResult(check=PURPOSE, layer="-", verdict=verdict)
        surroundings = Surroundings(self.factors)
        return contents_of(self.case, facts, [result, purpose], surroundings=surroundings)

    @property
    def report(self) -> CaseReport:
        return CaseReport(
            case=self.case, strategy_file="", verdict="pass", outcomes=(), checks=(),
            contents=self.contents,
        )  # fmt: skip


def also(**changes: object) -> RevealedMistakes:
    return msgspec.structs.replace(SHOWN, **changes)


HAVING = {
    "groups": Run(facts={"groups": 2}),
    "schedule": Run(facts={"schedule": True}),
    "alike": Run(parameters=(spec("a", 3), spec("b", 3))),
    "tied_or_unused": Run(shown=also(absent=True)),
    "absent_on_some": Run(shown=also(absent_on_some=True)),
    "zero_on_some": Run(shown=also(zero_on_some=True)),
    "non_finite": Run(facts={"must_happen": (NonfiniteGradient(parameter="a"),)}),
    "frozen": Run(facts={"frozen": 1}),
    "unfrozen": Run(facts={"must_happen": (ParameterUnfrozen(parameter="a"),)}),
    **{name: Run(facts={"traits": (name,)}) for name in TRAITS},
    "several_dtypes": Run(parameters=(spec("a", 3), spec("b", 4, dtype="float64"))),
    "complex": Run(parameters=(spec("a", 3, dtype="complex64"),)),
    "buffers": Run(buffers=(spec("m", 3),)),
    "integer_buffers": Run(buffers=(spec("n", dtype="int64"),)),
    "batch_norm": Run(facts={"normalizes_batches": True}),
    "eval_mode": Run(facts={"must_happen": (StepInEvalMode(buffer="n"),)}),
    "random_numbers": Run(facts={"draws_random_numbers": True}),
    "unequal_shards": Run(case=msgspec.structs.replace(PLAIN, world=3)),
    "accumulation": Run(facts={"training": Training(accumulate=2)}),
    "clipping": Run(facts={"training": Training(clip_norm=1.0)}),
    "loss_scaling": Run(facts={"training": Training(loss_scale=8.0)}),
    "resume": Run(facts={"training": Training(resume_before=2)}),
    "keeps_gradients": Run(facts={"training": Training(keeps_gradients=True)}),
    "evaluates": Run(facts={"training": Training(evaluates=True)}),
    "starts_apart": Run(facts={"must_happen": (InitialParametersDiffer(),)}),
    "late_ranks": Run(case=msgspec.structs.replace(PLAIN, delays=(Delay(rank=0, ms=1),))),
    "process_state": Run(factors=("interpreters",)),
}


def test_every_feature_has_a_run_here() -> None:
    assert set(HAVING) == set(_FEATURES)


def test_a_plain_run_has_none_of_them() -> None:
    assert Run().contents.features == ()
    assert set(_FEATURES.values()) < set(not_shown([Run().report]))


@pytest.mark.parametrize("name", _FEATURES)
def test_what_a_case_had_is_not_named(name: str) -> None:
    had = HAVING[name].contents
    assert name in had.features
    assert _FEATURES[name] not in not_shown([HAVING[name].report, Run().report])
    others = {"integer_buffers": {"buffers"}}.get(name, set())
    assert set(had.features) == {name} | others


@pytest.mark.parametrize("name", [n for n, run in HAVING.items() if "must_happen" in run.facts])
def test_what_was_declared_and_did_not_happen_is_not_shown(name: str) -> None:
    assert replace(HAVING[name], happened=False).contents.features == ()


def test_a_separate_rerun_has_late_ranks() -> None:
    assert Run(factors=FACTORS).contents.features == ("late_ranks", "process_state")


def test_a_small_model_shows_one_bucket_alone() -> None:
    small = Run(parameters=(spec("a", 1 << 18),)).report
    large = Run(parameters=(spec("a", 3 << 18),)).report
    one, two = "a second bucket of 1 MiB", "a second bucket of 3 MiB"
    assert one in "; ".join(not_shown([small]))
    assert two in (text := "; ".join(not_shown([small, large])))
    assert one not in text


def test_sizes_are_those_of_the_largest() -> None:
    deep = Run(parameters=(spec("a.b.c.weight", 2, 3, 4, 5, 6), spec("d", 1_100_000)))
    text = "; ".join(not_shown([Run().report, deep.report]))
    assert (
        "models with more than 2 tensors or 1,100,720 elements, tensors with more than 1,100,000 "
        "elements or 5 dimensions, modules nested deeper than 3" in text
    )
    worlds = [Run(case=msgspec.structs.replace(PLAIN, world=w, steps=w)).report for w in (2, 12, 4)]
    assert not_shown(worlds)[0] == "world sizes other than 2, 4, 12"
    batches = [Run(case=msgspec.structs.replace(PLAIN, batch=b)).report for b in (64, 8)]
    assert not_shown(batches)[1] == "global batch sizes other than 8, 64"
    begins = "bugs that first appear after step 2 (12 in some cases), or after the last step"
    assert begins in not_shown(worlds)
    assert "bugs that first appear after step 12, or after the last step" in not_shown(worlds[1:2])


def test_one_world_is_not_two() -> None:
    alone = Run(case=msgspec.structs.replace(PLAIN, rerun=False)).report
    assert "interleavings other than those of one world" in not_shown([alone])
    assert "interleavings other than those of two worlds" in not_shown([Run().report])


@needs("simulated")
def test_schedules_that_ran_are_orders_that_were_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of `--schedules 200` of which two did not end; the others show nothing of it."""
    usual = ScheduleRun("", "finished", results=(b"a",))
    found = ScheduleSearchResult(usual, usual, ran=200, distinct=150, late=("7", "9"))
    monkeypatch.setattr(followups, "_search", lambda *_: found)
    monkeypatch.setattr(followups, "_digests", lambda _: ("a",))
    searched = followups.with_schedule_check(
        Session(Pool(), SharedDataset(), SilentListener()), Run().report
    )
    assert searched.contents is not None
    two = "interleavings other than those of two worlds"
    assert f"{two}, and of 198 schedules of one case" in not_shown([searched, Run().report])
    assert f"{two}, and of 198 schedules of each of 2 cases" in not_shown([searched] * 2)
    assert two in not_shown([Run().report])


def test_gradients_are_named_by_their_sizes() -> None:
    runs = [Run(shown=also(sizes=sizes)).report for sizes in ((2.0, 523.0), (3e-4, 1.0), ())]
    assert "gradient magnitudes outside 0.0003 to 5.2e+02" in not_shown(runs)
    assert "gradient magnitudes outside 0.0003 to 1" in not_shown(runs[1:])
    assert "huge or denormal gradients" in not_shown(runs[2:])
    merged = merge_two_revealed_mistakes(
        also(sizes=(2.0, 3.0)), merge_two_revealed_mistakes(also(), also(sizes=(1.0, 1.0)))
    )
    assert merged.sizes == (1.0, 3.0)


def test_many_kinds_are_cut_short() -> None:
    many = Run(facts={"kinds": tuple(f"K{k:02}" for k in range(15))}).report
    assert any(text.endswith("K11 and 3 more") for text in not_shown([many]))


def test_cases_without_contents_are_not_described() -> None:
    nothing = msgspec.structs.replace(Run().report, contents=None)
    assert not_shown([nothing, Run().report]) == not_shown([Run().report])
    assert not_shown([nothing]) == not_shown([]) == ()


def test_the_page_on_what_equal_means_names_each_of_them() -> None:
    """Its list is that of the code: a feature is named there by a word that it has here."""
    page = Path("docs/what-equal-means.md").read_text()
    section = " ".join(page.partition("## Not covered by a pass")[2].split())
    words = {
        "groups": "several parameter groups", "schedule": "a learning-rate schedule",
        "alike": "two parameters of one shape", "tied_or_unused": "without a gradient on every",
        "absent_on_some": "or on some", "zero_on_some": "gradients of zero on some ranks",
        "non_finite": "infinite or NaN", "unfrozen": "unfrozen or added",
        "keeps_gradients": "set to zero in place of None", "evaluates": "evaluation",
        "complex": "complex", "eval_mode": "eval mode", "starts_apart": "start with different",
        "tied": "that two modules share", "sparse": "sparse gradients",
        "not_contiguous": "a different memory layout", "views": "views that share one storage",
        "frozen": "frozen parameters", "several_dtypes": "several dtypes", "buffers": "buffers",
        "integer_buffers": "buffers", "batch_norm": "of a different kind",
        "random_numbers": "random numbers", "unequal_shards": "uneven shards",
        "accumulation": "accumulation", "clipping": "clipping", "loss_scaling": "loss scaling",
        "resume": "a resumed run", "late_ranks": "arrival orders",
        "process_state": "--no-separate",
    }  # fmt: skip
    assert set(words) == set(_FEATURES)
    missing = [name for name, word in words.items() if not re.search(word, section, re.I)]
    assert not missing
