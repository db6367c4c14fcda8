"""What ranks write is what checks read, and equal bits are stored once."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcheck.judge.checks.comparison import compare_bitwise
from distcheck.recordings.recording import EntrySource, EntryState, Kind
from distcheck.recordings.traces import files
from distcheck.recordings.traces.header import StepHeader, StepLines, lines_capacity
from distcheck.recordings.traces.layout import (
    BYTES,
    OWNED_BY,
    TOGETHER,
    TraceLayout,
    memory_order,
    spec_bytes,
    steps_written,
    strides_in,
)
from distcheck.recordings.traces.reader import TraceReader
from distcheck.recordings.traces.writer import TraceWriter
from distcheck.records import ModelLayout, TensorSpec

MODEL = ModelLayout(
    parameters=(
        TensorSpec(name="weight", shape=(3, 5), dtype="float32"),
        TensorSpec(name="half", shape=(7,), dtype="bfloat16"),
        TensorSpec(name="scalar", shape=(), dtype="float32"),
        TensorSpec(name="empty", shape=(0, 4), dtype="float32"),
    ),
    buffers=(TensorSpec(name="count", shape=(), dtype="int64"),),
    optimizer=(TensorSpec(name="weight/momentum_buffer", shape=(3, 5), dtype="float32"),),
)
LAYOUT = TraceLayout(world=2, steps=2, max_shard=5, model=MODEL)


def new_file() -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, LAYOUT.total_bytes)
    return fd


@pytest.fixture
def fd() -> Iterator[int]:
    fd = new_file()
    yield fd
    os.close(fd)


LINES = StepLines(("", "/a.py:3"), (1,), ((1,), (), (1,), ()), ((), (0,), (), ()), (True,) * 4)


def test_lines_are_read_as_they_were_written() -> None:
    layout = msgspec.structs.replace(LAYOUT, line_bytes=lines_capacity(4))
    fd = os.memfd_create("lines")
    os.ftruncate(fd, layout.total_bytes)
    TraceWriter(fd, layout, 1).put_lines(1, LINES)
    reader = TraceReader(fd, layout)
    assert reader.lines(1, 1) == LINES
    assert [reader.lines(*place) for place in ((0, 0), (0, 1), (1, 0))] == [None] * 3
    os.close(fd)


@pytest.mark.parametrize(
    "wrong",
    [
        StepLines(("/a.py:3",), (1,), LINES.given, LINES.perhaps, LINES.known),  # no such line
        StepLines(LINES.lines, (1,), ((),), ((),), (True,)),  # of one parameter
        StepLines(tuple(f"/a.py:{n}" for n in range(99)), (), ((),) * 4, ((),) * 4, (True,) * 4),
        StepLines(("/" + "a" * 5000 + ".py:3", ""), (1,), LINES.given, LINES.perhaps, LINES.known),
    ],
)
def test_lines_that_do_not_fit_are_none(wrong: StepLines) -> None:
    layout = msgspec.structs.replace(LAYOUT, line_bytes=lines_capacity(4))
    with tempfile.TemporaryFile() as file:
        file.truncate(layout.total_bytes)
        TraceWriter(file.fileno(), layout, 0).put_lines(0, wrong)
        assert TraceReader(file.fileno(), layout).lines(0, 0) is None
        assert TraceReader(file.fileno(), layout).steps_written() == 0


@given(st.binary(max_size=256))
def test_any_bytes_in_the_place_of_lines_are_lines_or_none(data: bytes) -> None:
    layout = msgspec.structs.replace(LAYOUT, world=1, steps=1, line_bytes=lines_capacity(4))
    with tempfile.TemporaryFile() as file:
        file.truncate(layout.total_bytes)
        at = layout.lines_offset(0, 0)
        os.pwrite(file.fileno(), len(data).to_bytes(4, "little") + data, at)
        found = TraceReader(file.fileno(), layout).lines(0, 0)
        assert found is None or len(found.given) == 4


def tensor_of(spec: TensorSpec, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    return torch.randint(-99, 99, spec.shape, generator=generator).to(dtype)


def places() -> list[tuple[int, Kind, int, int]]:
    return [
        (rank, kind, slot, index)
        for rank in range(LAYOUT.world)
        for kind in Kind
        for slot in range(LAYOUT.slots(kind))
        for index in range(len(LAYOUT.specs(kind)))
    ]


def test_a_pipe_in_place_of_a_slot_is_not_waited_for(fd: int, tmp_path: Path) -> None:
    digest = files._save(tmp_path, LAYOUT, fd)
    slot = tmp_path / "slot-001.safetensors"
    slot.unlink()
    os.mkfifo(slot)
    with pytest.raises(ValueError, match=r"slot-001\.safetensors is not a regular"):
        files._load(tmp_path, LAYOUT, new_file(), digest)


def test_a_gradient_that_one_rank_owns_is_the_owners_on_every_rank(fd: int, tmp_path: Path) -> None:
    spec = MODEL.parameters[0]
    for rank in range(2):
        writer = TraceWriter(fd, LAYOUT, rank)
        writer.put(Kind.GRADIENT, 0, 0, tensor_of(spec, rank), order=OWNED_BY + 1)
        writer.put(Kind.GRADIENT, 0, 1, None, order=OWNED_BY + 7)  # of a damaged file
        writer.put(Kind.GRADIENT, 0, 2, tensor_of(MODEL.parameters[2], rank), order=TOGETHER)
    tmp_path.joinpath("run-1").mkdir()
    digest = files._save(tmp_path / "run-1", LAYOUT, fd)
    files._load(tmp_path / "run-1", LAYOUT, again := new_file(), digest)
    for reader in (TraceReader(fd, LAYOUT), TraceReader(again, LAYOUT)):
        for rank in range(2):
            found, own = (
                take(rank, Kind.GRADIENT, 0, 0) for take in (reader.tensor, reader.own_tensor)
            )
            assert found is not None
            assert own is not None
            assert torch.equal(found, tensor_of(spec, 1))
            assert torch.equal(own, tensor_of(spec, rank))
            assert reader.entry(rank, Kind.GRADIENT, 0, 0).together
            owners = [reader.owner(rank, Kind.GRADIENT, 0, index) for index in range(3)]
            assert owners == [1, None, None]
            assert reader.entry(rank, Kind.GRADIENT, 0, 1).state is EntryState.ABSENT
            assert reader.entry(rank, Kind.GRADIENT, 0, 2).together
    os.close(again)


def test_everything_comes_back(fd: int) -> None:
    writers = [TraceWriter(fd, LAYOUT, rank) for rank in range(2)]
    for number, (rank, kind, slot, index) in enumerate(places()):
        writers[rank].put(kind, slot, index, tensor_of(LAYOUT.specs(kind)[index], number))
    reader = TraceReader(fd, LAYOUT)
    for number, (rank, kind, slot, index) in enumerate(places()):
        found = reader.tensor(rank, kind, slot, index)
        assert found is not None
        assert torch.equal(found, tensor_of(LAYOUT.specs(kind)[index], number))


def test_equal_bits_are_stored_once_and_local_gradients_are_not_shared(fd: int) -> None:
    writers = [TraceWriter(fd, LAYOUT, rank) for rank in range(2)]
    tensor = tensor_of(MODEL.parameters[0], 1)
    for writer in writers:
        writer.put(Kind.GRADIENT, 0, 0, tensor)
        writer.put(Kind.LOCAL_GRADIENT, 0, 0, tensor)
    reader = TraceReader(fd, LAYOUT)
    assert reader.entry(1, Kind.GRADIENT, 0, 0).holder == 0
    assert reader.entry(1, Kind.LOCAL_GRADIENT, 0, 0).holder == 1
    found = reader.tensor(1, Kind.GRADIENT, 0, 0)
    assert found is not None
    assert torch.equal(found, tensor)


def test_a_rerun_refers_to_its_baseline(fd: int) -> None:
    again = new_file()
    same, other = tensor_of(MODEL.parameters[0], 1), tensor_of(MODEL.parameters[0], 2)
    TraceWriter(fd, LAYOUT, 1).put(Kind.PARAMETER, 0, 0, same)
    writer = TraceWriter(again, LAYOUT, 1, baseline_fd=fd)
    writer.put(Kind.PARAMETER, 0, 0, same)
    writer.put(Kind.PARAMETER, 1, 0, other)
    baseline = TraceReader(fd, LAYOUT)
    reader = TraceReader(again, LAYOUT, baseline=baseline)
    assert reader.entry(1, Kind.PARAMETER, 0, 0).source is EntrySource.BASELINE
    assert reader.entry(1, Kind.PARAMETER, 1, 0).source is EntrySource.OWN
    for slot, expected in ((0, same), (1, other)):
        found = reader.tensor(1, Kind.PARAMETER, slot, 0)
        assert found is not None
        assert torch.equal(found, expected)
    assert torch.equal(writer.read_back(Kind.PARAMETER, 0, 0), same)
    with pytest.raises(LookupError):
        TraceReader(again, LAYOUT).tensor(1, Kind.PARAMETER, 0, 0)
    os.close(again)


def test_absent_malformed_and_unwritten_are_told_apart(fd: int) -> None:
    writer = TraceWriter(fd, LAYOUT, 0)
    writer.put(Kind.GRADIENT, 0, 0, None)
    writer.put(Kind.GRADIENT, 0, 1, torch.zeros(7))  # float32 where bfloat16 belongs
    writer.put(Kind.GRADIENT, 1, 0, torch.zeros(5, 3))
    reader = TraceReader(fd, LAYOUT)
    states = [
        reader.entry(0, Kind.GRADIENT, slot, index).state
        for slot, index in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert states == [
        EntryState.ABSENT, EntryState.MALFORMED, EntryState.MALFORMED, EntryState.UNWRITTEN,
    ]  # fmt: skip
    assert reader.tensor(0, Kind.GRADIENT, 0, 0) is None
    assert reader.tensor(0, Kind.GRADIENT, 0, 1) is None


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", BYTES)
def test_every_dtype_comes_back_also_from_files(fd: int, dtype: str, tmp_path: Path) -> None:
    spec = TensorSpec(name="tensor", shape=(2, 3), dtype=dtype)
    model = ModelLayout(parameters=(), buffers=(spec,), optimizer=())
    layout = TraceLayout(world=1, steps=1, max_shard=1, model=model)
    bytes_of_it = torch.arange(spec_bytes(spec), dtype=torch.uint8) % (2 if dtype == "bool" else 99)
    tensor = bytes_of_it.view(getattr(torch, dtype)).view(spec.shape)
    again = os.memfd_create("test")
    try:
        for file in (fd, again):
            os.ftruncate(file, layout.total_bytes)
        for slot in range(2):
            TraceWriter(fd, layout, 0).put(Kind.BUFFER, slot, 0, tensor)
        index = files._save(tmp_path, layout, fd)
        files._load(tmp_path, layout, again, index)
        for file in (fd, again):
            found = TraceReader(file, layout).tensor(0, Kind.BUFFER, 1, 0)
            assert found is not None
            assert found.dtype == tensor.dtype
            assert compare_bitwise(found, tensor).ok
            assert torch.empty_like(tensor).copy_(found).shape == spec.shape  # as references do
    finally:
        os.close(again)


def test_strided_tensors_are_recorded_in_logical_order(fd: int) -> None:
    strided = torch.arange(15.0).view(5, 3).t()
    TraceWriter(fd, LAYOUT, 0).put(Kind.PARAMETER, 0, 0, strided)
    found = TraceReader(fd, LAYOUT).tensor(0, Kind.PARAMETER, 0, 0)
    assert found is not None
    assert torch.equal(found, strided)


def test_conjugates_and_negatives_are_recorded_as_the_numbers_they_are(fd: int) -> None:
    """torch may only mark them, and leave the other sign in memory."""
    complex_model = ModelLayout(
        parameters=(
            TensorSpec(name="complex", shape=(3,), dtype="complex64"),
            TensorSpec(name="real", shape=(3,), dtype="float32"),
        ),
        buffers=(),
        optimizer=(),
    )
    layout = TraceLayout(world=1, steps=1, max_shard=1, model=complex_model)
    os.ftruncate(fd, layout.total_bytes)
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    assert conjugate.is_conj()
    assert conjugate.imag.is_neg()
    writer, reader = TraceWriter(fd, layout, 0), TraceReader(fd, layout)
    for index, tensor in enumerate((conjugate, conjugate.imag)):
        writer.put(Kind.GRADIENT, 0, index, tensor)
        found = reader.tensor(0, Kind.GRADIENT, 0, index)
        assert found is not None
        assert torch.equal(found, tensor)


def test_headers_come_back_and_close_a_step(fd: int) -> None:
    state = bytes(range(256)) * 19
    for rank in range(2):
        writer = TraceWriter(fd, LAYOUT, rank)
        assert TraceReader(fd, LAYOUT).steps_written() == 0
        given = StepHeader(
            ids=(5, 9, 2**40), loss=0.1, loss_factor=0.75, epoch=3, rng_state=state,
            ready_order=(2, 0, 1), library_states=state[:99],
        )  # fmt: skip
        writer.put_header(0, given)
    reader = TraceReader(fd, LAYOUT)
    header = reader.header(1, 0)
    assert header.written
    assert header.ids == (5, 9, 2**40)
    assert (header.loss, header.loss_factor, header.epoch) == (0.1, 0.75, 3)
    assert (header.rng_state, header.library_states) == (state, state[:99])
    assert header.ready_order == (2, 0, 1)
    assert reader.steps_written() == 1
    assert steps_written(os.pread(fd, LAYOUT.index_bytes, 0), LAYOUT) == 1


def test_a_sparse_trace_takes_up_only_what_was_written(fd: int) -> None:
    assert os.fstat(fd).st_blocks == 0


@given(
    world=st.integers(1, 5),
    steps=st.integers(1, 4),
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5),
)
def test_regions_do_not_overlap(world: int, steps: int, shapes: list[tuple[int, int]]) -> None:
    specs = tuple(
        TensorSpec(name=str(i), shape=shape, dtype="float32") for i, shape in enumerate(shapes)
    )
    layout = TraceLayout(
        world=world, steps=steps, max_shard=3,
        model=ModelLayout(parameters=specs, buffers=(), optimizer=specs),
    )  # fmt: skip
    spans = sorted(
        (layout.data_offset(rank, kind, slot, index), 4 * layout.specs(kind)[index].elements)
        for rank in range(world)
        for kind in Kind
        for slot in range(layout.slots(kind))
        for index in range(len(layout.specs(kind)))
    )
    end = layout.index_bytes
    for begin, size in spans:
        assert begin >= end
        end = begin + size if size else end
    assert end <= layout.total_bytes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.randoms())
def test_a_memory_order_gives_back_the_strides(shape: list[int], random: object) -> None:
    """Of a dense tensor in any order, dimensions of size 1 included."""
    places = list(range(len(shape)))
    random.shuffle(places)  # type: ignore[attr-defined]
    packed = torch.empty([shape[place] for place in places])
    tensor = packed.permute([places.index(place) for place in range(len(shape))])
    order = memory_order(tensor.shape, tensor.stride())
    strides = strides_in(order, tensor.shape)
    again = torch.empty_strided(tensor.shape, strides)
    assert again.numel() == again.untyped_storage().nbytes() // 4
    same = [s == t for s, t, n in zip(strides, tensor.stride(), shape, strict=True) if n > 1]
    assert all(same)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 1, 1), (1, 1, 5, 5), (4, 1, 3, 3)])
def test_channels_last_is_told_from_contiguous(shape: tuple[int, ...], fd: int) -> None:
    tensors = [torch.empty(shape), torch.empty(shape).to(memory_format=torch.channels_last)]
    for tensor in tensors:
        order = memory_order(tensor.shape, tensor.stride())
        assert strides_in(order, tensor.shape) == tensor.stride()
    TraceWriter(fd, LAYOUT, 0).put(Kind.PARAMETER, 0, 0, torch.zeros(3, 5), order=0x10)
    assert TraceReader(fd, LAYOUT).entry(0, Kind.PARAMETER, 0, 0).order == 0x10
