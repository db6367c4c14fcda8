"""Concatenates the micro-batches of a step, for a script that runs only one pass per step in a
single process.

With a pipeline, or with gradient accumulation that a script skips in a single process, each rank
runs several forward passes per step but the reference runs one. After joining, the record of a step
has one pass: the concatenated inputs and targets of all micro-batches, and the sum of their losses.
"""

import dataclasses

import msgspec

from distcheck.job.inside.batch_source import AND
from distcheck.job.inside.merged_batch import why_not_merged
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import ForwardPass, LossCall, StepRecord

_replace = msgspec.structs.replace


def can_join_passes(job: JobRecording) -> bool:
    """Return True if the passes of each trained step may be joined: samples do not interact, and
    all passes are of the same kind.
    """
    return all(map(_is_joinable, job.records.values())) and not why_not_merged(
        [*job.records.values()]
    )


def joined(job: JobRecording) -> JobRecording:
    """Return the recording with one forward pass in each step."""
    records = {place: _with_one_pass(record) for place, record in job.records.items()}
    counts = {step: len(job.records[0, step].trained) for step in job.steps}
    return dataclasses.replace(job, records=records, joined=counts)


def _is_joinable(record: StepRecord) -> bool:
    """Return True if all passes of a step have equally many inputs and the same losses, and no
    loader yielded several batches for them. (With several batches, the script may count the samples
    of a batch.)
    """
    passes = record.trained
    kinds = {(len(one.inputs), tuple(call.name for call in one.losses)) for one in passes}
    places = {place for one in passes for place in one.batches}
    has_one_batch = len(places) == len({loader for loader, _, _ in places})
    return len(passes) > 1 and len(kinds) == 1 and not record.earlier and has_one_batch


def _with_one_pass(record: StepRecord) -> StepRecord:
    return _replace(record, passes=(_join(record.trained),), backwards=1)


def _join(passes: list[ForwardPass]) -> ForwardPass:
    inputs = zip(*(one.inputs for one in passes), strict=True)
    calls = zip(*(one.losses for one in passes), strict=True)
    return _replace(
        passes[0],
        inputs=tuple(AND.join(names) for names in inputs),
        rows=tuple(row for one in passes for row in one.rows),
        batches=tuple(dict.fromkeys(place for one in passes for place in one.batches)),
        losses=tuple(map(_merge_loss_calls, calls)),
        loss=sum(one.loss for one in passes if one.loss is not None),
        exchanges=passes[-1].exchanges,
        terms=(),
    )


def _merge_loss_calls(calls: tuple[LossCall, ...]) -> LossCall:
    targets = [call.target for call in calls]
    return _replace(
        calls[0],
        counted=sum(call.counted for call in calls),
        value=sum(call.value for call in calls),
        target=AND.join(targets) if all(targets) else "",
    )
