"""What is run once more, and what does not count: from reports alone."""

from typing import Any

import msgspec
import pytest

from distcheck.records import Case, CaseReport, Diagnosis, Outcome
from distcheck.verification.followups import (
    amend_report,
    failure_stands,
    follow_ups,
    leave_out_cases,
)
from tests.optional import needs

FINISHED = (Outcome(rank=0, outcome="finished"),)
ERROR = "IndexError: slice() of a 0-dim tensor."
CRASHED = (Outcome(rank=0, outcome="raised", step=0, phase="sync", error=ERROR),)
BY_DTYPE = "RuntimeError: expected scalar type Float, not Double"
KILLED = (
    Outcome(rank=0, outcome="killed", ended_by="killed by SIGKILL"),
    Outcome(rank=1, outcome="raised", error=BY_DTYPE),
)
HUNG = (Outcome(rank=0, outcome="hung", text="in sync"),)


def report(workload: str, dtype: str = "float32", verdict: str = "pass", **said: Any) -> CaseReport:
    layers = {"exact": ("exact",), "float64": ("full batch float64",)}
    about = {
        "layers": layers.get(workload)
        or layers.get(dtype)
        or ("bitwise", "rounding", "full batch float32"),
        **{name: said.pop(name) for name in ("batch", "world", "strategy") if name in said},
    }
    case = Case(**{
        "id": f"{workload}-{dtype}", "strategy": "s", "world": 3, "workload": workload,
        "dtype": dtype, **about,
    })  # fmt: skip
    given = {"outcomes": FINISHED, "checks": (), "strategy_file": "s.py", **said}
    return CaseReport(case=case, verdict=verdict, **given)  # type: ignore[arg-type]


def caused(*causes: str) -> tuple[Diagnosis, ...]:
    return tuple(Diagnosis(cause=c, evidence="seen", suggestion="do it") for c in causes)


CRASHES = {"verdict": "fail", "outcomes": CRASHED}
TYPED = {"verdict": "fail", "outcomes": (Outcome(rank=0, outcome="raised", error=BY_DTYPE),)}
DIES = {"verdict": "fail", "outcomes": KILLED}
STOPS = {
    "verdict": "fail",
    "outcomes": (
        Outcome(rank=0, outcome="hung", silence="stopped", ended_by="stopped (state T), as ..."),
    ),
}
LEAVES = {"verdict": "fail", "outcomes": (Outcome(rank=0, outcome="exited", error=BY_DTYPE),)}
SHORT = {"verdict": "fail", "rounded_to": "float32"}


@pytest.mark.parametrize(
    ("of_cnn", "of_exact", "of_double", "is_left_out"),
    [
        ({}, {}, SHORT, True),
        ({}, {}, TYPED, True),
        # All in float32 has to pass; a crash that float32 does not have is the dtype's anyway.
        ({"verdict": "fail"}, {}, SHORT, False),
        ({}, {"verdict": "unknown"}, SHORT, False),
        ({"verdict": "fail"}, {}, TYPED, True),
        # Not where it crashes in float32, hangs, is killed, or is wrong by anything else.
        (TYPED, {}, TYPED, False),
        ({}, {}, CRASHES, False),
        ({}, {}, DIES, False),
        ({}, {}, LEAVES, False),
        ({}, {}, {**DIES, **SHORT}, False),
        ({}, {}, {**TYPED, **SHORT}, True),
        ({}, {}, {"verdict": "fail", "outcomes": HUNG}, False),
        ({}, {}, {"verdict": "fail"}, False),
        ({}, {}, {"verdict": "fail", "rounded_to": "bfloat16"}, False),
        ({}, {}, {}, False),
        ({}, {}, {"verdict": "unknown"}, False),
    ],
    ids=str,
)
def test_a_float64_case_that_does_not_count(
    of_cnn: dict[str, Any], of_exact: dict[str, Any], of_double: dict[str, Any], is_left_out: bool
) -> None:
    reports = [
        report("exact", **of_exact),
        report("cnn", **of_cnn),
        report("cnn", "float64", **of_double),
    ]
    kept, out = leave_out_cases(reports)
    assert set(out) == ({"cnn-float64"} if is_left_out else set())
    assert len(kept) == 3 - is_left_out
    said = [any("pass --dtype float64 to judge it" in note for note in r.notes) for r in kept]
    assert said == [is_left_out] * len(kept)


def test_a_float64_case_that_was_asked_for_counts() -> None:
    double = report("cnn", "float64", **SHORT)
    case = msgspec.structs.replace(
        double.case, layers=("bitwise", "rounding", "full batch float64")
    )
    asked = msgspec.structs.replace(double, case=case)
    assert leave_out_cases([report("cnn"), asked])[1] == {}


def test_cases_of_other_code_decide_nothing() -> None:
    reports = [report("cnn", strategy="other"), report("cnn", "float64", **SHORT)]
    assert leave_out_cases(reports)[1] == {}


@pytest.mark.parametrize(
    ("of_exact", "of_cnn", "again"),
    [
        (CRASHES, {}, True),
        (CRASHES, {"verdict": "fail"}, True),
        (CRASHES, CRASHES, False),
        ({"verdict": "fail", "outcomes": HUNG}, {}, False),
        (DIES, {}, False),
        ({"verdict": "fail"}, {}, False),
    ],
    ids=str,
)
def test_without_a_scalar(of_exact: dict[str, Any], of_cnn: dict[str, Any], again: bool) -> None:
    reports = [report("exact", **of_exact), report("cnn", **of_cnn)]
    found = follow_ups(reports)
    assert [f.case.workload for f in found] == ["exact:no-scalar"] * again
    assert [f.case.id for f in found] == ["exact-float32"] * again


@pytest.mark.parametrize("finishes", ["no-scalar", "no-volume"])
def test_composite_runs_again_as_well_and_each_in_its_own_place(finishes: str) -> None:
    """The default run's cases: each that crashed has its own follow-ups."""
    reports = [
        report("exact", **CRASHES), report("cnn"), report("composite", **CRASHES),
        report("composite", "float64", **CRASHES),
    ]  # fmt: skip
    found = follow_ups(reports)
    assert [f.case.workload for f in found] == [
        "exact:no-scalar",
        *["composite:no-scalar", "composite:no-volume"] * 2,
    ]
    ends = [
        TYPED if n > 2 else {} if f.case.workload.endswith(finishes) else CRASHES
        for n, f in enumerate(found)
    ]
    ends[0] = {}
    done = [
        msgspec.structs.replace(report("cnn", **end), case=f.case)
        for f, end in zip(found, ends, strict=True)
    ]
    taken = amend_report(reports, list(zip(found, done, strict=True)))
    assert [r.case.workload for r in taken] == [
        "exact:no-scalar", "cnn", f"composite:{finishes}", "composite:no-scalar",
    ]  # fmt: skip
    assert "the one in composite" in taken[2].notes[0]
    kept, out = leave_out_cases(
        taken
    )  # in float64 it crashes without its scalar, too: by the dtype
    assert list(out) == [reports[3].case.id]
    assert "expected scalar type Float" in out[reports[3].case.id]
    assert [r.verdict for r in kept] == ["pass"] * 3


def test_its_report_takes_the_first_ones_place_and_says_so() -> None:
    reports = [report("exact", **CRASHES), report("cnn")]
    (follow_up,) = follow_ups(reports)
    done = msgspec.structs.replace(report("exact"), case=follow_up.case)
    first, second = amend_report(reports, [(follow_up, done)])
    assert (first.verdict, first.case.workload) == ("pass", "exact:no-scalar")
    (note,) = first.notes
    assert "(IndexError: slice() of a 0-dim tensor.)" in note
    assert "pass --workload exact to judge it" in note
    assert second == reports[1]
    wrong = msgspec.structs.replace(done, verdict="fail")
    assert amend_report(reports, [(follow_up, wrong)])[0].verdict == "fail"
    crashed = msgspec.structs.replace(done, **CRASHES)
    assert amend_report(reports, [(follow_up, crashed)]) == reports


def test_exact_counts_if_it_was_requested_by_itself() -> None:
    assert follow_ups([report("exact", **CRASHES)]) == []


@pytest.mark.parametrize(
    ("said", "batches"),
    [
        ({"batch": 256}, [255]),
        ({"batch": 255}, []),
        ({"batch": 256, "world": 4}, []),
        ({"batch": 256, "diagnosis": caused("missing-sync")}, []),
    ],
    ids=str,
)
def test_unequal_shards_call_for_equal_ones(said: dict[str, Any], batches: list[int]) -> None:
    said = {"verdict": "fail", "diagnosis": caused("unweighted-mean"), **said}
    reports = [report("exact", **said), report("cnn", **said), report("mlp", **said)]
    found = follow_ups(reports)
    assert [f.case.batch for f in found] == batches
    assert [f.case.workload for f in found] == ["cnn"] * len(batches), "one will do"


@pytest.mark.parametrize(
    ("done", "said"),
    [
        ({}, ""),
        ({"verdict": "fail", "diagnosis": caused("missing-division")},
         "cnn float32 does not pass there either (missing-division)"),
    ],
)  # fmt: skip
def test_a_suggestion_says_what_passes_with_equal_shards(done: dict[str, Any], said: str) -> None:
    causes = caused("unweighted-mean", "missing-division")
    reports = [report("cnn", verdict="fail", diagnosis=causes, batch=256)]
    (follow_up,) = follow_ups(reports)
    (found,) = amend_report(reports, [(follow_up, report("cnn", **done))])
    assert found.verdict == "fail", "it stays wrong"
    unweighted = found.diagnosis[0]
    if said:
        assert unweighted.evidence == "seen"
        assert unweighted.suggestion.startswith("do it; with --batch 255 all shards are equal: ")
        assert unweighted.suggestion.endswith(said)
    else:  # which is said first
        assert unweighted.evidence == (
            "correct if all ranks have equally many samples (cnn float32 passes with --batch "
            "255), but not with these shards: seen"
        )
        assert unweighted.suggestion == "do it, as with --batch 255, a multiple of 3"
    assert found.diagnosis[1] == causes[1]


def test_what_equal_shards_explain_is_named_where_nothing_else_is() -> None:
    """Weights that are off hide on how many ranks the rest is right."""
    reports = [report("cnn", verdict="fail", diagnosis=caused("unexplained"), batch=256)]
    (follow_up,) = [one for one in follow_ups(reports) if one.kind == "equal shards"]
    done = report("cnn", verdict="fail", diagnosis=caused("single-rank-gradient"))
    (found,) = amend_report(reports, [(follow_up, done)])
    assert [one.cause for one in found.diagnosis] == ["single-rank-gradient"]
    assert found.diagnosis[0].evidence == "with --batch 255, which makes all shards equal: seen"
    (found,) = amend_report(reports, [(follow_up, report("cnn"))])
    assert [one.cause for one in found.diagnosis] == ["unexplained"]


IN_FLIGHT = caused("tensor-used-in-flight", "crash")


@pytest.mark.parametrize(
    ("causes", "done", "expected"),
    [
        (("partial-sync", "missing-sync"), IN_FLIGHT, ["tensor-used-in-flight"]),
        (("wrong-divisor", "nondeterministic"), IN_FLIGHT,
         ["tensor-used-in-flight", "wrong-divisor"]),
        (("nonfinite",), IN_FLIGHT, ["tensor-used-in-flight"]),
        (("hang",), IN_FLIGHT, ["tensor-used-in-flight"]),
        (("partial-sync",), caused("crash"), ["partial-sync"]),
        (("partial-sync",), (), ["partial-sync"]),
    ],
)  # fmt: skip
@needs("simulated")
def test_what_may_be_a_race_is_looked_at_in_a_simulated_world(
    causes: tuple[str, ...], done: tuple[Diagnosis, ...], expected: list[str]
) -> None:
    """Once for a strategy in a world; there every use of a tensor in flight is seen."""
    failed = report("cnn", verdict="fail", diagnosis=caused(*causes))
    also = report("composite", verdict="fail", diagnosis=caused("unexplained"))
    (follow_up,) = [one for one in follow_ups([failed, also]) if one.kind == "in flight"]
    assert (follow_up.case.backend, follow_up.case.rerun) == ("simulated", False)
    assert follow_up.case.workload == "cnn"
    stopped = CaseReport(
        case=follow_up.case, verdict="fail", diagnosis=done, outcomes=(), checks=(),
        strategy_file="s.py",
    )  # fmt: skip
    found, other = amend_report([failed, also], [(follow_up, stopped)])
    assert [one.cause for one in found.diagnosis] == expected
    named = expected != [*causes]
    assert any("failure may be the result of a race" in n for n in found.notes) is named
    assert [one.cause for one in other.diagnosis] == [expected[0] if named else "unexplained"]


@pytest.mark.parametrize(
    "said",
    [
        {"diagnosis": caused("missing-sync")},
        {"diagnosis": caused("partial-sync"), **CRASHES},
        {"diagnosis": ()},
    ],
)
def test_what_is_no_race_is_not(said: dict[str, Any]) -> None:
    given = {"verdict": "fail", **said}
    assert not [f for f in follow_ups([report("cnn", **given)]) if f.kind == "in flight"]


def test_no_follow_up_for_what_is_right() -> None:
    assert follow_ups([report("exact"), report("cnn"), report("cnn", "float64")]) == []


LOUD = {"verdict": "fail", "outcomes": CRASHED}


def absent(*, rerun: bool = False, **said: Any) -> CaseReport:
    found = report("absent_on_some", **said)
    return msgspec.structs.replace(found, case=msgspec.structs.replace(found.case, rerun=rerun))


MISMATCH = "at call 7, rank 2 called another"
ABORTED = (Outcome(rank=0, outcome="killed", proven="mismatch", why=MISMATCH),)  # by gloo


@pytest.mark.parametrize("ended", [DIES, LEAVES, STOPS], ids=["killed", "left", "stopped"])
def test_a_rank_that_is_killed_there_counts(ended: dict[str, Any]) -> None:
    reports = [report("cnn"), absent(**ended)]
    assert leave_out_cases(reports) == (reports, {})


# Of calls that distcheck does not see, as those of torch's functional collectives.
UNLIKE_SIZES = (Outcome(rank=0, outcome="killed", sizes_differ=True),)


@pytest.mark.parametrize(
    "said",
    [
        *({"outcomes": ended} for ended in (CRASHED, HUNG, ABORTED, UNLIKE_SIZES)),
        {
            "diagnosis": caused("missing-sync", "single-rank-gradient")
        },  # buckets that wait for every parameter
    ],
    ids=["crashed", "hung", "aborted", "sizes", "nothing exchanged"],
)
def test_a_model_that_the_code_does_not_train_does_not_count(said: dict[str, Any]) -> None:
    reports = [report("cnn"), absent(verdict="fail", **said)]
    (kept,), out = leave_out_cases(reports)
    assert list(out) == ["absent_on_some-float32"]
    assert [note for note in kept.notes if "--workload absent_on_some to require it" in note]
    assert follow_ups(reports) == []


def test_wrong_gradients_in_it_count_and_so_does_what_was_asked_for() -> None:
    wrong = absent(verdict="fail", diagnosis=caused("missing-sync", "wrong-divisor"))
    asked = absent(rerun=True, **LOUD)
    for found in (absent(verdict="fail"), wrong, absent(verdict="unknown"), asked):
        assert leave_out_cases([report("cnn"), found]) == ([report("cnn"), found], {})
    assert leave_out_cases([absent(**LOUD)]) == ([absent(**LOUD)], {})  # nothing else was judged


def test_beside_a_failure_it_is_left_out_without_a_word() -> None:
    (kept,), out = leave_out_cases([report("cnn", verdict="fail"), absent(**LOUD)])
    assert kept.notes == ()
    assert list(out) == ["absent_on_some-float32"]


def test_it_has_no_say_in_whether_float64_counts() -> None:
    reports = [report("cnn"), report("cnn", "float64", **SHORT), absent(**LOUD)]
    assert set(leave_out_cases(reports)[1]) == {"cnn-float64", "absent_on_some-float32"}


@pytest.mark.parametrize(
    ("workload", "dtype", "said", "so"),
    [
        ("cnn", "float32", {"verdict": "fail"}, True),
        ("cnn", "float32", {}, False),
        ("cnn", "float32", {"verdict": "unknown"}, False),
        ("cnn", "float32", CRASHES, True),
        ("exact", "float32", {"verdict": "fail"}, True),
        ("exact", "float32", CRASHES, False),  # perhaps of its scalar alone
        ("cnn", "float64", SHORT, False),
    ],
)
def test_no_excuse_no_pass(workload: str, dtype: str, said: dict[str, Any], so: bool) -> None:
    assert failure_stands(report(workload, dtype, **said)) is so


def test_a_cell_that_is_not_trained_does_not_stand() -> None:
    assert not failure_stands(absent(**CRASHES))
    assert failure_stands(absent(verdict="fail"))
