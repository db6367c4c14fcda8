"""Every sample that a single process would read at a step is read by exactly one rank.

The expectation is computed by position, without a sampler: position p of the epoch's shuffle
belongs to rank p mod W at step p div batch, for the W ranks with data. A workload with a custom
sampler has fewer requirements: no sample twice in an epoch, shards of the right size, and a
different order in every epoch. In a mesh, ranks of one data coordinate read the same samples. Ranks
that draw equal random numbers for different samples get only a warning, because a workload may not
draw any.
"""

from collections.abc import Sequence

import torch

from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.tally import Tally
from distcheck.machine import seeds
from distcheck.recordings.traces.header import StepHeader
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import FindingKind
from distcheck.records.odd_ranks import grouped

OVER_STEPS = True  # judges all recorded steps together


def compare(evidence: Evidence, tally: Tally) -> None:
    case, world = evidence.case, len(evidence.with_data)
    size = evidence.facts.train_size
    own_sampler = evidence.facts.own_sampler
    per_epoch = size // case.batch + (size % case.batch >= world)
    seen: dict[int, dict[int, tuple[int, int]]] = {}  # epoch -> sample -> (rank, step)
    for step in range(evidence.trace.steps_written()):
        epoch, within = divmod(step, per_epoch)
        first = within * case.batch
        count = min(case.batch, size - first)
        order = _shuffle(size, case.seed, epoch)
        for rank, position in _positions(evidence).items():
            header = evidence.trace.header(rank, step)
            mine = [p for p in range(first, first + count) if p % world == position]
            expected = [order[p] for p in mine]
            tally.count(parameter="", rank=rank, step=step, elements=len(header.ids))
            if len(header.ids) != len(expected) or not own_sampler:
                _compare_ids(tally, header, expected, rank, step)
            if rank in evidence.with_data:
                _no_sample_twice(tally, header, seen.setdefault(epoch, {}), rank, step)
            elif own_sampler:
                first_of = evidence.trace.header(evidence.with_data[position], step)
                _compare_ids(tally, header, list(first_of.ids), rank, step)
    if own_sampler:
        _orders_differ(tally, evidence, per_epoch)
    if evidence.facts.draws_random_numbers:
        _remark_on_random_numbers(tally, evidence)


def first_shared_rng_state(
    trace: TraceReader, ranks: Sequence[int]
) -> tuple[str, int, tuple[tuple[int, ...], ...]]:
    """Return the first step that several ranks started from one RNG state, as (library, step,
    groups of these ranks). Return an empty tuple if all states differ.
    """
    half = seeds.LIBRARY_STATES_BYTES // 2
    for step in range(trace.steps_written()):
        headers = [trace.header(rank, step) for rank in ranks]
        both = [header.library_states for header in headers]
        for library, states in (
            ("torch", [header.rng_state for header in headers]),
            ("random", [state[:half] for state in both]),
            ("NumPy", [state[half:] for state in both]),
        ):
            by_rank = dict(zip(ranks, states, strict=True))
            groups = grouped(by_rank, by_rank.__getitem__)
            alike = tuple(tuple(g) for state, g in groups.items() if state and len(g) > 1)
            if alike:
                return library, step, alike
    return "", 0, ()


def _remark_on_random_numbers(tally: Tally, evidence: Evidence) -> None:
    library, step, groups = first_shared_rng_state(evidence.trace, evidence.with_data)
    if groups:
        ranks = "; ".join(", ".join(map(str, group)) for group in groups)
        tally.remark(
            f"ranks {ranks} begin step {step} with the same RNG state of {library}, which "
            "distcheck had seeded differently: dropout masks or noise drawn from it are "
            "identical copies",
            FindingKind.DREW_ALIKE,
        )


def _positions(evidence: Evidence) -> dict[int, int]:
    """Return each rank's shard index: its position among ranks with data or data coordinate."""
    if evidence.mesh is None:
        return {rank: position for position, rank in enumerate(evidence.with_data)}
    return {rank: evidence.mesh.coordinate(rank, "data") for rank in evidence.ranks}


def _shuffle(size: int, seed: int, epoch: int) -> list[int]:
    """Return the order in which a single process with torch's shuffle reads an epoch."""
    generator = torch.Generator()
    generator.manual_seed(seeds.derive(seed, "data order") % 2**31 + epoch)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def _compare_ids(
    tally: Tally, header: StepHeader, expected: list[int], rank: int, step: int
) -> None:
    if list(header.ids) == expected:
        return
    missing = len(set(expected) - set(header.ids))
    tally.fail(
        f"rank {rank} read {len(header.ids)} samples at step {step}, but {missing} of its "
        f"{len(expected)} samples are missing",
        parameter="sample ids",
        rank=rank,
        step=step,
        actual=float(header.ids[0]) if header.ids else "none",
        expected=float(expected[0]),
    )


def _no_sample_twice(
    tally: Tally, header: StepHeader, seen: dict[int, tuple[int, int]], rank: int, step: int
) -> None:
    twice = 0
    for sample in header.ids:
        if sample in seen:
            twice += 1
            where = seen[sample]
        seen[sample] = (rank, step)
    if twice:
        tally.fail(
            f"{twice} samples of rank {rank} at step {step} had already been read in the same "
            f"epoch (by rank {where[0]} at step {where[1]})",
            kind=FindingKind.READ_AGAIN,
            parameter="sample ids",
            rank=rank,
            step=step,
        )


def _orders_differ(tally: Tally, evidence: Evidence, per_epoch: int) -> None:
    for step in range(per_epoch, evidence.trace.steps_written()):
        for rank in evidence.with_data:
            now = evidence.trace.header(rank, step)
            before = evidence.trace.header(rank, step - per_epoch)
            if now.ids == before.ids:
                tally.fail(
                    f"rank {rank} read the same samples in the same order in epochs "
                    f"{before.epoch} and {now.epoch}",
                    kind=FindingKind.READ_AGAIN,
                    parameter="sample ids",
                    rank=rank,
                    step=step,
                )
