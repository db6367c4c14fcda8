"""The probes' numbers: exact, telling, and what they become."""

import itertools
import math
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch

from distcheck.addons.backend_probe import patterns, rank
from distcheck.addons.backend_probe.command import _Episode, cell_of, plan_probes
from distcheck.addons.backend_probe.operations import OPERATIONS
from distcheck.addons.backend_probe.records import (
    BackendResults,
    Baseline,
    Probe,
    RankResult,
    exit_code_of,
)
from distcheck.addons.backend_probe.scene import FORMS, Buffer, ProbeScene, buffer_layout
from distcheck.addons.backend_probe.table import read_sweeps, render_json, render_text
from distcheck.errors import ExitCode, UsageError
from distcheck.worlds.world import World

WORLDS = range(2, patterns.MOST_RANKS + 1)
SALTS = range(8, 18)
CASES = [
    (dtype, reduction)
    for dtype in patterns.DTYPES
    for reduction in patterns.REDUCTIONS
    if patterns.is_meaningful(reduction, dtype)
]


def scene(dtype: str, reduction: str = "SUM", **about: int) -> ProbeScene:
    about = {"rank": 0, "world": 3, "rows": 4, "salt": 8, **about}
    cols = about.pop("cols", max(6, about["world"]))
    return ProbeScene(dtype=dtype, reduction=reduction, cols=cols, **about)


def tensor(values: list, dtype: str) -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype))


@pytest.mark.parametrize(("dtype", "reduction"), CASES)
def test_numbers_and_partial_results_are_exact(dtype: str, reduction: str) -> None:
    """Each survives its dtype, and so does what the first ranks make together."""
    how = "SUM" if reduction == "AVG" else reduction  # a mean is rounded; its sum is not
    for world, salt in itertools.product(WORLDS, SALTS):
        about = scene(dtype, reduction, world=world, salt=salt)
        vectors = [about.part(rank) for rank in range(world)]
        for ranks in range(1, world + 1):
            columns = zip(*vectors[:ranks], strict=True)
            partial = [patterns.reduce_values(how, column) for column in columns]
            assert tensor(partial, dtype).tolist() == partial
        for vector in vectors:
            assert tensor(vector, dtype).tolist() == vector


@pytest.mark.parametrize(("dtype", "reduction"), CASES)
def test_every_slip_changes_the_result(dtype: str, reduction: str) -> None:
    """A rank left out, or taken twice for another; the last call's result; a shift by one."""
    for world, salt in itertools.product(WORLDS, SALTS):
        about = scene(dtype, reduction, world=world, salt=salt)
        expected = about.reduced()
        vectors = [about.part(rank) for rank in range(world)]
        for left_out, twice in itertools.product(range(world), range(world)):
            others = [v for rank, v in enumerate(vectors) if rank != left_out]
            if twice != left_out:
                others.append(vectors[twice])
            slipped = [patterns.reduce_values(reduction, c) for c in zip(*others, strict=True)]
            assert slipped != expected
        assert scene(dtype, reduction, world=world, salt=salt + 1).reduced() != expected
        assert expected[1:] + expected[:1] != expected
        assert patterns.UNTOUCHED not in expected or dtype == "bool"
        assert all(vector != expected for vector in vectors), "untouched in place is seen"


@pytest.mark.parametrize("dtype", patterns.DTYPES)
def test_no_two_parts_are_alike(dtype: str) -> None:
    """A rank's part, or one destination's, is never taken for another's."""
    for world, salt in itertools.product(WORLDS, SALTS):
        about = scene(dtype, world=world, salt=salt)
        parts = [tuple(about.part(r, p)) for r in range(world) for p in range(world)]
        assert len(set(parts)) == len(parts)


@pytest.mark.parametrize(
    ("dtype", "narrower"),
    [("float32", "float16"), ("float32", "bfloat16"), ("float64", "float32"),
     ("float16", "bfloat16"), ("int32", "float32"), ("int64", "float64"), ("int64", "int32"),
     ("complex64", "bfloat16")],
)  # fmt: skip
@pytest.mark.parametrize("reduction", ["SUM", "PRODUCT", "MIN"])
def test_a_narrower_dtype_loses_bits(dtype: str, narrower: str, reduction: str) -> None:
    if not patterns.is_meaningful(reduction, dtype):
        return
    if dtype == "float16" and reduction != "SUM":
        return  # three bits more than bfloat16 has: only sums make use of them
    for world in WORLDS:
        values = scene(dtype, reduction, world=world).reduced()
        reals = [v.real if isinstance(v, complex) else v for v in values]
        through = tensor(values, dtype)
        through = through.real if through.is_complex() else through
        lossy = through.to(getattr(torch, narrower)).to(through.dtype)
        assert lossy.tolist() != reals


def test_the_mean_bound_takes_both_ways_of_dividing_and_no_other_divisor() -> None:
    for dtype, world in itertools.product(("float32", "bfloat16", "float16"), WORLDS):
        about = scene(dtype, "AVG", world=world)
        kind = getattr(torch, dtype)
        parts = [tensor(about.part(rank), dtype) for rank in range(world)]
        reciprocal = tensor([1 / world], dtype)
        first = torch.zeros(about.count, dtype=kind)
        last = torch.zeros(about.count, dtype=kind)
        for part in parts:
            first = first + part * reciprocal
            last = last + part
        for actual in (first.tolist(), (last / world).tolist()):
            for a, e in zip(actual, about.reduced(), strict=True):
                assert abs(a - e) <= patterns.mean_bound(dtype, e, world)
        for divisor in (1, world - 1, world + 1):
            wrong = (last / max(divisor, 1)).tolist()
            if divisor != world:
                assert any(
                    abs(a - e) > patterns.mean_bound(dtype, e, world)
                    for a, e in zip(wrong, about.reduced(), strict=True)
                )


@pytest.mark.parametrize("form", ["plain", "strided", "transposed"])
@pytest.mark.parametrize(("rows", "cols"), [(4, 6), (1, 1), (0, 6), (3, 2)])
def test_a_layout_is_the_view_that_torch_makes_of_it(form: str, rows: int, cols: int) -> None:
    layout = buffer_layout(form, rows, cols)
    values = list(range(1, rows * cols + 1))
    storage = torch.tensor(layout.place(values, [0] * layout.size))
    view = storage.as_strided(layout.shape, layout.strides, layout.offset)
    assert view.flatten().tolist() == values
    assert int((storage != 0).sum()) == rows * cols
    if (rows, cols) in ((4, 6), (3, 2)):
        assert view.is_contiguous() == (form == "plain")
        dense = torch.ops.aten.is_non_overlapping_and_dense(view)
        assert bool(dense) == (form != "strided")


def differ(actual: list, dtype: str = "float32", after: list | None = None) -> str:
    layout = buffer_layout("plain", 1, 3)
    buffer = Buffer(1, None, after)
    before = rank.storage_before_call(Buffer(1, None, after or [1, 2, 3]), layout, dtype)
    stored = list(before)
    stored[layout.offset : layout.offset + 3] = actual[:3]
    if len(actual) > 3:
        stored[layout.offset + 3] = actual[3]
    return rank.find_difference(
        actual=stored, buffer=buffer, layout=layout, scene=scene(dtype), before=before
    )


def test_differences_in_words() -> None:
    assert differ([1.0, 2.0, 3.0], after=[1, 2, 3]) == ""
    assert differ([1.0, 5.0, 3.0], after=[1, 2, 3]) == (
        "[0,1] is 5, expected 2; 1 of 3 elements differ"
    )
    assert differ([251.0, 251.0, 3.0], after=[1, 2, 3]).endswith(
        "2 of 3 elements differ, all unchanged by the call"
    )
    assert differ([1.0, 2.0, 3.0, 0.0], after=[1, 2, 3]) == ("1 elements outside it were written")
    assert differ([math.nan, 2.0, 3.0], after=[1, 2, 3]).startswith("[0,0] is nan, expected 1")
    assert differ([7.0, 7.0, 7.0]) == "", "undefined inside"
    assert differ([7.0, 7.0, 7.0, 0.0]) == "1 elements outside it were written"


PROBE = Probe(operation="all_reduce", reduction="SUM", form="plain", dtype="float32", salt=1)


def results(*statuses: str) -> dict[int, RankResult]:
    return {
        rank: RankResult(index=0, status=s, detail="" if s in ("right", "absent") else s)  # type: ignore[arg-type]
        for rank, s in enumerate(statuses)
    }


@pytest.mark.parametrize(
    ("statuses", "verdict", "detail"),
    [
        (("right", "right", "right"), "right", ""),
        (("absent", "right", "right"), "right", ""),
        (("refused", "refused", "refused"), "refused", "refused"),
        (("absent", "refused", "refused"), "refused", "refused"),
        (("right", "right", "wrong"), "wrong", "rank 2, wrong"),
        (("refused", "right", "right"), "wrong", "rank 0, refused (only rank 0 refused)"),
        (("refused", "wrong", "right"), "wrong", "rank 1, wrong (only rank 0 refused)"),
        (("absent", "absent", "absent"), "wrong", ""),
    ],
)
def test_a_cell_joins_all_ranks(statuses: tuple[str, ...], verdict: str, detail: str) -> None:
    cell = cell_of(PROBE, results(*statuses))
    assert (cell.verdict, cell.detail) == (verdict, detail)


def swept(*verdicts: str, **about: object) -> BackendResults:
    cells = [
        Probe(operation="reduce", reduction="SUM", form=form, dtype="bool", salt=1).ended(
            verdict,  # type: ignore[arg-type]
            "",
        )
        for form, verdict in zip(FORMS, verdicts, strict=False)
    ]
    found = {"missing": "", "failure": "", "environment": {}, **about}
    return BackendResults(backend="gloo", device="cpu", world=3, cells=tuple(cells), **found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdicts", "before", "code"),
    [
        (["right", "refused"], None, ExitCode.PASS),
        (["right", "wrong", "hangs"], None, ExitCode.MISMATCH),
        (["right", "hangs"], None, ExitCode.RANK_FAILED),
        (["right", "crashes"], None, ExitCode.RANK_FAILED),
        (["right", "not tried"], None, ExitCode.RANK_FAILED),
        (["refused", "refused"], None, ExitCode.UNKNOWN),
        ([], None, ExitCode.UNKNOWN),
        (["right", "wrong"], ["right", "wrong"], ExitCode.PASS),
        (["right", "refused"], ["right", "right"], ExitCode.MISMATCH),
        (["right", "refused"], ["right", "wrong"], ExitCode.PASS),
        (["right", "wrong"], ["right", "crashes"], ExitCode.MISMATCH),
        (["right", "hangs"], ["right", "wrong"], ExitCode.RANK_FAILED),
        (["right", "wrong"], ["right"], ExitCode.MISMATCH),
        (["right", "right"], ["right", "wrong"], ExitCode.PASS),
    ],
)
def test_exit_codes(verdicts: list[str], before: list[str] | None, code: ExitCode) -> None:
    baseline = None if before is None else Baseline([swept(*before)])
    assert exit_code_of([swept(*verdicts)], baseline, asked=True) is code


def test_a_backend_that_is_missing_counts_where_it_was_asked_for() -> None:
    sweeps = [swept("right"), swept(missing="no")]
    assert exit_code_of(sweeps, asked=True) is ExitCode.CANNOT_RUN
    assert exit_code_of(sweeps, asked=False) is ExitCode.PASS
    assert exit_code_of([swept(failure="died")], asked=True) is ExitCode.RANK_FAILED


def test_a_document_is_read_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    sweeps = [swept("right", "wrong", "refused", environment={"torch": "2.13"})]
    file = tmp_path / "gloo.json"
    file.write_text(render_json(sweeps, [], ExitCode.MISMATCH))
    again = read_sweeps(file)
    assert Baseline(again).changes(sweeps) == []
    assert [c.verdict for c in again[0].cells] == ["right", "wrong", "refused"]
    for content, said in (("{}", "was not written by"), ("[", "was not written by")):
        file.write_text(content)
        with pytest.raises(UsageError, match=said):
            read_sweeps(file)
    file.write_text(render_json(sweeps, [], ExitCode.PASS).replace("backends/1", "report/1"))
    with pytest.raises(UsageError, match=r"distcheck\.report/1"):
        read_sweeps(file)


def test_the_plan_holds_every_operation_form_and_dtype_once() -> None:
    probes = plan_probes(world=3, operations=[], dtypes=[], forms=[])
    names = [probe.name for probe in probes]
    assert len(set(names)) == len(names) > 1900
    assert {probe.operation for probe in probes} == set(OPERATIONS)
    assert {probe.form for probe in probes} == set(FORMS)
    assert {probe.dtype for probe in probes} == {*patterns.DTYPES, ""}
    assert not [p for p in plan_probes(world=2, operations=[], dtypes=[], forms=[])
                if p.form == "sub-group"]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"world": 1}, "2 to 8 ranks"),
        ({"world": 9}, "2 to 8 ranks"),
        ({"operations": ["all_redoce"]},
         r"unknown --op 'all_redoce' \(did you mean all_reduce\?\); known are send_recv"),
        ({"dtypes": ["float"]}, "unknown --dtype 'float'"),
        ({"forms": ["sideways"]}, "unknown --form 'sideways'"),
        ({"operations": ["send_recv"], "forms": ["async"]}, "select nothing"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be(asked: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_probes(**{"world": 3, "operations": [], "dtypes": [], "forms": [], **asked})


def test_the_table_fits_80_columns_without_color() -> None:
    verdicts = ["right", "refused", "wrong", "crashes", "hangs", "not tried"]
    probes = plan_probes(world=3, operations=[], dtypes=[], forms=[])
    cells = [
        probe.ended(verdicts[number % 6], "why")  # type: ignore[arg-type]
        for number, probe in enumerate(probes)
    ]
    sweep = msgspec.structs.replace(swept(), cells=tuple(cells))
    text = render_text(sweep, width=80)
    table = text.partition("runs, but gives wrong results")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 80
    assert all(word in text for word in ("ok", "no", "BAD", "DIED", "HUNG", "?"))
    assert "\x1b" not in text


@pytest.mark.parametrize("hung", [False, True])
def test_what_a_rank_says_while_its_peers_are_killed_is_not_counted(hung: bool) -> None:
    """It has lost a peer then; before that, the same words are its own."""
    episode = _Episode([PROBE], 0, 1, lambda finished: None)
    world = cast(World, SimpleNamespace(hung=hung))
    said = RankResult(index=0, status="refused", detail="RuntimeError: Connection closed by peer")
    episode._record_result(world, 0, msgspec.msgpack.encode(said))
    assert [cell.verdict for cell in episode.cells] == ([] if hung else ["refused"])
