"""Whether what ended a rank is a defect of distcheck's own.

A traceback alone does not say: a strategy, workload or value of others may leave behind what
distcheck falls over, in frames of distcheck alone. So an exception is called a defect where it is
one by its traceback and its class (`blame.own_defect`), and no code or data of others had been
loaded: the rank had not come so far, or the case names none. Otherwise the rank has crashed, and
its outcome says where.
"""

from collections.abc import Sequence

from distcheck.errors import InternalError
from distcheck.plan.provenance import named
from distcheck.records import Adaptation, Case
from distcheck.training import loading
from distcheck.verification.allowed_jobs import is_built_in
from distcheck.workloads.datasets import FILE_DATASETS
from distcheck.worlds import blame
from distcheck.worlds.launch import internal_error
from distcheck.worlds.local.children import Child

_STRATEGIES = "distcheck_strategies"  # other installed strategies are a user's
_BEFORE = "rendezvous"  # the phase in which ranks meet; what they train is loaded after it


def in_rank(case: Case, children: Sequence[Child], *, hung: bool) -> InternalError | None:
    raised = blame.own_defect(children, hung=hung)
    if raised is None:
        return None
    at = blame.first_cause(children, hung=hung).progress
    loaded = at is not None and at.phase != _BEFORE
    return None if loaded and not is_own_alone(case) else internal_error(raised)


def is_own_alone(case: Case) -> bool:
    """Whether a case runs distcheck's own code on data that distcheck makes, and no other."""
    if case.data in FILE_DATASETS or case.adaptation != Adaptation():
        return False
    return all(_is_own(what, spec) for what, spec in named(case))


def _is_own(what: str, spec: str) -> bool:
    if what != "strategy":
        return is_built_in(what, spec)
    point = loading.strategy_names().get(spec)
    return not spec or (point is not None and point.module.partition(".")[0] == _STRATEGIES)
