"""The jobs of a rank: to train and record, or only to train."""

import msgspec
import torch

from distcheck import seeds
from distcheck.jobs import RecordJob
from distcheck.loading import load_strategy
from distcheck.ranks.loop import Loop
from distcheck.ranks.recorder import TraceRecorder
from distcheck.ranks.training import open_ingredients
from distcheck.traces.writer import TraceWriter
from distcheck.worlds.child import Reporter
from distcheck.worlds.rendezvous import join


def record(payload: bytes, fds: list[int], reporter: Reporter) -> bytes:
    """Runs one recording rank."""
    job = msgspec.msgpack.decode(payload, type=RecordJob)
    remaining = list(fds)
    listen_fd, trace_fd = remaining.pop(0), remaining.pop(0)
    data_fd = remaining.pop(0) if job.has_data else None
    baseline_fd = remaining.pop(0) if job.has_baseline else None
    rank = job.rendezvous.rank
    seeds.pin_determinism()
    reporter.progress(0, "rendezvous")
    join(job.rendezvous, listen_fd)
    reporter.progress(0, "load")
    ingredients = open_ingredients(job.case, job.description, data_fd)
    strategy = load_strategy(job.case.strategy)
    writer = TraceWriter(trace_fd, job.layout, rank, baseline_fd)
    recorder = TraceRecorder(writer, job.layout)
    loop = Loop(ingredients, strategy, recorder, rank=rank, progress=reporter.progress)
    for step in range(job.case.steps):
        loop.step(step)
    reporter.progress(job.case.steps, "close")
    loop.close()
    return str(torch.get_num_threads()).encode()
