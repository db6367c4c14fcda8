"""Every verdict has a backend that earns it, in exactly the cells that it should."""

from dataclasses import dataclass

import pytest

from distcheck.addons.backend_probe.command import plan_probes, run_probes
from distcheck.addons.backend_probe.records import ProbedCell
from distcheck.worlds.pool import Pool

R, B, N, D, H, Q = "right", "wrong", "refused", "crashes", "hangs", "not tried"


def probe(
    pool: Pool, backend: str, *, ops: str, forms: str = "plain", dtypes: str = "float32",
    deadline_s: float = 30.0,
) -> dict[str, ProbedCell]:  # fmt: skip
    probes = plan_probes(
        world=3, operations=ops.split(), dtypes=dtypes.split(), forms=forms.split()
    )
    cells, failure = run_probes(
        pool, probes, backend=f"tests.world.bad_backends:{backend}", device="cpu", world=3,
        deadline_s=deadline_s, on_cell=lambda done: None,
    )  # fmt: skip
    assert not failure
    assert [cell.name for cell in cells] == [p.name for p in probes], "a cell per probe, in order"
    return {cell.name: cell for cell in cells}


@dataclass
class Bad:
    """A backend, what is asked of it, the cells that are not right, and a word of the reason."""

    backend: str
    ops: str
    cells: dict[str, str]
    said: str
    forms: str = "plain"
    dtypes: str = "float32"

    @property
    def deadline_s(self) -> float:
        """Short where something hangs."""
        return 3.0 if H in self.cells.values() else 30.0


BAD = [
    Bad("faithful", "all_reduce broadcast all_gather send_recv isend_irecv barrier",
        {}, "", forms="plain async one empty sub-group", dtypes="float32 bool"),
    Bad("drops_a_rank", "all_reduce", {"all_reduce SUM, float32": B}, "elements differ"),
    Bad("stale", "all_reduce broadcast",
        {f"all_reduce {op}, float32": B for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG")},
        "elements differ"),
    Bad("hangs_in_all_gather", "broadcast all_gather all_reduce",
        {"all_gather, float32": H}, "ranks 0, 1, 2 did not return"),
    Bad("aborts_in_reduce", "broadcast reduce all_gather",
        {"reduce SUM, float32": D, "reduce PRODUCT, float32": D, "reduce MIN, float32": D,
         "reduce MAX, float32": Q, "reduce AVG, float32": Q}, "rank 1, killed by SIGABRT"),
    Bad("leaves_in_reduce", "broadcast reduce",
        {"reduce SUM, float32": D, "reduce PRODUCT, float32": D, "reduce MIN, float32": D,
         "reduce MAX, float32": Q, "reduce AVG, float32": Q}, "rank 0, exited with code 0"),
    Bad("refuses", "broadcast all_reduce all_gather",
        {f"all_reduce {op}, float32": N for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG")},
        "RuntimeError: no all_reduce today"),
    Bad("refuses_on_one_rank", "broadcast all_gather", {"broadcast, float32": B},
        "rank 2, RuntimeError: not on rank 2 (only rank 2 refused)"),
    Bad("strands_its_peers", "broadcast all_gather", {"broadcast, float32": H},
        "ranks 0, 1 did not return; rank 2: refused, RuntimeError: not on rank 2"),
    Bad("does_nothing", "broadcast all_gather",
        {"broadcast, float32": B, "broadcast, one, float32": B, "broadcast, bool": B,
         "broadcast, one, bool": B}, "unchanged by the call",
        forms="plain one empty", dtypes="float32 bool"),
    Bad("swaps_ranks", "all_gather broadcast", {"all_gather, float32": B, "all_gather, bool": B},
        "output 0[0,0]", dtypes="float32 bool"),
    Bad("writes_outside", "all_reduce broadcast",
        {f"all_reduce {op}, float32": B for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG")},
        "tensor: 1 elements outside it were written"),
    Bad("clobbers_its_input", "all_gather broadcast", {"all_gather, float32": B},
        "input[0,0] is 0,"),
    Bad("narrow", "all_reduce broadcast",
        {f"all_reduce {op}, {d}": B for d in ("float64", "int64")
         for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG") if (op, d) != ("AVG", "int64")}
        | {"all_reduce SUM, int32": B, "all_reduce PRODUCT, int32": B, "all_reduce MIN, int32": B,
           "all_reduce MAX, int32": B},
        "elements differ", dtypes="float32 float64 bfloat16 float16 int32 int64 uint8"),
    Bad("means_too_much", "all_reduce",
        {f"all_reduce AVG, {d}": B for d in ("float32", "float64", "bfloat16", "complex64")},
        "elements differ", dtypes="float32 float64 bfloat16 complex64 uint8"),
    Bad("does_not_wait", "barrier broadcast",
        {"barrier": B, "barrier, async": B, "barrier, sub-group": B}, "left the barrier before",
        forms="plain async sub-group"),
    Bad("waits_for_the_first", "barrier broadcast", {"barrier": B}, "left the barrier before rank"),
    Bad("mistakes_ranks", "broadcast all_gather", {"broadcast, sub-group, float32": B},
        "elements differ", forms="plain sub-group"),
    Bad("does_not_wait_for_work", "all_reduce",
        {f"all_reduce {op}, async, float32": B for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG")},
        "elements differ, all unchanged by the call", forms="plain async"),
    Bad("mixes_messages", "isend_irecv broadcast", {"isend_irecv, float32": B}, "elements differ"),
    Bad("leaves_a_group_behind", "send_recv isend_irecv",
        {"send_recv, float64": N, "isend_irecv, float64": N}, "no float64",
        dtypes="float32 float64 int64 complex64"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.backend)
def test_a_bad_backend_gets_exactly_its_cells(pool: Pool, bad: Bad) -> None:
    expected = dict(bad.cells)
    if "complex64" in bad.dtypes and bad.backend == "means_too_much":
        expected["all_reduce PRODUCT, complex64"] = N  # gloo's own
    cells = probe(
        pool, bad.backend, ops=bad.ops, forms=bad.forms, dtypes=bad.dtypes,
        deadline_s=bad.deadline_s,
    )  # fmt: skip
    assert {name: c.verdict for name, c in cells.items() if c.verdict != R} == expected
    assert R in {cell.verdict for cell in cells.values()}, "the others are right, and were compared"
    if bad.cells:
        first = cells[next(iter(bad.cells))]
        assert bad.said in first.detail


def test_right_is_said_of_what_was_compared(pool: Pool) -> None:
    cells = probe(pool, "faithful", ops="all_reduce all_gather barrier", forms="plain empty")
    # Three ranks, two calls, 4 x 6 elements among 2 x 64 that nobody may touch.
    assert cells["all_reduce SUM, float32"].elements == 3 * 2 * (24 + 128)
    assert cells["all_gather, float32"].elements == 3 * 2 * 4 * (24 + 128)
    assert cells["all_gather, empty, float32"].elements == 3 * 2 * 4 * 128


def test_one_bad_cell_does_not_poison_the_next(pool: Pool) -> None:
    """More refusals than a world has groups: the sweep goes on in fresh worlds, and ends."""
    cells = probe(
        pool, "refuses", ops="all_reduce broadcast",
        forms="plain async strided transposed one empty sub-group",
        dtypes="float32 int32 bool uint8",
    )  # fmt: skip
    verdicts = {cell.operation: set() for cell in cells.values()}
    for cell in cells.values():
        if cell.form != "strided":  # gloo's own broadcast is wrong there
            verdicts[cell.operation].add(cell.verdict)
    assert verdicts == {"all_reduce": {N}, "broadcast": {R}}
    assert sum(cell.verdict == N for cell in cells.values()) > 60


def test_a_backend_that_does_not_start_is_named(pool: Pool) -> None:
    cells, failure = run_probes(
        pool, plan_probes(world=2, operations=["broadcast"], dtypes=["float32"], forms=["plain"]),
        backend="tests.world.bad_backends:fails_to_start", device="cpu", world=2, deadline_s=30.0,
        on_cell=lambda done: None,
    )  # fmt: skip
    assert cells == []
    assert "RuntimeError: no such interconnect" in failure
