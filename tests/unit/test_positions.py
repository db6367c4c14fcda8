"""Shards of a step are the batch that one process would read, dealt out as torch deals."""

from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from distcheck.training.epoch_positions import epoch_segment_of_step, shard_sizes, steps_per_epoch
from distcheck.training.loading import load_workload
from distcheck.training.loop import ShardReader

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 300)).map(
    lambda t: (t[0], max(t[0], t[1]), max(t[0], t[1]) + t[2])  # world <= batch <= size
)


def read(size: int, batch: int, world: int, step: int) -> list[list[int]]:
    loaded = load_workload("mlp")
    return [
        ShardReader(loaded, size=size, batch=batch, world=world, rank=rank, seed=7)
        .read(step)[1]
        .tolist()
        for rank in range(world)
    ]


@given(SHAPES)
def test_an_epoch_is_covered_once_except_its_end(shape: tuple[int, int, int]) -> None:
    world, batch, size = shape
    steps = steps_per_epoch(size, batch, world)
    seen = [i for step in range(steps) for shard in read(size, batch, world, step) for i in shard]
    assert len(seen) == len(set(seen))
    assert size - len(seen) < world
    assert set(seen) <= set(range(size))


@given(SHAPES, st.integers(0, 3))
def test_a_step_reads_what_one_process_reads(shape: tuple[int, int, int], step: int) -> None:
    world, batch, size = shape
    if steps_per_epoch(size, batch, world) != steps_per_epoch(size, batch, 1):
        return  # one process also reads the last few samples
    alone = read(size, batch, 1, step)[0]
    together = read(size, batch, world, step)
    assert sorted(alone) == sorted(i for shard in together for i in shard)
    lengths = [len(shard) for shard in together]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == shard_sizes(step + 1, size=size, batch=batch, world=world)[step]


def test_ranks_walk_torchs_sampler() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(
        range(1000),  # type: ignore[arg-type]
        num_replicas=4,
        rank=2,
        seed=ShardReader(load_workload("mlp"), size=8, batch=8, world=1, rank=0, seed=7)._seed,
    )
    order = list(sampler)
    shards = [read(1000, 64, 4, step)[2] for step in range(3)]
    assert [i for shard in shards for i in shard] == order[: 3 * 16]


def test_epochs_differ() -> None:
    assert epoch_segment_of_step(4, size=512, batch=128, world=2).epoch == 1
    assert read(512, 128, 2, 0) != read(512, 128, 2, 4)
