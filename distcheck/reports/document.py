"""The document `distcheck.report/1`: written by `--json`, read again, with its JSON Schema.

docs/report.md explains every key. Unknown keys are preserved. Numbers have bounds, so that a
damaged file cannot exhaust its reader. Fields with a default may be absent in earlier reports;
UNSET fields whenever they are empty.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from distcheck.errors import UsageError
from distcheck.records import (
    Allowance,
    CallSite,
    Collective,
    Compared,
    Contents,
    Diagnosis,
    Difference,
    Number,
    Origin,
    RunPlan,
    SinceGreen,
    VerdictName,
)
from distcheck.records.decoding import Count, Int, Steps, World
from distcheck.records.exit_status import RankEnd
from distcheck.records.run_facts import ByModule, Explored

SCHEMA = "distcheck.report/1"
Entry = TypeVar("Entry", bound=msgspec.Struct)
_SHARES = Annotated[str, Meta(max_length=1 << 20)]  # a row of a map


class RankEntry(msgspec.Struct, kw_only=True):
    """The exit status of a rank."""

    rank: Count
    outcome: RankEnd
    detail: str
    lost_peer: bool | UnsetType = UNSET
    sizes_differ: bool | UnsetType = UNSET
    proven: str | UnsetType = UNSET
    why: str | UnsetType = UNSET
    collectives: list[Collective] | UnsetType = UNSET


class ElementEntry(msgspec.Struct, kw_only=True):
    """One of the worst elements."""

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


class MapEntry(msgspec.Struct, kw_only=True):
    """The relative error of each tensor at each step."""

    kind: str
    parameters: list[str]
    steps: list[Int]
    rows: list[_SHARES]
    parameters_per_row: Count
    steps_per_column: Count


class HistogramEntry(msgspec.Struct, kw_only=True):
    """Elements by their signed distance in ULP."""

    bins: dict[Annotated[str, Meta(pattern=r"^-?\d{1,3}$")], Count]
    nonfinite: Count = 0


class LossesEntry(msgspec.Struct, kw_only=True):
    """The loss of each step."""

    steps: list[Int]
    ranks: list[list[Number]]
    mean: list[Number]
    expected: list[Number]
    bound: list[Number]


class DigestsEntry(msgspec.Struct, kw_only=True):
    """Groups of ranks with equal bits."""

    steps: list[Int]
    ranks: Annotated[int, Meta(ge=0, le=1 << 20)]
    kinds: dict[str, list[str]]


class MistakeEntry(msgspec.Struct, kw_only=True):
    """The number of tensors that would have revealed a mistake, and the others' names."""

    tensors: Count
    of: Count
    not_in: list[str]


class SensitivityEntry(msgspec.Struct, kw_only=True):
    """The simplest mistakes that would have been revealed."""

    mistakes: dict[str, MistakeEntry]
    wrong_factor: dict[str, Number | None]
    no_mistake_shows_in: list[str]


class CheckEntry(msgspec.Struct, kw_only=True):
    """The result of a check, by one layer."""

    check: str
    layer: str
    verdict: VerdictName
    compared: Compared
    worst: Difference | None = None
    first: Difference | None = None
    reason: str
    defect: str | UnsetType = UNSET
    sensitivity: SensitivityEntry | UnsetType = UNSET
    map: MapEntry | UnsetType = UNSET
    ulp: HistogramEntry | UnsetType = UNSET
    elements: list[ElementEntry] | UnsetType = UNSET
    loss: LossesEntry | UnsetType = UNSET
    digests: DigestsEntry | UnsetType = UNSET


class CaseEntry(msgspec.Struct, kw_only=True):
    """A case: its request, the exit status of its ranks, and every check."""

    id: str
    strategy: str
    strategy_file: str
    strategy_line: Count = 0
    world: World
    backend: str
    device: str
    dtype: str
    workload: str
    data: str = ""
    data_dir: str | None = None
    batch: Count = 0
    steps: Steps = 0
    seed: Int
    form: str | None = msgspec.field(default=None, name="as")
    arguments: dict[str, str] = {}
    variables: dict[str, str] = {}
    finish: str | None = None
    reset: str | None = None
    without_data: list[Count] = []
    loss: str = "mean"
    accept: str | None = None
    separate: bool = True
    verdict: VerdictName
    outcomes: list[RankEntry]
    checks: list[CheckEntry]
    diagnosis: list[Diagnosis]
    where: CallSite | UnsetType = UNSET
    remarks: list[Diagnosis] | UnsetType = UNSET
    modules: ByModule | UnsetType = UNSET
    timings_s: dict[str, float]
    replay: str
    command: str = ""
    notes: list[str]
    accepted: Allowance | None = None
    contents: Contents | None = None


class PartEntry(msgspec.Struct, kw_only=True):
    """A report that was merged into this one."""

    file: str
    shard: Count
    exit_code: Count
    environment: dict[str, Any]
    made: Origin | None = None


class ScaleEntry(msgspec.Struct, kw_only=True):
    """The error in a simulated world of one size and summation order."""

    strategy: str
    workload: str
    dtype: str
    order: str
    world: World
    verdict: VerdictName
    layer: str
    error: Number | None
    bound: Number | None
    where: str
    cause: str
    reason: str


class Document(msgspec.Struct, kw_only=True):
    """A complete report."""

    schema: str = SCHEMA
    verdict: VerdictName
    exit_code: Count
    totals: dict[str, Count] | None = None
    made: Origin | None = None
    environment: dict[str, Any]
    since_green: SinceGreen | None = None
    cases: list[CaseEntry]
    plan: RunPlan | None = None
    left_out: dict[str, str] = {}
    not_shown: list[str] = []
    explored: list[Explored] = []
    scale: list[ScaleEntry] | UnsetType = UNSET
    parts: list[PartEntry] | UnsetType = UNSET


def entry_from_sources(kind: type[Entry], *sources: object, **fields: Any) -> Entry:
    """Create an entry with these fields, and each other field from the first source that has it."""
    for name in kind.__struct_fields__:
        source = next((one for one in sources if hasattr(one, name)), None)
        if name not in fields and source is not None:
            fields[name] = getattr(source, name)
    return kind(**fields)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a document. Unknown keys are allowed."""
    schema = msgspec.json.schema(Document)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def decoded(document: Mapping[str, Any]) -> Document:
    """Convert a document. Raises ValidationError if `check_shape` would refuse it."""
    return msgspec.convert(document, Document)


def check_shape(document: dict[str, Any], path: Path | str) -> Document:
    """Return the document read from `path`, in its form. Raises UsageError if a required field is
    missing or has another form.
    """
    try:
        return decoded(document)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}; write the report again") from error
