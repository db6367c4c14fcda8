"""Devices: how many GPUs a process will see, what is refused, and which cases a GPU adds."""

import struct
import sys
from pathlib import Path

import pytest

from distcheck.contract import Contract
from distcheck.errors import CannotRunError, UsageError
from distcheck.machine import devices, seeds
from distcheck.plan.cases import check_case
from distcheck.testing.verifying import verify
from distcheck.workloads.cells import CELLS
from tests.optional import needs_all
from tests.unit.test_plan import cases, checks


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("0", 1),
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-abc", 1),
        ("0,1,2", 2),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    files = [Path(f"/dev/{n}") for n in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: files)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.gpu_count(environ) == count


def test_generators_come_back() -> None:
    import torch

    from distcheck.recordings.traces.layout import CPU_RNG_STATE_BYTES, RNG_STATE_BYTES

    cpu = torch.device("cpu")
    state = devices.rng_state(cpu)
    assert len(state) == CPU_RNG_STATE_BYTES < RNG_STATE_BYTES
    drawn = torch.rand(5)
    devices.set_rng_state(state, cpu, CPU_RNG_STATE_BYTES)
    assert torch.equal(torch.rand(5), drawn)


def test_generators_of_libraries_come_back() -> None:
    import random

    import numpy.random

    def drawn() -> list[float]:
        normal = [random.gauss(0, 1), numpy.random.normal()]  # of which the other half is kept
        return [*normal, random.random(), numpy.random.random()]

    for _ in range(2):  # with and without such a half
        states = seeds.library_rng_states()
        assert len(states) == seeds.LIBRARY_STATES_BYTES
        before = drawn()
        assert not seeds.library_rng_states().startswith(states)
        seeds.set_library_states(states)
        assert drawn() == before


def test_a_position_outside_of_a_generator_is_refused() -> None:
    """NumPy reads at any position: memory of the process came out as random numbers."""
    import numpy.random

    half = seeds.LIBRARY_STATES_BYTES // 2
    states, at = seeds.library_rng_states(), half + 4 * 624
    try:
        for position in (0, 624):
            seeds.set_library_states(states[:at] + struct.pack("<I", position) + states[at + 4 :])
            assert numpy.random.get_state()[2] == position
        for position in (625, 700, 2_000_000_000, 2**32 - 1):
            with pytest.raises(ValueError, match=f"is not at {position}"):
                seeds.set_library_states(
                    states[:at] + struct.pack("<I", position) + states[at + 4 :]
                )
    finally:
        seeds.set_library_states(states)


def test_numpy_is_not_loaded_for_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    states = seeds.library_rng_states()
    assert len(states) < seeds.LIBRARY_STATES_BYTES
    before = random.random()
    seeds.set_library_states(states)
    assert random.random() == before
    assert "numpy.random" not in sys.modules


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        (0, {"backend": "nccl"}, "backend nccl needs an NVIDIA GPU; this machine has none"),
        (0, {"device": "cuda"}, "device 'cuda' is not available: this machine has no NVIDIA GPU"),
        (1, {"backend": "nccl"}, "moves tensors between GPUs only; pass --device cuda as well"),
        (1, {"backend": "mpi", "device": "cuda"}, "backend mpi takes CPU tensors only"),
        (1, {"backend": "simulated:tree", "device": "cuda"},
         "simulated:tree takes CPU tensors only"),
        (0, {"backend": "simulated", "ranks_here": 1}, "start distcheck without a launcher"),
    ],
)  # fmt: skip
@needs_all
def test_what_is_not_there_cannot_run(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: dict[str, object], said: str
) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: gpus)
    monkeypatch.setattr("distcheck.addons.mpi.missing", lambda: "")
    with pytest.raises(CannotRunError, match=said):
        cases(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "ucc"}, "unknown backend 'ucc'; known are gloo, mpi, nccl, simulated; "),
        ({"device": "xla"}, "unknown device 'xla'; known are cpu and cuda"),
    ],
)
@needs_all
def test_an_unknown_name_is_a_slip_and_only_what_can_run_is_offered(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], said: str
) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    monkeypatch.setattr("distcheck.addons.mpi.missing", lambda: "no MPI here")
    with pytest.raises(UsageError, match=said):
        cases(**options)


def test_cells_without_a_whole_batch_have_none_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    held = [
        case.workload
        for case in cases(device="cuda", thorough=True)
        if case.judging_device == "cpu"
    ]
    required = {name for name, cell in CELLS.items() if "full batch float32" not in cell.without}
    assert "mixed_dtypes" not in required
    assert set(held) == {"cnn"} | required


def test_cases_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the CPU, judged on the GPU, and the whole batch on the CPU to compare with."""
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    found = {case.id: case for case in cases(device="cuda")}
    assert list(found) == [
        "allreduce-w4-exact-float32-cuda", "allreduce-w4-cnn-float32-cuda",
        "allreduce-w4-composite-float32-cuda", "allreduce-w4-composite-float64-cuda",
        "allreduce-w4-twelve_steps-float32-cuda", "allreduce-w4-cnn-float32-cuda-against-cpu",
    ]  # fmt: skip
    assert [case.judging_device for case in found.values()] == [*["cuda"] * 5, "cpu"]
    against = found["allreduce-w4-cnn-float32-cuda-against-cpu"]
    assert against.layers == ("full batch float32",)
    assert {check for check, _ in checks(against, Contract())} == {
        "outcome", "data", "initial state", "gradients", "loss", "agreement", "sensitivity",
    }  # fmt: skip
    assert check_case(against) == against, "it can be replayed"


def test_a_verification_from_python_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    with pytest.raises(CannotRunError, match="device 'cuda' is not available"):
        verify("allreduce", device="cuda")
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        verify("allreduce", device="tpu")
