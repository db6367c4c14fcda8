"""What a check gets to see: the case, the trace, and what is expected. All of it is frozen."""

from dataclasses import dataclass, field
from typing import Any

from distcheck.contract import Contract, Training
from distcheck.judge.oracles.averaging import ParameterAverages
from distcheck.recordings.traces.header import StepHeader
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import Case
from distcheck.records.expected_events import Happening
from distcheck.records.mesh import Mesh
from distcheck.records.mistakes import Shown


@dataclass(frozen=True)
class Expectation:
    """What is expected at a step by the check's layer. `headers` are those of the ranks with data,
    which are numbered from 0; where every rank has data, that is their rank.

    `what` is one of the frozen forms of `oracles/forms.py`, or None. `shown` is, per parameter,
    what comparing its gradient would show (`sensitivity.py`).
    """

    step: int
    headers: tuple[StepHeader, ...]
    what: Any = None
    shown: tuple[Shown | None, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """A trace, what is expected at each step to judge, and the rerun's trace if there is one.

    `train_size` and `own_sampler` are of the data; `training`, `must_happen` and whether a forward
    pass draws random numbers, of the workload;
    `averages` says when parameters are averaged, where ranks may train by themselves; `holding`
    are the ranks that must hold the mean gradient; `mesh` is that of a model-parallel layout.
    """

    case: Case
    contract: Contract
    trace: TraceReader
    expectations: tuple[Expectation, ...] = ()
    rerun: TraceReader | None = None
    train_size: int = 0
    own_sampler: bool = False
    draws_random_numbers: bool = False
    training: Training = field(default_factory=Training)
    must_happen: tuple[Happening, ...] = ()
    averages: ParameterAverages | None = None
    holding: tuple[int, ...] = ()
    mesh: Mesh | None = None

    @property
    def ranks(self) -> range:
        return range(self.trace.layout.world)

    @property
    def with_data(self) -> tuple[int, ...]:
        """The ranks that read a shard, in the order of the expectations' lists; in a mesh, one of
        each data coordinate.
        """
        return self.case.with_data if self.mesh is None else self.mesh.readers
