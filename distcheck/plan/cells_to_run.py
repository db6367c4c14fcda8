"""The cells of a run, each with steps and a deadline of its own. No torch.

`--thorough` runs all of them. The default run adds those that right code may be unable to train:
most code for models in which every rank uses every layer raises, or waits for ever, where some
ranks do not use some layers. Such code is right for a training that never has such a model, so
there a case counts only if all ranks finish it: wrong gradients are then a silent mistake. Where
ranks do not finish, a note says what was not judged.
"""

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from distcheck.plan.request import Request
from distcheck.plan.source_files import promises_of
from distcheck.records import Case
from distcheck.training.adapters.forms import trained_with
from distcheck.workloads import DEFAULT_RUN
from distcheck.workloads.cells import CELLS

# The workloads of the default run that every strategy must train.
ALWAYS = tuple(name for name, how in DEFAULT_RUN.items() if not how.if_it_can and not how.promised)
_DEADLINE_S = 3.0  # of a case that does not count if it hangs


def cells_to_run(
    request: Request, world: int, *, besides: Collection[str]
) -> Iterator[tuple[str, Request, dict[str, Any]]]:
    """The cells in this world, each with its request, and what is said of its case. They keep their
    own number of steps, whatever was asked for: fewer would not show what a cell is for.
    """
    if not request.thorough and request.workloads:
        return
    if request.thorough:
        for name, cell in CELLS.items() if world in (request.cell_worlds or request.worlds) else ():
            left_out = "you passed --without" if name in request.without else ""
            if name not in besides:
                batch = cell.batch(request.batch, world)
                of_cell = msgspec.structs.replace(request, batch=batch, steps=cell.steps)
                yield name, of_cell, {"left_out": left_out}
        return
    for name in DEFAULT_RUN if _fits(request, world) else ():
        if name in CELLS and name not in request.without:
            deadline_s = min(request.deadline_s, _DEADLINE_S)
            of_cell = msgspec.structs.replace(
                request,
                batch=CELLS[name].batch(request.batch, world),
                steps=CELLS[name].steps,
                deadline_s=deadline_s,
            )
            yield name, of_cell, {"rerun": False}


def promised_to_run(request: Request, strategy: str, world: int) -> Iterator[str]:
    """The workloads of the default run that are for what this strategy promises: where it says so
    in a decorator, which can be read without an import.
    """
    if request.workloads or world < 2 or request.accept or request.adaptation.without_data:
        return
    promised = promises_of(strategy).items()
    for name, how in DEFAULT_RUN.items():
        if how.promised and how.promised.items() <= promised:
            yield name


def with_own_workload(request: Request, strategy: str) -> Request:
    """The request for a strategy that brings its own workload, as in `@strategy(workload="mlp")`,
    or that is itself what is trained: with that in place of the default run.
    """
    if trained := trained_with(request.adaptation.form):
        return msgspec.structs.replace(request, workloads=(trained,))
    own = None if request.workloads else promises_of(strategy).get("workload")
    return msgspec.structs.replace(request, workloads=(own,)) if isinstance(own, str) else request


def _fits(request: Request, world: int) -> bool:
    """Whether the default run has cells: with gloo on the CPU, since elsewhere collectives that do
    not fit together may take the job down; and not where what `--accept` allows, a dtype, or ranks
    without data change what is expected of an absent gradient.
    """
    special = request.accept or request.dtype or request.adaptation.without_data
    return world > 1 and not special and (request.backend, request.device) == ("gloo", "cpu")


def counts_if_finished(case: Case) -> bool:
    """Whether a case counts only if its ranks finish: a cell of the default run. One that was asked
    for is run twice.
    """
    return case.workload in CELLS and not case.rerun
