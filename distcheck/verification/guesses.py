"""A guess about how code is called is a hypothesis: if it fails, the others are tried first.

The form of code, and the methods that are called, may be guesses. If a case fails under the first
guess, the strategy's other cases wait, and the smallest case is run with that guess and with every
other way that the code admits (`training/adapters/hypotheses.py`). `decide` then chooses: the guess
stands, another way takes its place, or the person is asked. A guess that has passed a case is not
doubted again. Only code that fails costs extra time.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from distcheck.errors import CannotRunError, UsageError
from distcheck.records import Adaptation, Case, CaseReport
from distcheck.records import layers as known_layers
from distcheck.records.case_ids import as_file_name
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import IN_FLOAT64
from distcheck.records.run_facts import FOUND_AS
from distcheck.training.adapters.forms import trained_with
from distcheck.verification import preparation, verdicts
from distcheck.verification.case_run import CaseRun
from distcheck.verification.report_builder import ReportBuilder
from distcheck.verification.session import OnFinished, Session
from distcheck.workloads import about, datasets
from distcheck.worlds.pool import Pool

# Causes that say what was seen, and do not explain numbers by an exchange.
_NOT_EXPLAINED = {
    "unexplained", "crash", "hang", "unreachable", "wrong-update", "wrong-local-gradient",
    "optimizer-not-stepped",
}  # fmt: skip
# What code says that finds nothing where its script has put something.
_LACKS = re.compile(
    r"NoneType|has no attribute|is not defined|KeyError|"
    r"\bnot (been )?(initiali[sz]ed|init(ed)?\b|set ?up|configured|ready)"
)
_NEEDS_GPU = re.compile("no NVIDIA driver|not compiled with CUDA|No CUDA GPUs are available")
_MOST_ASKED = 3  # command lines to choose from
_MOST_SEEN = 160  # characters
_DEADLINE_S = 10.0  # of a way that may hang
_SMALL_SHARD = 12  # samples of each rank; chosen


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A way to call code, and what came of it: `seen` in words; whether an exchange was observed,
    and whether a cause explains the numbers that it left.
    """

    way: Adaptation
    passed: bool = False
    exchanged: bool = False
    explained: bool = False
    seen: str = ""


@dataclass(frozen=True)
class Decision:
    """The guess stands, a way takes its place, or one of `ways` is to be chosen by the person."""

    what: Literal["stands", "take", "ask"]
    ways: tuple[Trial, ...] = ()
    seen: str = ""  # of the guess


def decide(guess: Trial, others: Sequence[Trial]) -> Decision:
    """What follows from trials on the smallest case.

    A guess that passes there is right, and what failed elsewhere is a failure. If one other way
    alone passes, it is the form. If several pass, or none, the person is asked, unless a cause
    explains what the code exchanged: under the guess, or else in one way alone.
    """
    if guess.passed:
        return Decision("stands")
    passed = tuple(trial for trial in others if trial.passed)
    if passed:
        return Decision("take" if len(passed) == 1 else "ask", passed)
    if guess.exchanged and guess.explained:
        return Decision("stands")
    explained = tuple(trial for trial in others if trial.exchanged and trial.explained)
    if len(explained) == 1 and not guess.exchanged:
        return Decision("take", explained)
    return Decision("ask", tuple(sorted(others, key=lambda one: not one.exchanged)), guess.seen)


def trial_of(run: CaseRun) -> Trial:
    """A trial from how its run ended."""
    way = run.case.adaptation
    if run.refused is not None:
        why = str(run.refused).partition(". ")[0].partition("\n")[0]
        return Trial(way=way, seen=f"it is refused ({why})")
    if run.like is not None:
        return replace(trial_of(run.like), way=way)
    report = verdicts.report_of(run, replay="")
    causes = list(dict.fromkeys(cause.cause for cause in report.diagnosis))
    ways = run.seen.ways if run.seen is not None else ()
    used = any(way.given or way.perhaps for way in ways)
    proven = any(outcome.proven for outcome in report.outcomes)
    raised = next((o.error for o in report.outcomes if o.error and not o.lost_peer), "")
    named = {cause for cause in causes if cause not in _NOT_EXPLAINED}
    # Code that calls no collective exchanges in no form.
    sure = used or not run.facts.exchanges
    explained = (
        _is_of_update(report)
        or bool(named - {"missing-sync"})
        or ("missing-sync" in named and sure)
    )
    return Trial(
        way=way,
        passed=report.verdict == "pass",
        exchanged=used or proven or explained,
        explained=explained,
        seen=f"it raises {raised}" if raised else f"it ends in {', '.join(causes)}",
    )


def _is_of_update(report: CaseReport) -> bool:
    """Whether a case failed although all of its gradients are right."""
    gradients = {result.verdict for result in report.checks if result.check == "gradients"}
    return report.verdict == "fail" and gradients == {"pass"}


@dataclass(eq=False)
class Guess:
    """The guess about one strategy: whether it is `right`, as it has passed a case, whether it has
    `failed` one, and whether it was decided about; the cases that are done, and those that wait.
    """

    strategy: str
    right: bool = False
    failed: bool = False
    settled: bool = False
    done: list[CaseRun] = field(default_factory=list)
    waiting: list[CaseRun] = field(default_factory=list)

    def settle(
        self,
        pool: Pool,
        builder: ReportBuilder,
        data: preparation.Data,
        session: Session,
        enter: OnFinished,
    ) -> Sequence[CaseRun]:
        """Decides, and returns the cases that are left to run. Raises UsageError where the person
        has to say how the code is called.
        """
        self.settled = True
        case = self.done[0].case
        ways = preparation.ways_to_call(pool, case) if self.failed else ()
        decision = self._try_all(ways, pool, data, session)
        if decision.what != "take":
            self._ask(case, decision)
            for run in self.done:
                enter(run)
            return self.waiting
        (taken,) = decision.ways
        cases = [
            msgspec.structs.replace(run.case, adaptation=taken.way)
            for run in (*self.done, *self.waiting)
        ]
        runs = _planned(pool, cases, data)
        for run in runs:
            run.notes = (note_on(taken), *run.notes)
        builder.change(runs)
        return runs

    def _ask(self, case: Case, decision: Decision) -> None:
        """Raises UsageError where the person is to say how the code is called, or to set up what it
        needs. What a person has said, or a rank has refused, is reported as it is.
        """
        passed = any(trial.passed for trial in decision.ways)
        known = case.adaptation.form or any(run.refused is not None for run in self.done)
        if not passed and self.done[0].facts.refusal:
            raise UsageError(self.done[0].facts.refusal)
        error = _not_set_up(self.done) or _not_marked(self.done)
        if not passed and not known and error is not None:
            raise error
        if decision.what == "ask" and (passed or not known):
            raise question(case, decision)

    def _try_all(
        self,
        ways: Sequence[Sequence[Adaptation]],
        pool: Pool,
        data: preparation.Data,
        session: Session,
    ) -> Decision:
        """Tries the guess, then each tier of other ways until one has a way that passes."""
        if not any(ways):
            return Decision("stands")
        small = _smallest(self.done[0].case)
        tried: list[Trial] = []

        def take(run: CaseRun) -> str:
            tried.append(trial_of(run))
            return "pass" if tried[-1].passed else "fail"

        for tier in ([small.adaptation], *ways):
            if any(trial.passed for trial in tried):
                break
            names = (as_file_name(f"{small.id}-way-{len(tried) + n}") for n in range(len(tier)))
            cases = [
                msgspec.structs.replace(small, adaptation=way, id=name)
                for way, name in zip(tier, names, strict=True)
            ]
            session.run(_planned(pool, cases, data), on_finished=take)
        first = next((one for one in tried if one.way == small.adaptation), None)
        if first is None:
            return Decision("stands")
        return decide(first, [one for one in tried if one is not first])

    def close(self) -> None:
        """Frees what its cases keep."""
        for run in self.done:
            run.close()


class Guesses:
    """Those of a verification, one for each strategy."""

    def __init__(self) -> None:
        self._of: dict[str, Guess] = {}

    def keep(
        self,
        run: CaseRun,
        report_of: Callable[[CaseRun], CaseReport | None],
        set_aside: Callable[[str], list[CaseRun]],
    ) -> bool:
        """Whether a case that is done is kept until its guess is decided about, with those of its
        strategy that have not begun; one that passes shows that the guess is right.
        """
        guess = self._of.setdefault(run.case.strategy, Guess(run.case.strategy))
        if guess.settled or run.case.world == 1 or not run.facts.guessed or run.not_run:
            return False
        is_lost = any(o.outcome in (RankEnd.LOST, RankEnd.KILLED) for o in run.outcomes)
        if is_lost or isinstance(run.refused, CannotRunError):  # however the code is called
            return False
        report = None if run.refused is not None else report_of(run)
        if report is None and run.refused is None:
            return False
        verdict = "fail" if report is None else report.verdict
        guess.right |= verdict == "pass"
        # The gradients of a step are the same, whichever rank keeps the optimizer's state.
        known = guess.right and not (report is not None and _is_of_update(report))
        if not guess.failed and (known or verdict == "pass"):
            return False
        guess.done.append(run)
        if verdict == "fail":
            guess.failed = True
            guess.waiting += set_aside(run.case.strategy)
        return True

    def open(self) -> list[Guess]:
        """Those with cases that are kept."""
        return [guess for guess in self._of.values() if guess.done and not guess.settled]

    def close(self) -> None:
        """Frees what is kept."""
        for guess in self._of.values():
            guess.close()


def _planned(pool: Pool, cases: Sequence[Case], data: preparation.Data) -> list[CaseRun]:
    """Cases as they are to run; of several those that are refused are left out."""
    try:
        facts = preparation.inspect(pool, cases, data)
        return preparation.plan_runs(pool, cases, facts.cases, data)[0]
    except (UsageError, CannotRunError):
        if len(cases) == 1:
            return []
    return [run for case in cases for run in _planned(pool, [case], data)]


def _smallest(case: Case) -> Case:
    """The smallest case that shows whether code is called in the right way: a plain model with
    equal shards, or the case's own workload where that is a person's, or what is accepted or
    trained goes with it.
    """
    shards = len(case.with_data)
    batch = max(1, min(case.batch, _SMALL_SHARD * shards) // shards) * shards
    small = msgspec.structs.replace(
        case, rerun=False, batch=batch, deadline_s=min(case.deadline_s, _DEADLINE_S)
    )
    if ":" in case.workload or case.accept or trained_with(case.adaptation.form):
        return small
    dtype = case.dtype if IN_FLOAT64 not in case.layers else "float32"
    data = datasets.SYNTHETIC if case.data == "lattice" else case.data
    layers = known_layers.layers_of(dtype)
    return msgspec.structs.replace(
        small, workload="mlp", dtype=dtype, data=data, layers=layers, steps=about("mlp").steps
    )


def note_on(taken: Trial) -> str:
    """What a report says of a way that took the guess's place."""
    report = "passes" if taken.passed else f"exchanges gradients, and {taken.seen}"
    return (
        f"{FOUND_AS}the first guess failed, and of the code's other forms only "
        f"{_words(taken.way)} {report}; pin it with these options"
    )


def question(case: Case, decision: Decision) -> UsageError:
    """What the person is asked."""
    passed = [trial for trial in decision.ways if trial.passed]
    how = (
        f"passes in {len(passed)} ways"
        if passed
        else f"fails in all {1 + len(decision.ways)} ways that were tried (as guessed, "
        f"{decision.seen[:_MOST_SEEN]})"
    )
    words = ["distcheck", "verify", "--strategy", case.strategy, "--world", str(case.world)]
    lines = (
        f"\n    {shlex.join(words)} {_words(trial.way)}" for trial in decision.ways[:_MOST_ASKED]
    )
    return UsageError(
        f"strategy {case.strategy!r} does not say how it is called, and {how}. Give the options of "
        f"the one by which your training loop calls it:{''.join(lines)}"
    )


def _not_set_up(runs: Sequence[CaseRun]) -> UsageError | None:
    """The error for code that, whenever it was called, lacked what its own script sets up, before
    it had exchanged anything; None for any other.
    """
    ends = [outcome for run in runs for outcome in run.outcomes if not outcome.lost_peer]
    # A collective without a place is torch's own, as of a DistributedDataParallel that is made.
    silent = [one for one in ends if one.call is None or not one.call.place]
    raised = [one for one in silent if one.outcome == RankEnd.RAISED]
    if not raised or len(raised) < len([o for o in ends if o.outcome != RankEnd.ENDED]):
        return None
    error = raised[0].error
    at = f" ({raised[0].place})" if raised[0].place else ""
    if runs[0].case.device == "cpu" and all(_NEEDS_GPU.search(one.error) for one in raised):
        return UsageError(
            f"strategy {runs[0].case.strategy!r} raised {error}{at}: it needs a GPU. Verify it "
            "with --device cuda on a machine that has one"
        )
    if not all(_LACKS.search(one.error) for one in raised):
        return None
    return UsageError(
        f"strategy {runs[0].case.strategy!r} raised {error}{at} before it exchanged anything: it "
        "needs what the training script sets up. Give it by --set NAME=VALUE or --arg, or set it "
        "up in a file beside it and give a function of that file"
    )


def _not_marked(runs: Sequence[CaseRun]) -> UsageError | None:
    """The error for code that ended and exchanged nothing, and that looks for attributes which only
    its own script sets; None for any other.
    """
    marks = runs[0].facts.marks
    raised = any(one.outcome == RankEnd.RAISED for run in runs for one in run.outcomes)
    if not marks or raised or any(trial_of(run).exchanged for run in runs):
        return None
    return UsageError(
        f"strategy {runs[0].case.strategy!r} exchanged nothing, and looks for the attribute "
        f"{' or '.join(marks)}, which nothing in these models has. Set it as your training script "
        "does, in a workload of your own (--workload FILE.py:CLASS) or in a function that sets it "
        "and calls this code"
    )


def _words(way: Adaptation) -> str:
    return shlex.join(Case(id="", strategy="", world=1, adaptation=way).adapter_words)
