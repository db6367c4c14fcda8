"""What code uses, read off its source, and which of that no case has exercised."""

from pathlib import Path

import msgspec
import pytest

from distcheck.records import Adaptation, Case, CaseContents, CaseReport, Report
from distcheck.records.run_facts import UsedFeature
from distcheck.reports.brief import next_step, options_that_exercise, unexercised_features
from distcheck.training.loading import inspect_strategy
from distcheck.verification.contents import remarks_on, with_remarks


@pytest.mark.parametrize(
    ("body", "uses"),
    [
        ("if step > 100: g.half()", [("late", 100), ("several_dtypes", 0)]),
        ("if step >= WARM_UP: pass", [("late", 7)]),
        ("if g.numel() > 25 * 1024 * 1024: pass", [("size", 26214400)]),
        ("if g.numel() > 5: pass", []),
        ("if step % 50 == 0: pass", [("late", 50)]),
        ("peer = rank ^ 1", [("world", 0)]),
        ("half = world_size // 2", [("world", 0)]),
        ("g.clamp_(-1, 1)", [("huge", 0)]),
        ("g.mul_(SCALE)", [("huge", 0)]),
        ("torch.zeros(3)", [("default_dtype", 0)]),
        ("torch.zeros(3, dtype=g.dtype)", []),
        ("if torch.isfinite(g).all(): pass", [("non_finite", 0)]),
        ("dist.all_reduce(g, async_op=True)", [("async", 0)]),
        ("me.kept = [p for p in ps if p.grad is not None]", [("unfrozen", 0)]),
        ("g.add_(1)", []),
    ],
)
def test_what_code_uses(tmp_path: Path, body: str, uses: list[tuple[str, int]]) -> None:
    file = tmp_path / f"uses_{abs(hash(body))}.py"
    file.write_text(
        "import torch\nimport torch.distributed as dist\nWARM_UP, SCALE = 7, 2.0**100\n"
        f"def f(model, g, step, rank, world_size, me, ps):\n    {body}\n"
    )
    *_, found = inspect_strategy(f"{file}:f", Adaptation())
    assert [(use.feature, use.number) for use in found] == uses
    assert {use.line for use in found} <= {5}


CASE = Case(id="a", strategy="f.py:f", world=4, steps=12)
CONTENTS = CaseContents(
    worlds=1, tensors=6,
    most_elements=100, most_dimensions=2, depth=1, kinds=(), features=("several_dtypes",),
    sizes=(1e-40, 1.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("use", "option"),
    [
        (UsedFeature(feature="late", line=3, number=100), "--workload twelve_steps --steps 101"),
        (UsedFeature(feature="late", line=3, number=11), ""),
        (UsedFeature(feature="size", line=3, number=2000), "--workload over_25_mib"),
        (UsedFeature(feature="size", line=3, number=50), ""),
        (UsedFeature(feature="several_dtypes", line=3), ""),
        (UsedFeature(feature="denormal", line=3), ""),
        (UsedFeature(feature="huge", line=3), "--workload huge_gradients"),
        (UsedFeature(feature="world", line=3), "--world 2 --world 3 --world 5"),
        (UsedFeature(feature="unheard", line=3), ""),
    ],
)
def test_what_no_case_has_exercised(use: UsedFeature, option: str) -> None:
    found = list(remarks_on([(CASE, msgspec.structs.replace(CONTENTS, uses=(use,)))]))
    assert [options_that_exercise(one) for one in found] == [option] * bool(option)
    assert all("line 3" in one.evidence for one in found)


def test_a_pass_says_so_once_and_names_the_next_run() -> None:
    contents = msgspec.structs.replace(CONTENTS, uses=(UsedFeature(feature="huge", line=3),) * 2)
    case = CaseReport(
        case=CASE, strategy_file="", verdict="pass",
        outcomes=(), checks=(), contents=contents,
    )  # fmt: skip
    first, second = with_remarks([case, case])
    assert [one.cause for one in first.remarks] == ["not-exercised"]
    assert not second.remarks
    failed = msgspec.structs.replace(case, verdict="fail")
    assert not any(one.remarks for one in with_remarks([case, failed]))
    report = Report(environment={}, cases=(first, second))
    assert len(unexercised_features(report)) == 1
    assert "--workload huge_gradients    # gradients of 1e30 (line 3)" in next_step(report)
