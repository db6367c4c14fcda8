"""The frozen data that the parts hand to each other. No torch, no behaviour beyond merging."""

import math
from typing import Any, Literal

import msgspec

from distcheck.errors import ExitCode, VerdictError

VerdictName = Literal["pass", "unknown", "fail"]
OutcomeName = Literal["finished", "raised", "exited", "killed", "hung", "ended"]
Number = float | str  # a float, or "nan", "inf", "-inf", which JSON cannot write as numbers

_RANK_OF_VERDICT: dict[VerdictName, int] = {"pass": 0, "unknown": 1, "fail": 2}


def merge_verdicts(verdicts: "list[VerdictName]") -> VerdictName:
    """The worst of `verdicts`, by pass < unknown < fail; nothing at all is unknown."""
    return max(verdicts, key=_RANK_OF_VERDICT.__getitem__, default="unknown")


def number(value: float) -> Number:
    """`value` as JSON can carry it."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to run and judge. Holds names, not objects: it is the replay token."""

    id: str
    strategy: str
    world: int
    backend: str = "gloo"
    device: str = "cpu"
    dtype: str = "float32"
    workload: str = "cnn"
    data: str = "synthetic"
    data_dir: str | None = None
    batch: int = 256
    steps: int = 3
    seed: int = 0
    deadline_s: float = 30.0
    layers: tuple[str, ...] = ("X", "R", "S32")
    rerun: bool = True


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Name, shape and dtype (as torch spells it, without `torch.`) of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)


class ModelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Every tensor that a trace of one model holds.

    `optimizer` names are `<parameter>/<state key>`, as in `fc.weight/momentum_buffer`.
    """

    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    optimizer: tuple[TensorSpec, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended. `detail` is for a person: a traceback, a signal, a stack."""

    rank: int
    outcome: OutcomeName
    detail: str = ""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What a check really compared: distinct tensors, ranks, steps, and elements over all."""

    tensors: int = 0
    elements: int = 0
    ranks: int = 0
    steps: int = 0


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One place where actual and expected differ (or, in a pass, come closest to differing).

    `error` and `bound` share a unit; `unit` says which. For a rule about a whole tensor
    (relative L2) `index` is empty and `actual`, `expected` are norms.
    """

    parameter: str
    rank: int
    step: int
    index: tuple[int, ...]
    actual: Number
    expected: Number
    error: Number
    bound: Number
    ulp: int | None = None
    unit: str = "absolute"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one check said about one layer of expectation of one case."""

    check: str
    layer: str
    verdict: VerdictName
    compared: Compared = Compared()
    worst: Difference | None = None
    first: Difference | None = None
    reason: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """A named cause, the evidence for it, and one suggestion."""

    cause: str
    evidence: str
    suggestion: str


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """A case, how its ranks ended, and what every check said."""

    case: Case
    strategy_file: str
    verdict: VerdictName
    outcomes: tuple[Outcome, ...]
    checks: tuple[CheckResult, ...]
    diagnosis: tuple[Diagnosis, ...] = ()
    timings_s: dict[str, float] = {}
    replay: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ranks_failed(self) -> bool:
        """Whether a rank crashed, hung or was lost."""
        return any(outcome.outcome != "finished" for outcome in self.outcomes)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over all cases. `distcheck.reports` turns it into text or JSON."""

    environment: dict[str, Any]
    cases: tuple[CaseReport, ...]
    saved_to: str | None = None
    save_error: str = ""
    interrupted: bool = False

    @property
    def verdict(self) -> VerdictName:
        """The worst verdict of any case: pass < unknown < fail."""
        return merge_verdicts([case.verdict for case in self.cases])

    @property
    def exit_code(self) -> ExitCode:
        """The exit code for the verdict.

        A mismatch that was found outweighs a rank that failed in another case: it is the
        more definite finding.
        """
        if self.interrupted:
            return ExitCode.INTERRUPTED
        failed = [case for case in self.cases if case.verdict == "fail"]
        if any(not case.ranks_failed for case in failed):
            return ExitCode.MISMATCH
        if failed:
            return ExitCode.RANK_FAILED
        if self.save_error:
            return ExitCode.CANNOT_RUN
        return ExitCode.PASS if self.verdict == "pass" else ExitCode.UNKNOWN

    def raise_for_verdict(self) -> "Report":
        """Returns itself on a pass; raises `VerdictError` (an AssertionError) otherwise."""
        __tracebackhide__ = True
        if self.verdict == "pass" and not self.interrupted:
            return self
        from distcheck.reports.terminal import render_text, summarize

        text = f"{summarize(self)}\n\n{render_text(self, width=100)}"
        raise VerdictError(text, self.exit_code)
