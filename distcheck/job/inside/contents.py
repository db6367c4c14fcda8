"""What one process reads of the samples that ranks were given: the same indices, read once more.
And what each rank reads for some of its own indices, with random streams that are alike on all.

A part of a sample that is another one each time is made by chance, and is not compared.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from distcheck.job.inside import tensors
from distcheck.job.settings import Read
from distcheck.machine.compat import MapFetcher
from distcheck.machine.seeds import seed_everything
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import LoadedBatch, Sample

_LEAST_ROWS = 8  # chosen: labels of ten classes are then alike by chance once in 10^8
_MOST_BATCHES = 8
_MOST_S = 5.0  # chosen: for samples that are read once more at the end of a recording


def read_again(job: JobRecording, number: int, loader: Any) -> list[Read]:
    """What one process reads of the first samples of every rank, next to what the rank had."""
    before = tensors.random_state()
    try:
        return [read for rank in range(job.world) if (read := _of_rank(job, rank, number, loader))]
    except Exception:  # the script's own code: it may have another data set as one process
        return []
    finally:
        tensors.set_random_state(before)


def read_alike(loaders: Mapping[int, Any]) -> Iterator[Sample]:
    """What this rank reads of each loader for the first indices. Called when all is recorded: a
    data set may not be the same after that.
    """
    before, until = tensors.random_state(), time.monotonic() + _MOST_S
    with contextlib.suppress(Exception):  # the script's own code
        for number, loader in loaders.items():
            for index in range(min(_LEAST_ROWS, len(loader.dataset))):
                once, again = (_parts(_fetcher(loader), index) for _ in range(2))
                if once == again and once:
                    yield Sample(loader=number, index=index, parts=once)
                if time.monotonic() > until:
                    break
    tensors.set_random_state(before)


def _parts(fetcher: MapFetcher, index: int) -> tuple[str, ...]:
    seed_everything(0)
    found = tensors.leaves(fetcher.fetch([index] if fetcher.auto_collation else index))
    found.sort(key=lambda one: -one.numel())
    return tuple(tensors.digest_of(tensors.whole(one)) for one in found)


def _fetcher(loader: Any) -> MapFetcher:
    collates = getattr(loader, "batch_sampler", True) is not None
    return MapFetcher(loader.dataset, collates, loader.collate_fn, drop_last=False)


def _of_rank(job: JobRecording, rank: int, number: int, loader: Any) -> Read | None:
    fetcher = _fetcher(loader)
    parts: list[list[tuple[str, ...]]] = []
    sizes: list[int] = []
    rows = 0
    for step, batch in _batches(job, rank, number):
        recorded = [job.tensors(rank, step)[f"data/{name}"] for name in batch.leaves]
        asked: Any = list(batch.indices) if fetcher.auto_collation else batch.indices[0]
        once, again = (tensors.leaves(fetcher.fetch(asked)) for _ in range(2))
        several = (recorded, once, again)
        if len({len(one) for one in several}) != 1:
            return None
        for place, leaves in enumerate(zip(*several, strict=True)):
            if place == len(parts):
                parts.append([(), (), ()])
                sizes.append(leaves[0].numel())
            for kind, leaf in enumerate(leaves):
                parts[place][kind] += tensors.rows_of([leaf.detach().cpu()])
        rows += len(batch.indices)
        if rows >= _LEAST_ROWS:
            return Read(rank=rank, parts=tuple(map(_kind, parts)), sizes=tuple(sizes))
    return None


def _batches(job: JobRecording, rank: int, number: int) -> Iterator[tuple[int, LoadedBatch]]:
    """Of the first ones that a rank had of a loader."""
    found = [
        (step, batch)
        for step in job.steps
        for batch in job.records[rank, step].batches
        if batch.loader == number and batch.indices and batch.epoch == 0
    ]
    yield from found[:_MOST_BATCHES]


def _kind(part: list[tuple[str, ...]]) -> str:
    """How a part of samples was read: always alike, as it was recorded, or otherwise."""
    recorded, once, again = part
    if once != again:
        return "random"
    if recorded == once:
        return "same" if len(set(once)) > 1 else "constant"
    return "other"
