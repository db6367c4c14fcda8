"""The shape of a document, `distcheck.report/1`: what its readers rely on.

A key that is unknown here is passed on as it is. Numbers have bounds, so that no reader counts to
what a damaged file says.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from distcheck.errors import UsageError
from distcheck.records import (
    Allowance,
    Contents,
    Diagnosis,
    Origin,
    RunPlan,
    SinceGreen,
    VerdictName,
)
from distcheck.records.ends import RankEnd
from distcheck.records.searches import Explored

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Share = Annotated[str, Meta(max_length=1 << 20)]
Number = float | Annotated[str, Meta(pattern=r"^(nan|inf|-inf)$")]


class _Call(msgspec.Struct):
    number: Int
    name: str
    shapes: str
    group: str = ""
    point_to_point: bool = False
    finished: bool = True
    place: str = ""


class OutcomeRead(msgspec.Struct):
    """How a rank ended."""

    rank: Count
    outcome: RankEnd
    detail: str
    lost_peer: bool = False
    proven: str = ""
    why: str = ""
    sizes_differ: bool = False
    collectives: list[_Call] = []


class _Compared(msgspec.Struct):
    tensors: Count
    elements: Count
    ranks: Count
    steps: Count


class PlaceRead(msgspec.Struct):
    """Where values differ most, or first."""

    parameter: str
    rank: Int
    step: Int
    index: list[Int]
    actual: Number
    expected: Number
    error: Number
    bound: Number
    ulp: Int | None = None
    unit: str = "absolute"
    actual_bits: str = ""
    expected_bits: str = ""


class _Element(msgspec.Struct):
    parameter: str
    step: Int
    index: list[Int]
    ranks: list[Int]
    actual: Number
    expected: Number
    actual_bits: str
    expected_bits: str
    error: Number
    bound: Number
    ulp: Int | None


class _Map(msgspec.Struct):
    kind: str
    parameters: list[str]
    steps: list[Int]
    rows: list[Share]
    parameters_per_row: Count
    steps_per_column: Count


class _Histogram(msgspec.Struct):
    bins: dict[Annotated[str, Meta(pattern=r"^-?\d{1,3}$")], Count]
    nonfinite: Count = 0


class _Losses(msgspec.Struct):
    steps: list[Int]
    ranks: list[list[Number]]
    mean: list[Number]
    expected: list[Number]
    bound: list[Number]


class _Digests(msgspec.Struct):
    steps: list[Int]
    ranks: Annotated[int, Meta(ge=0, le=1 << 20)]
    kinds: dict[str, list[str]]


class CheckRead(msgspec.Struct):
    """What a check found."""

    check: str
    layer: str
    verdict: VerdictName
    compared: _Compared
    reason: str
    worst: PlaceRead | None = None
    first: PlaceRead | None = None
    sensitivity: dict[str, Any] | None = None
    defect: str = ""
    map: _Map | None = None
    ulp: _Histogram | None = None
    elements: list[_Element] = []
    loss: _Losses | None = None
    digests: _Digests | None = None


class CaseRead(msgspec.Struct):
    """What readers rely on; other keys are passed on as they are."""

    id: str
    strategy: str
    strategy_file: str
    world: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    backend: str
    device: str
    dtype: str
    workload: str
    seed: Int
    verdict: VerdictName
    outcomes: list[OutcomeRead]
    checks: list[CheckRead]
    diagnosis: list[Diagnosis]
    timings_s: dict[str, float]
    replay: str
    notes: list[str]
    remarks: list[Diagnosis] = []
    batch: Count = 0
    steps: Count = 0
    data: str = ""
    strategy_line: Count = 0
    command: str = ""
    accepted: Allowance | None = None
    contents: Contents | None = None


class _Part(msgspec.Struct):
    file: str
    shard: Count
    exit_code: Count
    environment: dict[str, Any]
    made: Origin | None = None


class DocumentRead(msgspec.Struct):
    """A whole report."""

    verdict: VerdictName
    exit_code: Count
    environment: dict[str, Any]
    cases: list[CaseRead]
    since_green: SinceGreen | None = None
    plan: RunPlan | None = None
    left_out: dict[str, str] = {}
    not_shown: list[str] = []
    parts: list[_Part] = []
    made: Origin | None = None
    explored: list[Explored] = []
    totals: dict[str, Count] | None = None


def check_shape(document: dict[str, Any], path: Path | str) -> DocumentRead:
    """The document, read from `path`, in its form. Raises UsageError where it lacks what every
    report has, or has it in another form.
    """
    try:
        return msgspec.convert(document, DocumentRead)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}; write the report again") from error
