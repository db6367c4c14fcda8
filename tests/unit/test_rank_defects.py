"""Whose an exception in a rank is: distcheck's own, that of the code under test, a lost peer's."""

from typing import Any

import msgspec
import pytest

from distcheck.errors import InternalError
from distcheck.errors.defects import is_programming_error
from distcheck.records import Adaptation, Case
from distcheck.training import loop
from distcheck.verification import own_code
from distcheck.worlds import messages, root_cause
from distcheck.worlds.local.children import Child

OURS = f'Traceback (most recent call last):\n  File "{loop.__file__}", line 9, in step\n    x\n'
CASE = Case(id="one", strategy="allreduce", world=2, workload="mlp")
PEER = "Connection closed by peer [127.0.0.1]:3771"


def raised(kind: str, message: str = "x", *, own: bool = True, at: float = 1.0) -> Child:
    """A rank that raised in its first step, in frames of distcheck alone or not."""
    text = f"{OURS}{kind}: {message}"
    child = Child(gone=True, exit_code=1, progress=messages.Progress(0, "forward"))
    child.raised = messages.Raised(kind, message, text, at, defect=text if own else "")
    return child


def met(case: Case, *children: Child) -> InternalError | None:
    return own_code.defect_in_rank(case, children, hung=False)


def changed(**change: Any) -> Case:
    return msgspec.structs.replace(CASE, **change)


def test_an_error_of_a_program_in_built_in_code_is_a_defect() -> None:
    victim = raised("RuntimeError", PEER, at=0.5)
    for children in ([raised("KeyError")], [victim, raised("KeyError", at=2.0)]):
        found = met(CASE, *children)
        assert str(found) == "KeyError: x (at distcheck/training/loop.py:9 in step)"
        assert found is not None
        assert found.traceback == f"{OURS}KeyError: x"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", PEER),
        ("DistBackendError", PEER),
        ("ValueError", f"unexpected: {PEER}"),  # however it is wrapped
        ("DistStoreError", "wait timed out after 30000ms"),
        ("RuntimeError", "CUDA error: device-side assert triggered"),
        ("Exception", "MPI_ERR_PROC_FAILED"),  # of mpi4py
        ("OutOfMemoryError", "CUDA out of memory"),
    ],
)
def test_a_lost_peer_and_a_librarys_trouble_are_none(kind: str, message: str) -> None:
    assert met(CASE, raised(kind, message)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": "mine.py:sync"},
        {"strategy": "tests.correct:flat_buffer"},
        {"strategy": "one_that_is_not_installed"},
        {"workload": "mine.py:Net"},
        {"workload": "tests.world.test_kinks:AtAKink"},
        {"backend": "mine:register"},
        {"data": "cifar10"},  # files of a person
        {"adaptation": Adaptation(form="model")},
        {"adaptation": Adaptation(arguments=(("bucket_cap_mb", "'x'"),))},
    ],
    ids=str,
)
def test_damage_by_other_code_is_none_once_loaded(change: dict[str, Any]) -> None:
    case = changed(**change)
    assert met(case, raised("AttributeError")) is None
    early = raised("AttributeError")
    for progress in (None, messages.Progress(0, "rendezvous")):
        early.progress = progress
        assert met(case, early) is not None
    early.progress = messages.Progress(0, messages.LOADING)
    assert met(case, early) is None


def test_others_frames_make_it_theirs_and_so_does_an_earlier_rank() -> None:
    assert met(CASE, raised("KeyError", own=False)) is None
    assert met(CASE, raised("KeyError", own=False, at=1.0), raised("KeyError", at=2.0)) is None
    killed = Child(gone=True, exit_signal=11)
    assert met(CASE, raised("KeyError", at=0.1), killed) is None, "a rank that died comes first"


@pytest.mark.parametrize("workload", ["exact", "cnn", "tied_weights", "generated:scale"])
def test_built_in_cases(workload: str) -> None:
    assert own_code.runs_only_distcheck_code(changed(workload=workload))


def test_a_rank_says_where_it_fell_over_and_accuses_neither() -> None:
    (outcome,) = root_cause.rank_outcomes([raised("TypeError")], hung=False)
    last = outcome.detail.splitlines()[-1]
    assert last.startswith("raised in distcheck/training/loop.py:9 in step: an internal error ")
    for lost in (raised("RuntimeError", PEER), raised("TypeError", own=False)):
        assert "an internal error" not in root_cause.rank_outcomes([lost], hung=False)[0].detail


def test_which_classes_programs_raise() -> None:
    assert all(map(is_programming_error, ("KeyError", "UnboundLocalError", "ValidationError")))
    assert not any(
        map(is_programming_error, ("RuntimeError", "OSError", "Exception", "MyError", ""))
    )
