"""Reads the ranks' samples again in a single process: the same indices of the same loader.

Each rank also reads some of its own indices with the same RNG states on all ranks. Sample fields
that change on every read are treated as random and are not compared.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from distcheck.job.inside import tensors
from distcheck.job.settings import SampleComparison
from distcheck.machine.compat import MapFetcher
from distcheck.machine.seeds import seed_everything
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import LoadedBatch, RereadSample

_LEAST_ROWS = 8  # Heuristic: labels of ten classes then agree by chance once in 10^8
_MOST_BATCHES = 8
_MOST_S = 5.0  # Heuristic: time for rereading samples at the end of a recording


def compare_reread_samples(job: JobRecording, number: int, loader: Any) -> list[SampleComparison]:
    """Compare the first samples of every rank as recorded and as read by a single process."""
    before = tensors.random_state()
    try:
        return [
            read for rank in range(job.world) if (read := _compare_rank(job, rank, number, loader))
        ]
    except Exception:  # code of the script, which may use another data set in a single process
        return []
    finally:
        tensors.set_random_state(before)


def read_with_equal_rng(loaders: Mapping[int, Any]) -> Iterator[RereadSample]:
    """Yield this rank's samples for the first indices of each loader. Call it after recording: a
    data set may change by being read.
    """
    before, until = tensors.random_state(), time.monotonic() + _MOST_S
    with contextlib.suppress(Exception):  # code of the script
        for number, loader in loaders.items():
            for index in range(min(_LEAST_ROWS, len(loader.dataset))):
                once, again = (_parts(_make_fetcher(loader), index) for _ in range(2))
                if once == again and once:
                    yield RereadSample(loader=number, index=index, parts=once)
                if time.monotonic() > until:
                    break
    tensors.set_random_state(before)


def _parts(fetcher: MapFetcher, index: int) -> tuple[str, ...]:
    seed_everything(0)
    found = tensors.leaves(fetcher.fetch([index] if fetcher.auto_collation else index))
    found.sort(key=lambda one: -one.numel())
    return tuple(tensors.digest_of(tensors.unsharded_on_cpu(one)) for one in found)


def _make_fetcher(loader: Any) -> MapFetcher:
    collates = getattr(loader, "batch_sampler", True) is not None
    return MapFetcher(loader.dataset, collates, loader.collate_fn, drop_last=False)


def _compare_rank(
    job: JobRecording, rank: int, number: int, loader: Any
) -> SampleComparison | None:
    fetcher = _make_fetcher(loader)
    parts: list[list[tuple[str, ...]]] = []
    sizes: list[int] = []
    rows = 0
    for step, batch in _first_batches(job, rank, number):
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
                parts[place][kind] += tensors.digests_of_samples([leaf.detach().cpu()])
        rows += len(batch.indices)
        if rows >= _LEAST_ROWS:
            return SampleComparison(rank=rank, parts=tuple(map(_kind, parts)), sizes=tuple(sizes))
    return None


def _first_batches(job: JobRecording, rank: int, number: int) -> Iterator[tuple[int, LoadedBatch]]:
    found = [
        (step, batch)
        for step in job.steps
        for batch in job.records[rank, step].batches
        if batch.loader == number and batch.indices and batch.epoch == 0
    ]
    yield from found[:_MOST_BATCHES]


def _kind(part: list[tuple[str, ...]]) -> str:
    """Classify a sample field: random, equal to the recorded one (or constant), or other."""
    recorded, once, again = part
    if once != again:
        return "random"
    if recorded == once:
        return "same" if len(set(once)) > 1 else "constant"
    return "other"
