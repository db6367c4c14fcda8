"""The ledger of collectives: every collective of one training step, and the bytes that it needs.

`verify`, `job` and `guard` fill the same `Ledger` from torch's flight recorder
(`worlds/ledger.py`), and every report shows it through `table_of` and `Ledger.in_words`.

Derived: each gradient element must enter one reduction, so the minimum of a step is the bytes of
the gradients, once. Bytes are those of a call's buffers. On the wire, a ring all-reduce over n
ranks sends 2 (n - 1) / n times these bytes per rank, a reduce-scatter or an all-gather (n - 1) / n
times (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).
"""

from pathlib import Path

import msgspec

from distcheck.records.decoding import Count

FSDP = "FSDP"
HEADS = ("operation", "group", "dtype", "calls", "bytes", "line")
_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The equal calls of one rank in one step.

    group    its name, and `ranks` the number of its ranks
    bytes    of all calls: the larger of input and output
    place    innermost line of the code under test, as FILE:LINE; "" if there is none
    library  "FSDP" if torch's FSDP made the calls itself; "backward" if C++ code did in a backward
             pass, as in DistributedDataParallel
    """

    operation: str
    group: str
    ranks: Count
    dtype: str
    calls: Count
    bytes: Count
    place: str = ""
    library: str = ""

    @property
    def is_reduction(self) -> bool:
        """True if the calls reduce floating-point numbers."""
        return "reduce" in self.operation and "float" in self.dtype

    @property
    def elements(self) -> int:
        return self.bytes // dtype_bytes(self.dtype)


class Ledger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The collectives of rank 0 in one step, the largest first.

    gradients       number of elements of all trained parameters
    gradient_bytes  their bytes: the minimum that a step reduces
    policy          the reduction dtype that every FSDP module of the model is given; "" if unknown
    twice           gradients that the same ranks reduced twice: name, and the lines of both calls
    left_out        True if the flight recorder no longer had the earlier calls of the step
    """

    step: Count
    rows: tuple[LedgerRow, ...] = ()
    gradients: Count = 0
    gradient_bytes: Count = 0
    policy: str = ""
    twice: tuple[tuple[str, str, str], ...] = ()
    left_out: bool = False

    @property
    def reduced(self) -> int:
        """The bytes that enter a reduction."""
        return sum(row.bytes for row in self.rows if row.is_reduction)

    def in_words(self) -> str:
        """Return the totals of the step, and their relation to the minimum."""
        calls, total = sum(row.calls for row in self.rows), sum(row.bytes for row in self.rows)
        text = f"step {self.step}: {calls} collective{'s' * (calls != 1)} of {_shown_bytes(total)}"
        if self.reduced and self.gradient_bytes:
            text += (
                f"; {_shown_bytes(self.reduced)} are reduced, "
                f"{self.reduced / self.gradient_bytes:.3g}x the bytes of the gradients"
            )
        return text + "; earlier collectives of the step are not known" * self.left_out

    def too_short(self) -> list[LedgerRow]:
        """Return FSDP's own reductions in a lower precision than its policy requests."""
        least = dtype_bytes(self.policy) if self.policy else 0
        return [
            row
            for row in self.rows
            if row.library == FSDP and row.is_reduction and dtype_bytes(row.dtype) < least
        ]


def relative(ledger: Ledger) -> Ledger:
    """Return the ledger with lines relative to this folder, where possible."""
    try:
        here = f"{Path.cwd()}/"
    except FileNotFoundError:  # the folder is gone, and so are files in it
        return ledger
    rows = [msgspec.structs.replace(row, place=row.place.removeprefix(here)) for row in ledger.rows]
    twice = [(name, *(one.removeprefix(here) for one in lines)) for name, *lines in ledger.twice]
    return msgspec.structs.replace(ledger, rows=tuple(rows), twice=tuple(twice))


def dtype_bytes(name: str) -> int:
    return _BYTES.get(name, 1)


def table_of(ledger: Ledger) -> list[list[str]]:
    """Return the ledger's rows as text, below `HEADS`."""
    return [
        [
            row.operation, f"{row.group} ({row.ranks})", row.dtype, str(row.calls),
            _shown_bytes(row.bytes), row.place or (f"({row.library})" if row.library else "-"),
        ]
        for row in ledger.rows
    ]  # fmt: skip


def _shown_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
