"""Forward passes of a step: what is noted when one begins, and which one a loss belongs to."""

from collections.abc import Sequence
from typing import Any

import torch
from msgspec.structs import replace

from distcheck.job.inside import rank, tensors
from distcheck.job.inside.loaders import Loaders
from distcheck.job.inside.step_file import StepFile
from distcheck.recordings.jobs.records import Pass


def begun(
    file: StepFile, model: torch.nn.Module, given: Sequence[torch.Tensor], loaders: Loaders,
    drew: bool,
) -> Pass:  # fmt: skip
    """A pass that begins, with the tensors that the model is `given`."""
    autocast = next((d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)), "")
    return Pass(
        inputs=tuple(file.add_data(t) for t in given),
        rows=tensors.rows_of([*given]) if given else (),
        batches=loaders.for_pass([*given]),
        live=False,
        later=file.has_restarted,
        random=tensors.random_digests(),
        drew=drew,
        exchanges=rank.exchanges(model),
        exchange_s=rank.exchange_seconds(model),
        autocast=str(torch.get_autocast_dtype(autocast)) if autocast else "",
    )


def give_loss(passes: list[Pass], before: Pass | None, reached: Sequence[int]) -> None:
    """Gives what was noted of the last pass, which was another one `before`, to the only one that
    backward went through: where several passes are made first, as in a pipeline.
    """
    last = passes[-1]
    if len(reached) != 1 or reached[0] == len(passes) - 1 or before is None:
        return
    if last.loss is not None:
        about: dict[str, Any] = {"losses": last.losses, "terms": last.terms, "drew": last.drew}
        loss = last.loss - (before.loss or 0.0)
        passes[reached[0]] = replace(passes[reached[0]], loss=loss, unread=last.unread, **about)
    passes[-1] = before
