"""Runs a job twice, and finds where and why the two runs diverge.

1  compare    the two recordings, bitwise, in execution order
2  operators  if computed values diverge, two further runs record every operator
3  source     further runs, in which one source of nondeterminism is pinned (`worlds/pinning.py`)

A source is the cause only if all runs in which it alone is pinned are bit-identical, and this is
not due to chance. If the source had no effect, all runs would be exchangeable: the m pinned ones
would be in one class of identical runs with a probability of

    sum over all classes of C(size of the class, m) / C(number of all runs, m)

which must be at most 5 % divided by the number of sources tried so far. With 3 different runs, and
3 identical ones in which the first source is pinned, it is 1 / C(6, 3) = 5 %.
"""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from distcheck.errors import DistcheckError
from distcheck.job import perturbed_runs, running
from distcheck.job.copying import ProjectCopy
from distcheck.job.judging import case_of, outcome_check, site_of, source_line
from distcheck.job.machines import GatheredMachines
from distcheck.job.options import JobOptions, script_of
from distcheck.job.settings import JobSettings
from distcheck.judge.checks.tally import Tally
from distcheck.judge.divergence.job_recordings import (
    DivergentOp,
    compare_recordings,
    name_in_only_one,
)
from distcheck.judge.rerun_bisection import BisectionResult
from distcheck.recordings.differing import CHOSEN, INITIAL, pairs_of_step
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import digest
from distcheck.records import CallSite, CaseReport, Diagnosis, merge_verdicts
from distcheck.records.causes import name_cause
from distcheck.records.layers import NO_LAYER
from distcheck.records.run_facts import SEPARATELY
from distcheck.reports.live import LiveProgress
from distcheck.verification.process_state import shown_state_lines
from distcheck.worlds import pinning
from distcheck.worlds.callers import is_installed

_LIMIT = 0.05  # Heuristic: probability that a source is named although it has no effect
_MOST_SUSPECTS = 3
_MOST_RUNS = 6  # with the same source pinned, or without any


class PinnedSource(NamedTuple):
    """A source of nondeterminism: its cause, the variant of the advice, and how it was pinned."""

    cause: str
    variant: str
    pinned: str


_SOURCES = {
    "seeds": PinnedSource("unseeded-rng", "usual", "all generators seeded"),
    "clock": PinnedSource("clock-in-training", "usual", "fixed clocks"),
    "hashing": PinnedSource("depends-on-process-state", "interpreters", "PYTHONHASHSEED=0"),
    "addresses": PinnedSource("depends-on-process-state", "memory",
                        "tensors and modules hashed by their order, not by their address"),
    "threads": PinnedSource("thread-count", "usual", "one thread per process"),
    "workers": PinnedSource("loader-workers", "usual", "num_workers=0 in every DataLoader"),
    "waiting": PinnedSource("collective-not-awaited", "usual",
                      "every asynchronous collective completed at once"),
    "operators": PinnedSource("nondeterministic-operator", "usual", "deterministic algorithms"),
    "memory": PinnedSource("uninitialized-memory", "usual", "uninitialized memory filled"),
}  # fmt: skip
_OBSERVED = (
    "clock",
    "threads",
    "workers",
    "waiting",
)  # no cause unless a process was seen to use them
_BEFORE_COMPUTING = ("seeds", "operators", "memory", "clock", "hashing", "workers", "addresses")
_IN_COMPUTING = ("operators", "memory", "waiting", "threads", "hashing", "addresses", "seeds")
_CUDNN = ("conv", "rnn", "lstm", "gru", "ctc")  # in names of operators that cuDNN implements
_LINES = {
    "sample ids": "loader", "loss": "backward", "local gradients": "backward",
    "reduced gradients": "collective", "gradients": "clip", "parameters": "step",
}  # fmt: skip


class Repeat(NamedTuple):
    """One more run: a digest of its results, and the lines that read each source."""

    content: str
    read: Mapping[str, tuple[str, ...]]


Again = Callable[[tuple[str, ...]], Repeat]  # runs the command again with sources pinned


@dataclass
class SourceSearch:
    """Search for the source of a divergence.

    plain     contents of runs without a pinned source; the second and later ones ran in a copy
    source    the source; "" if none was found
    pinned    contents of the runs with this source pinned
    excluded  sources with which runs still diverge
    suspects  sources with which runs are bit-identical, perhaps by chance
    together  True if runs are bit-identical only with all sources pinned
    """

    plain: list[str]
    source: str = ""
    pinned: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    together: bool = False
    read: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def only_the_first_differs(self) -> bool:
        return self.plain[0] not in self.plain[1:] and len(set(self.plain[1:])) == 1

    def run(self, again: Again, order: Sequence[str]) -> None:
        """Pin one source after the other. Raises what `again` raises."""
        self._repeat(again)
        if self.plain[2] in self.plain[:2]:
            self._repeat(again)
        if self.only_the_first_differs:
            return
        tried = [one for one in order if one in self.read or one not in _OBSERVED]
        for number, source in enumerate(tried, 1):
            if self._explains(again, source, number):
                self.source = source
            if self.source or len(self.suspects) == _MOST_SUSPECTS:
                return
            if source in self.suspects:
                continue
            self.excluded.append(source)
            if len(self.excluded) == 1 and not self.suspects:
                self.together = self._is_constant(again, tuple(pinning.SOURCES))
                if not self.together:
                    self.excluded = [*tried]
                    return

    def _repeat(self, again: Again) -> None:
        content, read = again(())
        self.plain.append(content)
        self.read |= read

    def _is_constant(self, again: Again, pins: tuple[str, ...]) -> bool:
        """Run twice with sources pinned; return True if both runs are bit-identical."""
        self.pinned = [again(pins).content for _ in range(2)]
        return len(set(self.pinned)) == 1

    def _explains(self, again: Again, source: str, number: int) -> bool:
        """Return True if pinning a source, the `number`th one tried, makes runs bit-identical."""
        constant = self._is_constant(again, (source,))
        while constant and chance(self.plain, self.pinned) * number > _LIMIT:
            if len(self.plain) < _MOST_RUNS and len(self.plain) <= len(self.pinned):
                self._repeat(again)
            elif len(self.pinned) < _MOST_RUNS:
                self.pinned.append(again((source,)).content)
                constant = len(set(self.pinned)) == 1
            else:
                self.suspects.append(source)
                return False
        return constant


def chance(plain: Sequence[str], pinned: Sequence[str]) -> float:
    """Return the probability that as many runs as are `pinned`, drawn from all, are identical."""
    sizes, many = Counter([*plain, *pinned]), len(pinned)
    every = math.comb(len(plain) + many, many)
    return sum(math.comb(size, many) for size in sizes.values()) / every


def content_of(job: JobRecording, steps: int) -> str:
    """Return a digest of everything that is compared of the first steps of a recording."""
    values = [
        (pair.what, pair.rank, pair.step, pair.name, repr(pair.one))
        for step in range(min(steps, len(job.steps)))
        for pair in pairs_of_step(job, job, step)
    ]
    return digest(repr((job.world, min(steps, len(job.steps)), values)).encode())


@dataclass
class _Divergence:
    """The first divergence: its kind and place, and the index of its step."""

    kind: str
    text: str
    place: int
    step: int
    parameter: str = ""
    actual: float | str = ""
    expected: float | str = ""
    rank: int = 0


@dataclass
class TwoRuns:
    """Both runs of a job, and further runs of its command in copies of the project."""

    asked: JobOptions
    settings: JobSettings
    copy: ProjectCopy
    folder: Path
    live: LiveProgress
    runs: int = 1

    def record(self, pins: tuple[str, ...] | None = None, **changes: object) -> JobRecording:
        """Run the command again. Raises DistcheckError, OSError or shutil.Error."""
        self.runs += 1
        own = self.folder / str(self.runs)
        recorded = perturbed_runs.record_again(
            msgspec.structs.replace(self.settings, **changes),
            running.command_of(self.asked.words, self.asked.nproc), self.copy, own,
            deadline_s=self.asked.deadline_s,
            variables={} if pins is None else pinning.variables_for(pins),
        )  # fmt: skip
        return perturbed_runs.read_whole(recorded, own / "whole", self.asked.mesh)

    def again(self, steps: int) -> Again:
        def run(pins: tuple[str, ...]) -> Repeat:
            said = ", ".join(_SOURCES[one].pinned for one in pins) if len(pins) < 2 else "all of it"
            self.live.phase(f"[3/3] looking for the source: run {self.runs + 1}"
                            f"{f', with {said}' if pins else ''}")  # fmt: skip
            try:
                job = self.record(pins, steps=steps, budget=1)
            except (OSError, shutil.Error, DistcheckError):
                if pins:  # the script cannot run with them
                    return Repeat(f"failed {self.runs}", {})
                raise
            read = pinning.noted_lines(self.folder / str(self.runs) / "recording")
            content = content_of(job, steps)
            shutil.rmtree(self.folder / str(self.runs), ignore_errors=True)
            return Repeat(content, read)

        return run

    def operators(self, steps: int) -> tuple[DivergentOp | None, str]:
        """Return the first divergent operator of two runs, and a sentence about it."""
        self.live.phase("[3/3] looking for the operator: two runs")
        try:
            one, two = (self.record(steps=steps, budget=1, modules=True, ops=True) for _ in "12")
            return compare_recordings(one, two, []).first_divergent_op()
        except (OSError, shutil.Error, DistcheckError) as error:
            return None, f"operators could not be recorded: {error}"


def judge(
    asked: JobOptions, settings: JobSettings, job: JobRecording, whole: GatheredMachines,
    copy: ProjectCopy, folder: Path, live: LiveProgress,
) -> CaseReport:  # fmt: skip
    """Run a recorded job a second time, and report if both runs are bit-identical."""
    tally, ends = Tally("rerun", NO_LAYER), whole.ran.outcomes(job.processes)
    causes: list[Diagnosis] = []
    where: CallSite | None = None
    runs = TwoRuns(asked, settings, copy, folder, live)
    missing = copy.missing
    if whole.hosts:
        missing = "the job runs on several machines, and distcheck does not start it there again"
    second = None
    if not missing:
        live.phase("[2/3] running it a second time, in a copy of the folder")
        try:
            second = runs.record()
        except (OSError, shutil.Error, DistcheckError) as error:
            missing = f"the command could not run a second time: {error}"
    if second is None:
        tally.missing(missing)
    else:
        live.phase("[3/3] comparing the two runs")
        found = _compare(job, second, tally)
        if found is not None:
            causes, where = _explain(runs, job, second, found, tally)
        else:
            tally.remark(f"{SEPARATELY}, a second run is bit-identical")
    results = (outcome_check(asked, job, ends), tally.result())
    case = case_of(asked, job)
    return CaseReport(
        case=case, strategy_file=script_of(job.ranks[0].arguments), outcomes=ends, checks=results,
        verdict=merge_verdicts([result.verdict for result in results]), diagnosis=tuple(causes),
        where=where, replay=case.command_line,
        notes=(
            "the job is compared with itself, and not with a single process (remove --twice)",
            *([f"the command ran {runs.runs} times"] if causes else []),
        ),
    )  # fmt: skip


def _compare(job: JobRecording, second: JobRecording, tally: Tally) -> _Divergence | None:
    """Compare two runs of a job; return the first divergence."""
    counts = [
        (f"{one.world} ranks", f"{len(one.steps)} steps from step {one.steps[0]} on")
        for one in (job, second)
    ]
    if job.world != second.world or job.steps[0] != second.steps[0]:
        said = f"the first run had {', '.join(counts[0])}, and the second {', '.join(counts[1])}"
        return _Divergence("steps", said, 0, job.steps[0])
    if other := name_in_only_one(job, second):
        said = f"only one of the two runs has the {other}"
        return _Divergence(INITIAL, said, 0, job.steps[0], parameter=other)
    comparison = compare_recordings(job, second, [])
    result = comparison.result()
    for moment in result.moments:
        tally.count(parameter=moment.kind, rank=0, step=job.steps[0], elements=moment.tensors)
    for rank in range(job.world):
        for step in set(job.steps) & set(second.steps):
            tally.count(parameter="", rank=rank, step=step, elements=0)
    first = result.first
    if first is not None:
        step = job.steps[first.step]
        text = f"step {step}, {result.kind}"
        text += f", {first.parameter}" if first.parameter != result.kind else ""
        text += f", rank {first.rank}"
        if result.kind == "sample ids":
            ids = [Counter(one.header(first.rank, first.step).ids) for one in (job, second)]
            text += ": the same samples in another order" * (ids[0] == ids[1])
            first = msgspec.structs.replace(first, actual="", expected="")
        return _Divergence(result.kind, text, first.step, step, first.parameter, first.actual,
                           first.expected, first.rank)  # fmt: skip
    if job.steps != second.steps:
        said = f"the first run made {counts[0][1]}, and the second {counts[1][1]}"
        last = min(len(job.steps), len(second.steps)) - 1
        return _Divergence("steps", said, last, job.steps[last])
    if not any(moment.kind == "parameters" for moment in result.moments):
        tally.missing("no parameters were recorded")
    return None


def _explain(
    runs: TwoRuns, job: JobRecording, second: JobRecording, found: _Divergence, tally: Tally
) -> tuple[list[Diagnosis], CallSite | None]:
    """Find the operator and the source of a divergence, and fail the check."""
    steps = found.place + 1 + (found.kind == "steps")
    chosen = found.kind in (*CHOSEN, "steps")
    op, said = (None, "") if chosen else runs.operators(steps)
    search, why = SourceSearch([content_of(one, steps) for one in (job, second)]), ""
    order = [*(_BEFORE_COMPUTING if chosen else _IN_COMPUTING)]
    if op is not None and op.after:
        order.insert(0, "waiting")
    elif op is not None and op.one.draws:
        order.insert(0, "seeds")
    order = [*dict.fromkeys([*order, *pinning.SOURCES])]
    try:
        search.run(runs.again(steps), order)
    except (OSError, shutil.Error, DistcheckError) as error:
        why = f"the source was not found, because a further run failed: {error}"
    if search.only_the_first_differs and not why:
        tally.missing(
            f"the runs diverge ({found.text}), but {len(search.plain) - 1} runs in copies of the "
            "folder are bit-identical: the result depends on the folder, or on files that an "
            "earlier run left; run the command in a fresh checkout"
        )
        return [], None
    script = script_of(job.ranks[0].arguments) or script_of(runs.asked.words)
    text = f"the same command run twice diverges: {found.text}"
    tally.fail(text, parameter=found.parameter or found.kind, rank=found.rank, step=found.step,
               actual=found.actual, expected=found.expected)  # fmt: skip
    cause = _cause(search, job, op, script, "; ".join(filter(None, [text, said, why])))
    read = own_lines(search)
    line = read[0] if len(read) == 1 else "" if op is None else op.one.line
    site = site_of(line, script) if line else source_line(job, _LINES.get(found.kind, ""), script)
    return [cause], site


def _cause(
    search: SourceSearch, job: JobRecording, op: DivergentOp | None, script: str, text: str
) -> Diagnosis:
    different = f"{len(search.plain)} runs without gave {len(set(search.plain))} different results"
    if not search.source:
        if search.suspects:
            names = ", ".join(_SOURCES[one].pinned for one in search.suspects)
            text += f"; runs are bit-identical, perhaps by chance, with: {names}; {different}"
        elif search.together:
            text += "; with all sources pinned, two runs are bit-identical, but none alone suffices"
        if search.excluded:
            names = ", ".join(_SOURCES[one].pinned for one in search.excluded)
            text += f"; runs also diverge, or fail, with: {names}"
        lines = _state_lines(script, ())
        return name_cause("nondeterministic", text + lines)
    source = _SOURCES[search.source]
    text += f"; with {source.pinned}, {len(search.pinned)} runs are bit-identical; {different}"
    if read := own_lines(search):
        names = ", ".join(one.rpartition("/")[2] for one in read[:4])
        text += f"; read at {names}{f' and {len(read) - 4} more lines' * (len(read) > 4)}"
    if source.cause == "depends-on-process-state":
        text += _state_lines(script, (source.variant,))
    variant, name = source.variant, "" if op is None else op.one.name
    if search.source == "operators" and job.ranks[0].device != "cpu":
        variant = "cudnn" if any(one in name for one in _CUDNN) else variant
    return name_cause(source.cause, text, variant)


def own_lines(search: SourceSearch) -> list[str]:
    """Return the lines of the script and its modules that read the source."""
    return [one for one in search.read.get(search.source, ()) if one and not is_installed(one)]


def _state_lines(script: str, factors: tuple[str, ...]) -> str:
    """List lines of the script that read process state."""
    asked = BisectionResult(depends=bool(factors), factors=factors, worlds=0)
    lines = shown_state_lines(script, 0, asked) if script else ()
    return f"; lines that may depend on it: {'; '.join(lines)}" if lines else ""
