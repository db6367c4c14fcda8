"""The input of a check, all frozen: the case, the trace, and the expectations."""

from dataclasses import dataclass
from typing import Any

from distcheck.contract import Contract
from distcheck.recordings.traces.header import StepHeader
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import Case
from distcheck.records.mesh import Mesh
from distcheck.records.mistakes import RevealedMistakes
from distcheck.training.jobs import CaseFacts


@dataclass(frozen=True)
class Expectation:
    """The expectation at a step under the check's layer.

    headers  of the ranks with data, numbered from 0
    what     one of the frozen forms of `oracles/forms.py`, or None
    shown    per parameter, the mistakes that comparing its gradient would reveal (`sensitivity.py`)
    """

    step: int
    headers: tuple[StepHeader, ...]
    what: Any = None
    shown: tuple[RevealedMistakes | None, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """A trace, the expectation at each judged step, and the rerun's trace if there is one.

    holding   ranks that must hold the mean gradient
    mesh      the mesh of a model-parallel layout
    """

    case: Case
    facts: CaseFacts
    trace: TraceReader
    expectations: tuple[Expectation, ...] = ()
    rerun: TraceReader | None = None
    holding: tuple[int, ...] = ()
    mesh: Mesh | None = None

    @property
    def contract(self) -> Contract:
        return self.facts.contract

    @property
    def ranks(self) -> range:
        return range(self.trace.layout.world)

    @property
    def with_data(self) -> tuple[int, ...]:
        """Return the ranks that read a shard, as in expectations; one per data coordinate."""
        return self.case.with_data if self.mesh is None else self.mesh.readers
