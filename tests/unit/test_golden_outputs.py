"""A comparison in the formats of a report, and the recorded state that a run starts from."""

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from distcheck.compare.records import CaseComparison, RunsComparison
from distcheck.compare.screen import KnownCase, comparison_document, headline, render, render_page
from distcheck.errors import UsageError
from distcheck.recordings.differing import DifferenceCount, TraceComparison
from distcheck.records import Case, Change, Difference, Origin
from distcheck.reports import github, html_report, junit
from distcheck.training.building import load_initial
from tests.stored import compare

_ULP = 2**-25  # of float32, between 0.25 and 0.5
BEYOND = Difference(
    parameter="fc.weight", rank=1, step=2, index=(0, 3), actual=0.25 + 3 * _ULP, expected=0.25,
    error=3 * _ULP, bound=_ULP,
)  # fmt: skip
# By verdict and bits.
REASONS = {
    ("fail", "changed"): "the difference is larger than between two correct runs",
    ("pass", "changed"): "the first difference is within its bound, and both runs passed",
    ("pass", "same"): "all bits are identical",
    ("unknown", "not compared"): "golden has this case; later does not",
}
TORCH = Change(kind="software", name="torch", then="2.11.0", now="2.15.0")


def document() -> dict[str, Any]:
    found = TraceComparison(
        first=BEYOND, kind="gradients", beyond=BEYOND,
        moments=(DifferenceCount(kind="gradients", tensors=8, changed=1),),
    )  # fmt: skip
    cases = (
        CaseComparison(id="a", verdict="fail", bits="changed", reason=REASONS["fail", "changed"],
                       found=found, changes=(TORCH,)),
        CaseComparison(id="b", verdict="pass", bits="same", reason="all bits are identical"),
        CaseComparison(id="c", verdict="unknown", bits="not compared",
                       reason=REASONS["unknown", "not compared"]),
    )  # fmt: skip
    known = {
        name: KnownCase(
            Case(id=name, strategy=f"{name}.py:f", world=2, workload="mlp"),
            {"torch": "2.15.0"}, f"{name}.py", 3,
        )
        for name in "abc"
    }  # fmt: skip
    made = Origin(date="2026-01-31T12:00:00+00:00", command="distcheck compare golden")
    comparison = RunsComparison(then="golden", now="here and now", cases=cases)
    return comparison_document(comparison, known, made=made, command="distcheck compare golden")


def compared(*cases: tuple[str, str, int]) -> RunsComparison:
    """Cases by verdict, bits, and how many ULP the first difference is."""
    far = [
        msgspec.structs.replace(
            BEYOND, ulp=ulp or None, actual=0.25 + ulp * _ULP, error=ulp * _ULP, bound=2 * _ULP
        )
        for _, _, ulp in cases
    ]
    same, found = TraceComparison(), [
        TraceComparison(
            first=first, kind="gradients", drift=(0.0, 0.0, 2.1e-8),
            moments=(DifferenceCount(kind="gradients", tensors=12, changed=1),
                     DifferenceCount(kind="parameters", tensors=12, changed=1)),
        )
        for first in far
    ]  # fmt: skip
    return RunsComparison(
        then="golden", now="later",
        cases=tuple(
            CaseComparison(id=f"ddp-w{2 + i}-mlp-float32", verdict=verdict, bits=bits,
                           reason=REASONS.get((verdict, bits), ""), changes=(TORCH,),
                           found=found[i] if bits == "changed" else same)
            for i, (verdict, bits, _) in enumerate(cases)
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cases", "line"),
    [
        ([("pass", "same", 0)] * 8, "torch 2.11.0 -> 2.15.0: 8 cases, no bit changed"),
        (
            [("pass", "same", 0), ("pass", "changed", 3), ("fail", "changed", 2)],
            "torch 2.11.0 -> 2.15.0: 2 of 3 cases changed (first difference: up to 3 ULP, in "
            "fc.weight); 1 exceeds the bound",
        ),
        (
            [("pass", "changed", 0), ("unknown", "not compared", 0)],
            "torch 2.11.0 -> 2.15.0: 1 of 1 cases changed; none exceeds the bound; "
            "1 of 2 cases compared",
        ),
        ([("unknown", "not compared", 0)], "no case was compared"),
    ],
)
def test_a_comparison_begins_with_changes_and_how_much_has_changed(
    cases: list[Any], line: str
) -> None:
    assert headline(compared(*cases)) == line
    console = Console(file=io.StringIO(), width=200)
    render(compared(*cases), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith(("changed between the runs: ", "no recorded setting changed"))
    assert lines[1] == line
    bits = [one.split("bits ")[1].split(";")[0] for one in lines if "bits " in one]
    assert bits == sorted(bits, key="same".__eq__), "those that changed come first"


def test_every_format_tells_the_three_verdicts_apart() -> None:
    found = document()
    assert (found["verdict"], found["exit_code"]) == ("fail", 1)
    root = ElementTree.fromstring(junit.render(found).encode())
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("3", "1", "1")
    failed = next(root.iter("failure")).text or ""
    assert REASONS["fail", "changed"] in failed
    assert "first difference beyond its bound: step 2, fc.weight[0,3], rank 1" in failed
    assert "changed between the runs: torch was 2.11.0 and is 2.15.0" in failed
    error, warning = github.annotations(found, Path("/"))
    assert error.startswith("::error file=a.py,line=3,title=distcheck%3A fail")
    assert warning.startswith("::warning file=c.py")
    page = html_report.render(found).replace("<wbr>", "")
    assert "all bits are identical" in page
    assert "distcheck compare golden" in page


def test_a_model_begins_with_what_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "slot-000.safetensors"
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    recorded = {
        **{f"rank1/parameter/{name}": torch.full_like(p, 3.0) for name, p in
           model.named_parameters()},
        **{f"rank0/buffer/{name}": torch.full_like(b, 5) for name, b in model.named_buffers()},
    }  # fmt: skip
    save_file(recorded, file)
    load_initial(model, str(file))
    assert {float(x) for p in model.parameters() for x in p.flatten()} == {3.0}
    assert {float(x) for b in model.buffers() for x in b.flatten()} == {5.0}
    with pytest.raises(UsageError, match="does not match the model"):
        load_initial(nn.Linear(3, 2), str(file))
    with pytest.raises(UsageError, match="does not match the model: KeyError"):
        load_initial(nn.Bilinear(2, 2, 2), str(file))
    with pytest.raises(UsageError, match="does not match the model: FileNotFoundError"):
        load_initial(model, str(tmp_path / "none"))


def test_the_page_has_old_and_new_side_by_side() -> None:
    """Numbers with as many digits as tell them apart, and nothing of a name that is markup."""
    near = msgspec.structs.replace(BEYOND, expected=0.1, actual=0.1 + 2**-56, ulp=1)
    found = TraceComparison(
        first=near, kind="gradients", drift=(1e-9,),
        moments=(DifferenceCount(kind="gradients", tensors=8, changed=1),),
    )  # fmt: skip
    same, changed = (
        CaseComparison(id=f"<b>{bits}</b>", verdict="pass", bits=bits, reason="so", found=of,
                       changes=(TORCH,))
        for bits, of in (("same", TraceComparison()), ("changed", found))
    )  # fmt: skip
    comparison = RunsComparison(then="golden", now="later", cases=(same, changed))
    page = render_page(comparison, command="distcheck compare golden").replace("<wbr>", "")
    assert "<b>" not in page
    assert "1 of 2 cases changed" in page
    words = ("old: golden", "new: later", "2.11.0", "2.15.0", "b&gt;changed",
             "0.10000000000000001", "0.10000000000000002", "1 ULP", "b&gt;same")  # fmt: skip
    page = page[page.index("old: golden") :]
    places = [page.index(word) for word in words]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [80, 100])
def test_the_screen_fits(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    render(compared(("fail", "changed", 3), ("pass", "same", 0)), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    compare(f"comparison-{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
