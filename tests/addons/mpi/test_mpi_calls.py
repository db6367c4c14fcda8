"""What the backend mpi records of its calls."""

import torch

from distcheck.addons.mpi import calls
from distcheck.worlds import flight


def _called(what: str, group: str) -> calls.MPICall:
    """As a method of the group's does, which a line of this file calls by way of the backend."""
    code = compile("found = record(what, group, [ones], [ones, ones])", calls.__file__, "exec")
    names = {"record": calls.record_call, "what": what, "group": group, "ones": torch.ones(2, 3)}
    exec(code, names)
    found: calls.MPICall = names["found"]  # type: ignore[assignment]
    return found


def test_calls_are_recorded_as_torch_would() -> None:
    calls.clear_record()
    calls.reset_counters("g")
    first, sent, second = (
        _called(what, "g") for what in ("all_gather_into_tensor", "send", "barrier")
    )
    other = _called("all_reduce", "h")
    assert calls.count_of("g") == 3
    entries = calls.recorded_entries()
    assert [flight.name_of(e) for e in entries] == ["all_gather", "send", "barrier", "all_reduce"]
    assert [e["op_id"] for e in entries] == [1, 2, 3, other.of_all]
    assert [flight.number_of(e) for e in entries[:3]] == [1, 1, 2], "messages count by themselves"
    assert [e["is_p2p"] for e in entries] == [False, True, False, False]
    assert flight.shapes_of(entries[0]) == "2x3"
    assert len(entries[0]["output_sizes"]) == 2
    assert entries[0]["input_dtypes"] == ["float32"]
    assert entries[0]["frames"][-1]["filename"] == __file__
    assert flight.is_incomplete(entries[1])
    sent.complete = True
    assert not flight.is_incomplete(calls.recorded_entries()[1])
    assert (first.number, second.number) == (1, 2)
    calls.reset_counters("g")
    assert _called("barrier", "g").number == 1, "another group of that name"
    calls.clear_record()
    assert calls.recorded_entries() == []
