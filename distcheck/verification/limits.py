"""Estimates whether a case fits on this machine, before any process starts."""

import math
import resource

from distcheck.backends import name_of
from distcheck.errors import CannotRunError
from distcheck.machine.resources import available_bytes
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.layout import TraceLayout, spec_bytes
from distcheck.records import Case
from distcheck.training.jobs import CaseFacts

_PER_RANK_BYTES = 25 << 20  # added by a forked gloo rank to its helper process
_PER_THREAD_BYTES = 1 << 20  # of a rank that is a thread: its stack and model objects
_FDS_PER_RANK = 4
_FDS_SPARE = 64


def needed_bytes(case: Case, facts: CaseFacts, layout: TraceLayout, *, ranks_here: int) -> int:
    """Estimate the peak memory: ranks on this machine, the trace of all ranks, and one active
    reference. Local gradients are stored once per rank, everything else once if the ranks agree.
    """
    model = sum(
        _size(layout, kind) for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.BUFFER, Kind.OPTIMIZER)
    )
    saved = facts.saved_bytes_per_sample * case.batch
    per_rank = _PER_THREAD_BYTES if _in_one_process(case) else _PER_RANK_BYTES
    ranks = ranks_here * (per_rank + model + saved // len(case.with_data))
    return ranks + trace_bytes(case, layout) + reference_bytes(case, facts, layout)


def reference_bytes(case: Case, facts: CaseFacts, layout: TraceLayout) -> int:
    """Estimate the memory of one judge: the full batch, and every rank's gradients."""
    model = _size(layout, Kind.PARAMETER) + _size(layout, Kind.OPTIMIZER)
    gradients = (case.world + 5) * _size(layout, Kind.GRADIENT)  # 5: mean and bound in float64
    if facts.training.accumulate > 1:  # summed absolute values of the passes, in float64
        gradients += case.world * 8 * sum(spec.elements for spec in layout.specs(Kind.GRADIENT))
    return _PER_RANK_BYTES + 2 * model + gradients + facts.saved_bytes_per_sample * case.batch


def trace_bytes(case: Case, layout: TraceLayout) -> int:
    """Return the bytes of a correct case's traces. The rerun shares tensors of the first run."""
    runs = 2 if case.rerun else 1
    shared = _size(layout, Kind.GRADIENT) + _size(layout, Kind.PARAMETER)
    shared += _size(layout, Kind.BUFFER) * case.world + _size(layout, Kind.OPTIMIZER)
    per_step = case.world * _size(layout, Kind.LOCAL_GRADIENT) + shared
    return (case.steps + 1) * per_step + runs * layout.index_bytes


def check_resources(case: Case, facts: CaseFacts, layout: TraceLayout, *, ranks_here: int) -> None:
    """Raise CannotRunError if memory or file descriptors do not suffice for ranks and traces."""
    _raise_descriptor_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = _FDS_PER_RANK * ranks_here + case.world + _FDS_SPARE
    if _in_one_process(case):
        descriptors = _FDS_PER_RANK + _FDS_SPARE
    if soft != resource.RLIM_INFINITY and descriptors > soft:
        raise CannotRunError(
            f"--world {case.world} needs about {descriptors} open files in one process; the limit "
            f"is {soft}; raise it with ulimit -n, or use fewer ranks"
        )
    needed = needed_bytes(case, facts, layout, ranks_here=ranks_here)
    available = available_bytes()
    if needed > available:
        raise CannotRunError(
            f"case {case.id} needs about {_gib(needed)} GiB of memory; {_gib(available)} GiB are "
            "available; use fewer ranks, fewer steps or a smaller workload"
        )


def _in_one_process(case: Case) -> bool:
    return name_of(case.backend) == "simulated"


def _size(layout: TraceLayout, kind: Kind) -> int:
    return sum(spec_bytes(spec) for spec in layout.specs(kind))


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}" if size < 100 << 30 else f"{math.ceil(size / (1 << 30))}"
