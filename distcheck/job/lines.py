"""The line of a script that the causes of a job are about."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from distcheck.judge.diagnosis.ways import site_at
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import LINES, StepRecord
from distcheck.records import CallSite, CheckResult, Diagnosis
from distcheck.records.causes import causes
from distcheck.records.layers import ROUNDING
from distcheck.verification.process_state import with_code
from distcheck.worlds.callers import is_installed

_COLLECTIVE = "collective"


def culprit(
    job: JobRecording, script: str, found: Sequence[Diagnosis], results: Sequence[CheckResult]
) -> CallSite | None:
    """The only line of the kind that all causes are about, over all recorded steps and ranks; None
    where there are several, or it is a package's. A collective is to blame where what the ranks
    exchanged is not what they gave; where it is, a further division came with the loss.
    """
    exchange = "".join(
        {r.verdict for r in results if (r.check, r.layer) == ("gradients", ROUNDING)}
    )
    kinds = {next(_kinds(one.cause, exchange), "") for one in found}
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    lines = {line for one in job.records.values() for line in _lines(one, kind)}
    if len(lines) != 1:
        return None
    return _from_here(with_code(site_at(*lines), str(Path(script).absolute())))


def _kinds(cause: str, exchange: str) -> Iterator[str]:
    """The kinds of line that a cause is about, where the exchange has this verdict."""
    kinds = causes()[cause].lines
    for kind in kinds:
        needed = "fail" if kind == _COLLECTIVE else "pass" if _COLLECTIVE in kinds else exchange
        if kind in (*LINES, _COLLECTIVE) and exchange == needed:
            yield kind


def _lines(step: StepRecord, kind: str) -> Iterable[str]:
    """Those of a kind in a step: of collectives, those after backward that carry more than one
    number.
    """
    if kind != _COLLECTIVE:
        return step.lines.get(kind, ())
    calls = [one for one in step.calls if one.after_backward and one.elements > 1]
    return ["" if is_installed(one.place) else one.place for one in calls]


def _from_here(site: CallSite | None) -> CallSite | None:
    """Its file as seen from the folder that the job was started in."""
    here = Path.cwd()
    if site is None or not Path(site.file).is_relative_to(here):
        return site
    return msgspec.structs.replace(site, file=str(Path(site.file).relative_to(here)))
