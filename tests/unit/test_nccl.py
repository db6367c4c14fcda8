"""NCCL: which library is asked, and when ranks may share a GPU."""

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distcheck.backends import missing_for, nccl, variables
from distcheck.errors import CannotRunError
from distcheck.machine import devices
from distcheck.plan.settings import Request
from distcheck.plan.thorough import with_thorough_worlds
from distcheck.testing.messages import RUN
from distcheck.training.jobs import INSPECT, InspectionRequest
from distcheck.verification.inspection import inspect_cases
from distcheck.worlds import launch
from distcheck.worlds.shares import RankStart
from tests.unit.test_plan import cases

SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
OLD, NEW = (2, 28, 9), (2, 30, 7)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    for name in SHARING:
        monkeypatch.delenv(name, raising=False)


def loaded(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(devices, "nccl_version", lambda: version)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_the_library_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch was built with is a constant, and another library may have been preloaded."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (1, 0, 0))
    version = devices.nccl_version()
    if version == (1, 0, 0):
        pytest.skip("NCCL is linked into this torch")
    assert version >= (2, 0, 0)


def test_a_library_that_was_put_first_has_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(number: Any) -> int:
        number._obj.value = 23007
        return 0

    opened = []

    def open_library(name: str, mode: int) -> SimpleNamespace:
        opened.append(name)
        return SimpleNamespace(ncclGetVersion=get)

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: OLD)
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    assert devices.nccl_version() == NEW
    assert opened == ["libnccl.so.2"]


def test_a_library_that_is_linked_into_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: OLD)
    assert devices.nccl_version() == OLD


@pytest.mark.parametrize(
    ("version", "ranks", "said"),
    [
        (OLD, 1, ""),
        (NEW, 1, ""),
        (NEW, 4, ""),
        (
            OLD,
            4,
            "backend nccl: 4 ranks are more than the 1 GPU here, and NCCL 2.28.9 requires a "
            "separate GPU for each rank; NCCL 2.30 or newer is needed to share one",
        ),
        ((), 2, "NCCL of unknown version requires a separate"),
    ],
)
def test_which_library_lets_ranks_share(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], ranks: int, said: str
) -> None:
    loaded(monkeypatch, version)
    why = missing_for("nccl", ranks)
    assert said in why
    assert bool(said) == bool(why)
    assert missing_for("gloo", ranks) == ""


def test_an_old_library_is_refused_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, OLD)
    found = tuple(cases(backend="nccl", device="cuda", worlds=(4,)))
    asked = InspectionRequest(cases=found, description=b"", ranks_here=4)
    with pytest.raises(CannotRunError, match=r"4 ranks are more than the 1 GPU here"):
        inspect_cases(INSPECT.encode(asked), {}, None)  # type: ignore[arg-type]


def test_what_doctor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, NEW)
    assert nccl.describe() == "2.30.7; ranks can share a GPU"
    loaded(monkeypatch, OLD)
    assert nccl.describe() == "2.28.9; each rank needs a GPU (2.30 or newer lets ranks share one)"
    loaded(monkeypatch, ())
    assert nccl.describe() == "torch has none"


def test_variables_for_shared_gpus_keep_yours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables("nccl", 2) == SHARING
    assert variables("nccl", 1) == {}
    assert variables("gloo", 4) == {}
    assert variables("mine.py:backend", 4) == {}
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    assert variables("nccl", 2) == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    assert variables("nccl", 2) == {}


class CapturedError(Exception):
    pass


class PoolOfNothing:
    """Takes what ranks would be started with."""

    address = "127.0.0.1"
    forks_all = False

    def wait_ready(self) -> None:
        pass

    def ranks_here(self, world: int) -> int:
        return world

    def start_ranks(
        self, target: str, starts: Sequence[RankStart], fds: Mapping[str, Any], *, together: bool
    ) -> None:
        self.starts = starts
        raise CapturedError


@pytest.mark.parametrize(("backend", "size", "extra"), [
    ("nccl", 2, SHARING), ("nccl", 1, {}), ("gloo", 2, {}),
])  # fmt: skip
def test_ranks_get_them_before_they_begin(backend: str, size: int, extra: dict[str, str]) -> None:
    pool: Any = PoolOfNothing()
    ranks = launch.Ranks(
        job=RUN, backend=backend, size=size, request=lambda meeting: meeting, deadline_s=5.0
    )
    with pytest.raises(CapturedError):
        launch.start_world(pool, ranks)
    assert len(pool.starts) == size
    for start in pool.starts:
        found = {n: v for n, v in start.environment.items() if n.startswith("NCCL_")}
        assert found == extra
        assert start.environment["WORLD_SIZE"] == str(size)


def test_a_thorough_run_needs_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 3)
    asked = Request(strategies=("allreduce",), backend="nccl", device="cuda", thorough=True)
    assert with_thorough_worlds(asked, world_given=False).worlds == (2, 3)
    on_gloo = Request(strategies=("allreduce",), device="cuda", thorough=True)
    assert with_thorough_worlds(on_gloo, world_given=False).worlds == (2, 3, 4, 5, 6)
