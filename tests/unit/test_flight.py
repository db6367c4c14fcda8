"""What the recorders of torch say, put together."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from distcheck.worlds import flight


def _dump(dumped: bytes, **options: bool) -> bytes:
    assert set(options) == {"includeCollectives", "includeStackTraces"}
    return dumped


def entry(number: int, name: str, created: int) -> dict[str, Any]:
    return {
        "profiling_name": name, "input_sizes": [[3, 4]], "is_p2p": False, "state": "scheduled",
        "collective_seq_id": number, "process_group": ("0", ""), "time_created_ns": created,
    }  # fmt: skip


@pytest.mark.parametrize("initialized", [False, True])
def test_a_gpu_uses_nccls_recorder(monkeypatch: pytest.MonkeyPatch, initialized: bool) -> None:
    """They are two: collectives of both are told in the order in which they were entered."""
    recorders = {
        "_dump_fr_trace": [entry(1, "gloo:broadcast", 10), entry(2, "gloo:all_reduce", 30)],
        "_dump_nccl_trace": [entry(1, "nccl:all_reduce", 20), entry(2, "nccl:all_gather", 40)],
    }
    for name, entries in recorders.items():
        dumped = pickle.dumps({"entries": entries})
        dump = partial(_dump, dumped)
        monkeypatch.setattr(c10d, name, dump, raising=False)  # a build for CPUs has no NCCL's
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    expected = ["broadcast", "all_reduce", "all_reduce", "all_gather"]
    found = flight.latest()
    assert [c.name for c in found] == (expected if initialized else ["broadcast", "all_reduce"])
    assert [c.finished for c in found] == [False] * len(found)
    assert found[-1].shapes == "3x4"


def test_a_backends_own_recorder_is_asked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [entry(1, "mpi:barrier", 20)]
    moved: list[str] = []

    def move_on() -> None:
        moved.append("moved")
        own[-1]["state"] = "completed"

    torchs = [entry(1, "gloo:broadcast", 10) | {"state": "completed"}, entry(2, "gloo:gather", 30)]
    dump = partial(_dump, pickle.dumps({"entries": torchs}))
    monkeypatch.setattr(c10d, "_dump_fr_trace", dump)
    monkeypatch.setattr(flight, "_further", [])
    recorder = flight.CallRecorder(lambda: list(own), own.clear, move_on)
    for _ in range(2):  # which is once
        flight.record_further(recorder)
    assert [c.name for c in flight.latest()] == ["broadcast", "barrier", "gather"]
    assert flight.incomplete_collectives(0.0) == ["gather"]
    assert moved, "what only moves on when it is asked may have completed"
    flight.forget()
    assert [c.name for c in flight.latest()] == ["broadcast", "gather"]


@pytest.mark.skipif(
    not torch.distributed.is_nccl_available(), reason="torch was built without NCCL"
)
def test_nccls_recorder_is_there() -> None:
    """As it is called: with the words that this torch knows."""
    dump = c10d._dump_nccl_trace  # type: ignore[attr-defined]
    dumped = dump(includeCollectives=True, includeStackTraces=False)
    assert "entries" in pickle.loads(dumped)
