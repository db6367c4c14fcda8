"""What the recorders of torch say, put together."""

import pickle
import sys
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from distcheck.worlds import flight


def entry(number: int, name: str, created: int) -> dict[str, Any]:
    return {
        "profiling_name": name, "input_sizes": [[3, 4]], "is_p2p": False, "state": "scheduled",
        "collective_seq_id": number, "process_group": ("0", ""), "time_created_ns": created,
    }  # fmt: skip


@pytest.mark.parametrize("initialised", [False, True])
def test_nccls_recorder_is_asked_where_a_gpu_was_used(
    monkeypatch: pytest.MonkeyPatch, initialised: bool
) -> None:
    """They are two: collectives of both are told in the order in which they were entered."""
    recorders = {
        "_dump_fr_trace": [entry(1, "gloo:broadcast", 10), entry(2, "gloo:all_reduce", 30)],
        "_dump_nccl_trace": [entry(1, "nccl:all_reduce", 20), entry(2, "nccl:all_gather", 40)],
    }
    for name, entries in recorders.items():
        dumped = pickle.dumps({"entries": entries})
        monkeypatch.setattr(c10d, name, lambda dumped=dumped, **options: dumped)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    expected = ["broadcast", "all_reduce", "all_reduce", "all_gather"]
    found = flight.latest()
    assert [c.name for c in found] == (expected if initialised else ["broadcast", "all_reduce"])
    assert [c.finished for c in found] == [False] * len(found)
    assert found[-1].shapes == "3x4"


def test_the_recorder_itself_is_there() -> None:
    """As it is called: with the words that this torch knows."""
    assert "torch" in sys.modules
    assert (
        "entries"
        in pickle.loads(c10d._dump_nccl_trace(includeCollectives=True, includeStackTraces=False))
        or not torch.distributed.is_nccl_available()
    )
