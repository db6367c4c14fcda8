"""Frozen data that packages exchange, without behavior except merging. Does not import torch.

This module defines results and reports: `CheckResult`, `CaseReport`, `Report`. Other modules:

    case              a request to one strategy in one world, and its name
    layers, causes/   the tables of layers and of causes
    exit_status, odd_ranks   exit status of ranks; the rank that differs from the others
    run_facts         facts about a run in addition to its checks
    ledger            the collectives of a step, and their bytes
    posted_calls, schedules  calls of ranks and deadlocks; interleavings of ranks
    mistakes, expected_events  sensitivity of a pass; required events
    decoding          reads files of any origin, with limits
"""

import math
import shlex
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec

from distcheck.errors import CannotRunError, ExitCode, VerdictError
from distcheck.records.case import EXACT_DTYPES as EXACT_DTYPES
from distcheck.records.case import MOST_DEADLINE_S as MOST_DEADLINE_S
from distcheck.records.case import Adaptation as Adaptation
from distcheck.records.case import Case as Case
from distcheck.records.case import Delay as Delay
from distcheck.records.case import LossName as LossName
from distcheck.records.decoding import Count, Int, Steps
from distcheck.records.exit_status import Collective as Collective
from distcheck.records.exit_status import Outcome as Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.records.ledger import Ledger
from distcheck.records.mistakes import RevealedMistakes, Sensitivity
from distcheck.records.run_facts import CaseContents as CaseContents
from distcheck.records.run_facts import ExploredSearch as ExploredSearch
from distcheck.records.run_facts import ModuleComparison, PlannedSearch
from distcheck.records.run_facts import Origin as Origin

VerdictName = Literal["pass", "unknown", "fail"]
ChangeKind = Literal["code", "machine", "software", "settings", "other"]
# A float, or a string for values that JSON has no number for.
Number = float | Annotated[str, msgspec.Meta(pattern=r"^(nan|inf|-inf)$")]


_RANK_OF_VERDICT: dict[VerdictName, int] = {"pass": 0, "unknown": 1, "fail": 2}


def merge_verdicts(verdicts: "list[VerdictName]") -> VerdictName:
    """Return the worst of `verdicts` (fail, then unknown, then pass); unknown if there are none."""
    return max(verdicts, key=_RANK_OF_VERDICT.__getitem__, default="unknown")


def number(value: float) -> Number:
    """Return `value` as JSON can store it."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Name, shape and dtype of one tensor; the dtype is torch's name without `torch.`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class ModelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors in the trace of one model.

    `optimizer` has names `<parameter>/<state key>`, as in `fc.weight/momentum_buffer`. `numbers`
    are the names among them whose values are Python numbers, not tensors.
    """

    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    optimizer: tuple[TensorSpec, ...]
    numbers: tuple[str, ...] = ()


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Coverage of a check: distinct tensors, ranks and steps, and the number of elements."""

    tensors: Count = 0
    elements: Count = 0
    ranks: Count = 0
    steps: Steps = 0


NOTHING_COMPARED = Compared()


class PlannedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check that a case needs, with its layer and the amount that it must compare."""

    check: str
    layer: str
    scope: str
    required: Compared
    note: str = ""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One place where actual and expected differ (or, in a pass, come closest to differing).

    `error` and `bound` are in units of `unit`. For a rule about a whole tensor (relative L2),
    `index` is empty, and `actual` and `expected` are norms. If nothing numerical is compared, they
    are text: "none", a digest, or a setting.
    """

    parameter: str
    rank: Int
    step: Int
    index: tuple[Int, ...]
    actual: float | str
    expected: float | str
    error: Number
    bound: Number
    ulp: Int | None = None
    unit: str = "absolute"
    actual_bits: str = ""
    expected_bits: str = ""

    @property
    def place(self) -> str:
        """The place as text: "step 0, fc.weight[3,1], rank 2"."""
        index = f"[{','.join(map(str, self.index))}]" if self.index else ""
        name = self.parameter if self.parameter in _NO_NAMES else quoted(self.parameter)
        return f"step {self.step}, {name}{index}, rank {self.rank}"


# Entries of `Difference.parameter` that are words, and not the name of a parameter.
_NO_NAMES = ("loss", "samples", "gradients", "parameters", "buffers", "groups", "order", "torch")


def quoted(name: str) -> str:
    """Quote the name of a tensor that would read as a word of its sentence."""
    return f"'{name}'" if name.isalpha() else name


class FindingKind(StrEnum):
    """The kind of a finding, for code that depends on it. Reasons are texts for people only."""

    SAME_SAMPLES = "two ranks have the same samples"
    SAME_RANDOMNESS = "two ranks draw the same random numbers"
    SAME_NOISE = "two ranks have the same random numbers for different samples"
    READ_APART = "ranks of one model read different samples"
    READ_AGAIN = "a rank reads samples again"
    BEFORE_UNSCALE = "gradients are clipped before they are unscaled"
    NO_LOCAL = "no gradient before the exchange was seen"
    NO_OUTPUTS = "no rank gave outputs"
    DREW_ALIKE = "ranks begin a step with the same random numbers"
    NOTHING_COUNTS = "no tensor could have shown a mistake"
    COMPRESSED = "tensors were compressed"
    OTHER = "something on which nothing depends"


class ErrorMap(msgspec.Struct, frozen=True, kw_only=True):
    """The largest error of each tensor at each step: of its bound (`kind` "bound"), or if any bit
    differs ("bits"). A row is one text.
    """

    kind: str
    parameters: tuple[str, ...]
    steps: tuple[Int, ...]
    rows: tuple[Annotated[str, msgspec.Meta(max_length=1 << 20)], ...]
    parameters_per_row: Count
    steps_per_column: Count


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one check under one layer of a case.

    reason       sentences for people
    lead         the first sentence, if there are several
    kinds        the kind of each sentence, in the same order
    shown        mistakes that the comparison of each tensor would have revealed, if computed
    insensitive  amount compared without revealing any mistake; not included in `compared`
    shares       worst error over its bound, by tensor and step; "inf" if wrong without a bound
    in_bits      True if comparisons were bitwise: all shares are 0 or "inf"
    map, sensitivity   in a document, in place of `shares` and `shown`
    """

    check: str
    layer: str
    verdict: VerdictName
    compared: Compared = NOTHING_COMPARED
    worst: Difference | None = None
    first: Difference | None = None
    reason: str = ""
    lead: str = ""
    kinds: tuple[FindingKind, ...] = ()
    shares: dict[str, dict[int, Number]] = {}
    in_bits: bool = True
    map: ErrorMap | None = None
    sensitivity: Sensitivity | None = None
    shown: dict[str, RevealedMistakes] = {}
    insensitive: Compared = NOTHING_COMPARED
    excuse: str = ""  # why something passed; meaningless next to a failure
    defect: str = ""  # the traceback if distcheck itself failed in this check

    @property
    def first_reason(self) -> str:
        return self.lead or self.reason

    @property
    def first_kind(self) -> FindingKind:
        return self.kinds[0] if self.kinds else FindingKind.OTHER


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """A named cause, the evidence for it, and one suggestion."""

    cause: str
    evidence: str
    suggestion: str


class CallSite(msgspec.Struct, frozen=True, kw_only=True):
    """The line of the code under test that causes a failure, with its text if readable. `file` is
    empty if the wrong value passed through no call.
    """

    file: str = ""
    line: Count = 0
    code: str = ""


class AcceptedChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of `--accept`: `widened` describes the new expectation and its bound, and `not_owed`
    lists properties that a pass no longer shows.
    """

    kind: str
    widened: str
    not_owed: tuple[str, ...]


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """A case, the exit status of its ranks, and all check results.

    `contents` is None if the case ended before inspection. `remarks` are causes that may be
    intended; they do not fail the case.
    """

    case: Case
    strategy_file: str
    strategy_line: Count = 0  # line of its definition; 0: unknown
    verdict: VerdictName
    outcomes: tuple[Outcome, ...]
    checks: tuple[CheckResult, ...]
    diagnosis: tuple[Diagnosis, ...] = ()
    where: CallSite | None = None
    timings_s: dict[str, float] = {}
    replay: str = ""
    notes: tuple[str, ...] = ()
    remarks: tuple[Diagnosis, ...] = ()
    accepted: AcceptedChanges | None = None
    contents: CaseContents | None = None
    modules: ModuleComparison | None = None
    unfinished: bool = False  # interrupted before it was judged
    ledger: Ledger | None = None
    rounded_to: str = ""  # the low-precision dtype that represents all wrong gradients, if any

    @property
    def ranks_failed(self) -> bool:
        """Return True if a rank crashed, hung or was lost, unless distcheck has a defect."""
        own = any(check.check == "outcome" and check.defect for check in self.checks)
        return not own and any(one.outcome != RankEnd.FINISHED for one in self.outcomes)

    @property
    def ranks_finished(self) -> bool:
        """Return True if there were ranks, and all of them finished."""
        return bool(self.outcomes) and all(o.outcome == RankEnd.FINISHED for o in self.outcomes)


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The complete plan. A report holds part `shard` of `shards`; 0 means all parts. `digest`
    covers the cases and the files that they name, and is the same in all parts of a plan.
    `assigned` is the part (1 to `shards`) that runs each case, by its id; 1 if not listed.
    """

    digest: str
    shard: int
    shards: int
    cases: tuple[Case, ...]
    assigned: dict[str, int] = {}
    searches: tuple[PlannedSearch, ...] = ()

    def holds(self, case: str) -> bool:
        """Return True if this part runs the case with this id."""
        return self.shard in (0, self.assigned.get(case, 1))


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A difference from an earlier run; for code, its two digests."""

    kind: ChangeKind
    name: str
    then: str
    now: str

    def __str__(self) -> str:
        if self.kind == "code":
            return f"the code of {self.name} has changed"
        return f"{self.name} was {shlex.quote(self.then)} and is {shlex.quote(self.now)}"


class ChangesSinceLastPass(msgspec.Struct, frozen=True, kw_only=True):
    """The most recent saved run of the same strategies that passed, and the changes since."""

    run: str
    changes: tuple[Change, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over all cases. `distcheck.reports` converts it to text or JSON.

    `left_out` lists cases that do not apply to their strategy, with reasons. `not_shown` lists
    properties that a pass does not cover. `explored` has the coverage of each search.
    """

    environment: dict[str, Any]
    cases: tuple[CaseReport, ...]
    made: Origin | None = None
    plan: RunPlan | None = None
    left_out: dict[str, str] = {}
    not_shown: tuple[str, ...] = ()
    explored: tuple[ExploredSearch, ...] = ()
    since_green: ChangesSinceLastPass | None = None
    saved_to: str | None = None
    save_error: str = ""
    interrupted: bool = False
    given_up: str = ""  # why the run ended before every case was judged
    given_up_as: ExitCode = ExitCode.CANNOT_RUN

    @property
    def verdict(self) -> VerdictName:
        """The worst verdict of any case or search (fail, then unknown, then pass)."""
        return verdict_of(self)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code for the verdict. A mismatch takes precedence over a failed rank in a
        different case, because it is the more definite finding.
        """
        if self.interrupted:
            return ExitCode.INTERRUPTED
        early = ExitCode.CANNOT_RUN if self.save_error else None
        return exit_code_of_report(self, self.given_up_as if self.given_up else early)

    def raise_for_verdict(self) -> "Report":
        """Return this report if it passed; raise `VerdictError` (an AssertionError) otherwise."""
        __tracebackhide__ = True
        if self.verdict == "pass" and not self.interrupted and not self.given_up:
            return self
        raise VerdictError(_shown["failure"](self), self.exit_code)

    def __repr__(self) -> str:
        text: str = _shown["screen"](self)
        return text

    def _repr_html_(self) -> str:
        page: str = _shown["page"](self)
        return page

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dictionaries and lists, as `--json` writes it."""
        document: dict[str, Any] = _shown["document"](self)
        return document

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row per check. Raises CannotRunError without pandas."""
        try:
            import pandas
        except ImportError:
            raise CannotRunError(
                "Report.to_pandas() needs pandas, which is not installed; run pip install pandas, "
                "or use Report.to_dict()"
            ) from None
        return pandas.DataFrame([row for case in self.cases for row in _rows_of(case)])


def verdict_of(report: Any) -> VerdictName:
    """Return `Report.verdict` for a report, or for its document."""
    searched = [one.verdict for one in report.explored if one.verdict != "not run"]
    return merge_verdicts([*(case.verdict for case in report.cases), *searched])


def exit_code_of_report(report: Any, early: ExitCode | None = None) -> ExitCode:
    """Return the exit code for the verdicts of a report or document. `early` is the exit code of a
    run that was interrupted before any failure.
    """
    failed = [case for case in report.cases if case.verdict == "fail"]
    if failed:
        only_ranks = all(case.ranks_failed for case in failed)
        return ExitCode.RANK_FAILED if only_ranks else ExitCode.MISMATCH
    if early is not None:
        return early
    if any(check.defect for case in report.cases for check in case.checks):
        return ExitCode.INTERNAL
    return ExitCode.PASS if verdict_of(report) == "pass" else ExitCode.UNKNOWN


def _rows_of(report: CaseReport) -> list[dict[str, Any]]:
    case, causes = report.case, ", ".join(found.cause for found in report.diagnosis)
    of_case = {
        name: getattr(case, name)
        for name in ("strategy", "world", "workload", "dtype", "backend", "seed", "batch", "steps")
    }
    return [
        {**of_case, "case_verdict": report.verdict, "causes": causes}
        | {"check": result.check, "layer": result.layer, "verdict": result.verdict}
        | msgspec.structs.asdict(result.compared)
        | {"error": worst and float(worst.error), "bound": worst and float(worst.bound)}
        for result in report.checks
        for worst in [result.worst]
    ]


_shown: dict[str, Callable[[Report], Any]] = dict.fromkeys(
    ("failure", "screen", "page", "document"), lambda report: report.verdict
)


def set_report_renderers(
    *,
    failure: Callable[[Report], str],
    screen: Callable[[Report], str],
    page: Callable[[Report], str],
    document: Callable[[Report], dict[str, Any]],
) -> None:
    """Set the functions that render a report; records must not import them.

    They return the error text for a report that did not pass, its screen, its HTML page for a
    notebook, and its `--json` document.
    """
    _shown.update(failure=failure, screen=screen, page=page, document=document)
