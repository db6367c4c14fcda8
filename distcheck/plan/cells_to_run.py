"""Selects the cells of a run, and sets their steps and deadlines. Does not import torch.

`--thorough` runs all cells. The default run adds cells that correct code may be unable to train:
most code for models in which every rank uses every layer raises or hangs if some ranks skip a
layer. Such code is correct for models that never skip one. These cases therefore count only if all
ranks finish: only then can wrong gradients go unnoticed. If ranks do not finish, a note lists the
cases that were not judged.
"""

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from distcheck.plan.settings import Request
from distcheck.plan.source_files import declared_promises
from distcheck.records import Case
from distcheck.training.adapters.forms import trained_with
from distcheck.workloads import DEFAULT_RUN
from distcheck.workloads.cells import CELLS

# Workloads of the default run that every strategy must train.
ALWAYS = tuple(name for name, how in DEFAULT_RUN.items() if not how.if_it_can and not how.promised)
_DEADLINE_S = 3.0  # of a case that does not count if it hangs


def cells_to_run(
    request: Request, world: int, *, besides: Collection[str]
) -> Iterator[tuple[str, Request, dict[str, Any]]]:
    """Yield the cells to run in this world, each with its request and with fields to set in its
    case. The requested number of steps is ignored: a cell needs its number to test its feature.
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
    for name in DEFAULT_RUN if _has_cells(request, world) else ():
        if name in CELLS and name not in request.without:
            deadline_s = min(request.deadline_s, _DEADLINE_S)
            of_cell = msgspec.structs.replace(
                request,
                batch=CELLS[name].batch(request.batch, world),
                steps=CELLS[name].steps,
                deadline_s=deadline_s,
            )
            yield name, of_cell, {"rerun": False}


def workloads_testing_promises(request: Request, strategy: str, world: int) -> Iterator[str]:
    """Yield the workloads of the default run that test the strategy's promises. The promises are
    read from its decorator, without an import.
    """
    if request.workloads or world < 2 or request.accept or request.adaptation.without_data:
        return
    promised = declared_promises(strategy).items()
    for name, how in DEFAULT_RUN.items():
        if how.promised and how.promised.items() <= promised:
            yield name


def with_declared_workload(request: Request, strategy: str) -> Request:
    """Return the request with the strategy's workload in place of the default run, if it declares
    one (`@strategy(workload="mlp")`) or is itself the model to train.
    """
    if trained := trained_with(request.adaptation.form):
        return msgspec.structs.replace(request, workloads=(trained,))
    own = None if request.workloads else declared_promises(strategy).get("workload")
    return msgspec.structs.replace(request, workloads=(own,)) if isinstance(own, str) else request


def _has_cells(request: Request, world: int) -> bool:
    """Return True if the default run has cells: with gloo on the CPU, since mismatched collectives
    may end the job elsewhere; not if `--accept`, a dtype, or ranks without data change the gradient
    that is expected where one is absent.
    """
    special = request.accept or request.dtype or request.adaptation.without_data
    return world > 1 and not special and (request.backend, request.device) == ("gloo", "cpu")


def counts_only_if_finished(case: Case) -> bool:
    """Return True for a cell of the default run: it counts only if its ranks finish. Requested
    cells are recognized by their rerun, which cells of the default run do not have.
    """
    return case.workload in CELLS and not case.rerun
