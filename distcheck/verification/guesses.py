"""Treats the guess about how code is called as a hypothesis: if it fails, alternatives are tried.

The form of code, and the methods that are called, may be guesses. If a case fails under the first
guess, the strategy's other cases wait. The smallest case runs with that guess and with every
alternative that the code admits (`training/adapters/hypotheses.py`). `decide` then keeps the guess,
selects an alternative, or asks the user. A guess that has passed a case is final. Only failing code
takes extra time.
"""

import linecache
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from distcheck.errors import CannotRunError, UsageError
from distcheck.records import Adaptation, Case, CaseReport
from distcheck.records import layers as known_layers
from distcheck.records.case import as_file_name
from distcheck.records.exit_status import Outcome, RankEnd
from distcheck.records.layers import IN_FLOAT64
from distcheck.records.run_facts import FOUND_AS
from distcheck.training.adapters.forms import trained_with
from distcheck.verification import preparation, verdicts
from distcheck.verification.case_run import CaseRun
from distcheck.verification.report_builder import ReportBuilder
from distcheck.verification.session import OnFinished, Session
from distcheck.workloads import datasets, facts_about

# Causes that describe observations without explaining values by a synchronization.
_NOT_EXPLAINED = {
    "unexplained", "crash", "hang", "unreachable", "wrong-update", "wrong-local-gradient",
    "optimizer-not-stepped",
}  # fmt: skip
# Errors of code that lacks something its script would have set up, and not a function of torch's.
_LACKS = re.compile(
    r"NoneType|^(?!.*module 'torch).*has no attribute|is not defined|KeyError|"
    r"\bnot (been )?(initiali[sz]ed|init(ed)?\b|set ?up|configured|ready)"
)
_NEEDS_GPU = re.compile("no NVIDIA driver|not compiled with CUDA|No CUDA GPUs are available")
_OWN = ", or write a file that calls it as your training loop does (docs/verify-your-own.md)"
_MOST_ASKED = 3  # command lines to choose from
_MOST_SEEN = 160  # characters
_DEADLINE_S = 10.0  # of a way that may hang
_SMALL_SHARD = 12  # Heuristic: samples of each rank


@dataclass(frozen=True, kw_only=True)
class CallTrial:
    """One way to call code, and its result (`seen` as text).

    `exchanged`: communication was observed. `explained`: a cause explains the resulting values.
    `broken`: the code raised an error after a reduction, none of its statements raises that error,
    and the error does not indicate missing set-up.
    """

    way: Adaptation
    passed: bool = False
    exchanged: bool = False
    explained: bool = False
    broken: bool = False
    seen: str = ""


@dataclass(frozen=True)
class GuessDecision:
    """The guess stands, an alternative replaces it, or the user must choose one of `ways`. `sure`:
    every way has the same result, or the arguments are flags, so no other form or value can be
    right.
    """

    what: Literal["stands", "take", "ask"]
    ways: tuple[CallTrial, ...] = ()
    guess: CallTrial = CallTrial(way=Adaptation())
    sure: bool = False


def decide_guess(guess: CallTrial, others: Sequence[CallTrial]) -> GuessDecision:
    """Decide, given trials on the smallest case.

    If the guess passes this case, it is right, and failures of other cases are failures. If only
    one alternative passes, it is the form. If the passing alternatives differ only in an argument
    for which every value passes, the first one is used. Otherwise the user is asked, except in two
    cases: a cause explains the synchronized values under the guess or in exactly one way; or the
    code communicates in every way and then fails with the same error.
    """
    if guess.passed:
        return GuessDecision("stands")
    passed = tuple(trial for trial in others if trial.passed)
    valued = [one for one in others if one.way.arguments != guess.way.arguments]
    forms = {msgspec.structs.replace(one.way, arguments=()) for one in valued}
    # An argument without a value at first, which makes no difference.
    is_idle = list(passed) == valued and len(forms) == 1
    is_idle &= all(len(one.way.arguments) > len(guess.way.arguments) for one in valued)
    if passed:
        return GuessDecision("take" if len(passed) == 1 or is_idle else "ask", passed)
    explained = guess.exchanged and guess.explained
    alike = bool(others) and all(one.seen == guess.seen for one in others)
    alike &= all(one.broken or (one.exchanged and one.explained) for one in (guess, *others))
    values = {value for _, value in guess.way.arguments}
    if explained or alike:  # a flag has no third value
        return GuessDecision("stands", sure=alike or (bool(values) and values <= {"True", "False"}))
    # An argument's value that was tried may itself be what is wrong.
    same = [one for one in others if one.way.arguments == guess.way.arguments]
    found = tuple(trial for trial in same if trial.exchanged and trial.explained)
    if len(found) == 1 and not guess.exchanged:
        return GuessDecision("take", found)
    return GuessDecision("ask", tuple(sorted(others, key=lambda one: not one.exchanged)), guess)


def trial_of(run: CaseRun) -> CallTrial:
    way = run.case.adaptation
    if run.refused is not None:
        why = re.split(r"\. |\n|; give ", str(run.refused), maxsplit=1)[0]
        return CallTrial(way=way, seen=f"distcheck rejects it ({why})")
    if run.like is not None:
        return replace(trial_of(run.like), way=way)
    report = verdicts.build_case_report(run, replay="")
    causes = list(dict.fromkeys(cause.cause for cause in report.diagnosis))
    ways = run.seen.ways if run.seen is not None else ()
    used = any(way.given or way.perhaps for way in ways)
    proven = any(outcome.proven for outcome in report.outcomes)
    ends = [one for one in report.outcomes if one.error and not one.lost_peer]
    raised = ends[0].error if ends else ""
    last = [one.call for one in ends if one.call is not None and one.call.place]  # the code's own
    has_reduced = any("broadcast" not in call.name for call in last)
    named = {cause for cause in causes if cause not in _NOT_EXPLAINED}
    # Code without collectives communicates in no form.
    sure = used or not run.facts.exchanges
    explained = (
        _is_of_update(report)
        or bool(named - {"missing-sync"})
        or ("missing-sync" in named and sure)
    )
    return CallTrial(
        way=way,
        passed=report.verdict == "pass",
        exchanged=used or proven or explained,
        explained=explained,
        broken=has_reduced and not any(map(_is_about_the_call, ends)),
        seen=f"it raises {raised}" if raised else f"it ends with {', '.join(causes)}",
    )


def _is_about_the_call(end: Outcome) -> bool:
    """Return True if an error may show that the code is called in a wrong way."""
    file, _, line = end.place.rpartition(":")
    text = linecache.getline(file, int(line)).strip() if line.isdecimal() else ""
    raises = text.startswith(("raise", "assert")) and "NotImplementedError" not in text
    return raises or bool(_LACKS.search(end.error) or _NEEDS_GPU.search(end.error))


def _is_of_update(report: CaseReport) -> bool:
    """Return True if a case failed although all of its gradients are right."""
    gradients = {result.verdict for result in report.checks if result.check == "gradients"}
    return report.verdict == "fail" and gradients == {"pass"}


@dataclass(eq=False)
class Guess:
    """The guess about one strategy: if it is `right` (a case passed), has `failed` one, and is
    `settled` by a decision. It holds finished cases, and cases that wait for the decision.
    """

    strategy: str
    right: bool = False
    failed: bool = False
    settled: bool = False
    done: list[CaseRun] = field(default_factory=list)
    waiting: list[CaseRun] = field(default_factory=list)

    def settle(
        self, session: Session, builder: ReportBuilder, enter: OnFinished
    ) -> Sequence[CaseRun]:
        """Decide; return the remaining cases. Raises UsageError if the user must choose."""
        self.settled = True
        case = self.done[0].case
        ways = preparation.ways_to_call(session.pool, case) if self.failed else ()
        decision = self._try_all(ways, session)
        if decision.what != "take":
            self._ask(case, decision)
            for run in self.done:
                enter(run)
            return self.waiting
        taken, *more = decision.ways
        cases = [
            msgspec.structs.replace(run.case, adaptation=taken.way)
            for run in (*self.done, *self.waiting)
        ]
        runs = preparation.plan_additional_runs(session.pool, cases, session.data)
        for run in runs:
            run.notes = (note_on_replacement(taken, of_any_value=bool(more)), *run.notes)
        builder.change(runs)
        return runs

    def _ask(self, case: Case, decision: GuessDecision) -> None:
        """Raise UsageError if the user must specify how the code is called, or set up its
        requirements. Specified forms and refusals are reported unchanged.
        """
        passed = any(trial.passed for trial in decision.ways)
        refused = [str(run.refused) for run in self.done if run.refused is not None]
        tried = {f"give --as {one.way.form}" for one in decision.ways}
        # A refusal whose advice was tried in vain leads nowhere.
        known = case.adaptation.form or (refused and not any(map(refused[0].endswith, tried)))
        if not passed and not decision.sure and (refusal := self.done[0].facts.refusal):
            raise UsageError(refusal + _tried(decision, case.adaptation.arguments))
        idle = not any(trial.exchanged for trial in (decision.guess, *decision.ways))
        if decision.what == "ask" and not known and idle and not self.done[0].facts.exchanges:
            raise UsageError(
                f"strategy {case.strategy!r} fails ({decision.guess.seen[:_MOST_SEEN]}), and its "
                "file calls no collective; pass the function that communicates between processes"
            )
        error = _not_set_up(self.done) or _not_marked(self.done)
        if not passed and not known and error is not None:
            raise error
        if decision.what == "ask" and (passed or not known):
            raise ambiguity_error(case, decision)

    def _try_all(self, ways: Sequence[Sequence[Adaptation]], session: Session) -> GuessDecision:
        """Try the guess, then each tier of other ways until one has a way that passes."""
        known = self.done[0].case.adaptation
        guessed = known
        if self.done[0].facts.refusal and ways:  # the first form does not fit: the guess is a way
            guessed, ways = ways[0][0], [ways[0][1:], *ways[1:]]
        if not any(ways):
            return GuessDecision("stands")
        small = _smallest(self.done[0].case)
        tried: list[CallTrial] = []

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
            runs = preparation.plan_additional_runs(session.pool, cases, session.data)
            session.run(runs, on_finished=take)
        first = next((one for one in tried if one.way == known), None)
        if first is None:
            return GuessDecision("stands")
        others = [one for one in tried if one is not first]
        return decide_guess(replace(first, way=guessed), others)

    def close(self) -> None:
        """Free the traces of the guess's cases."""
        for run in self.done:
            run.close()


class Guesses:
    """The guesses of a verification, one per strategy."""

    def __init__(self) -> None:
        self._of: dict[str, Guess] = {}

    def keep(
        self,
        run: CaseRun,
        report_of: Callable[[CaseRun], CaseReport | None],
        set_aside: Callable[[str], list[CaseRun]],
    ) -> bool:
        """Return True if a finished case must wait until its guess is decided, together with its
        strategy's unstarted cases. If the case passed, the guess is right.
        """
        guess = self._of.setdefault(run.case.strategy, Guess(run.case.strategy))
        if guess.settled or run.case.world == 1 or not run.facts.guessed or run.not_run:
            return False
        is_lost = any(o.outcome in (RankEnd.LOST, RankEnd.KILLED) for o in run.outcomes)
        if is_lost or isinstance(run.refused, CannotRunError):  # independent of the calling form
            return False
        report = None if run.refused is not None else report_of(run)
        if report is None and run.refused is None:
            return False
        verdict = "fail" if report is None else report.verdict
        guess.right |= verdict == "pass"
        # The gradients of a step are the same, whichever rank keeps the optimizer state.
        known = guess.right and not (report is not None and _is_of_update(report))
        if not guess.failed and (known or verdict == "pass"):
            return False
        guess.done.append(run)
        if verdict == "fail":
            guess.failed = True
            guess.waiting += set_aside(run.case.strategy)
        return True

    def open(self) -> list[Guess]:
        """Return the guesses for which cases wait."""
        return [guess for guess in self._of.values() if guess.done and not guess.settled]

    def close(self) -> None:
        """Free all waiting cases."""
        for guess in self._of.values():
            guess.close()


def _smallest(case: Case) -> Case:
    """Return the smallest case that shows if code is called correctly: a plain model with equal
    shards, or the case's own workload if it is the user's, or belongs to an accepted deviation or
    form.
    """
    shards = len(case.with_data)
    batch = max(1, min(case.batch, _SMALL_SHARD * shards) // shards) * shards
    small = msgspec.structs.replace(
        case, rerun=False, batch=batch, deadline_s=min(case.deadline_s, _DEADLINE_S)
    )
    if ":" in case.workload or case.accept or trained_with(case.adaptation.form):
        return small
    dtype = case.dtype if IN_FLOAT64 not in case.layers else "float32"
    data = datasets.SYNTHETIC if case.data == "exact" else case.data
    layers = known_layers.layers_of(dtype)
    return msgspec.structs.replace(
        small, workload="mlp", dtype=dtype, data=data, layers=layers, steps=facts_about("mlp").steps
    )


def note_on_replacement(taken: CallTrial, *, of_any_value: bool = False) -> str:
    """Return the report's note on an alternative that replaced the guess."""
    if of_any_value:
        return (
            f"{FOUND_AS}an argument was unknown, and the code passes with every value that was "
            f"tried; the run uses {_options(taken.way)}; pin it with that option"
        )
    report = "passes" if taken.passed else f"has a result with a named cause ({taken.seen})"
    return (
        f"{FOUND_AS}the first detected form failed, and of the other possible forms only "
        f"{_options(taken.way)} {report}; pin it with these options"
    )


def ambiguity_error(case: Case, decision: GuessDecision) -> UsageError:
    passed = [trial for trial in decision.ways if trial.passed]
    how = (
        f"passes in {len(passed)} different forms"
        if passed
        else f"fails in all {1 + len(decision.ways)} forms that were tried (as detected, "
        f"{decision.guess.seen[:_MOST_SEEN]})"
    )
    words = ["distcheck", "verify", "--strategy", case.strategy, "--world", str(case.world)]
    lines = (
        f"\n    {shlex.join(words)} {_options(trial.way)}" for trial in decision.ways[:_MOST_ASKED]
    )
    return UsageError(
        f"strategy {case.strategy!r} does not determine how it is called, and {how}. Pass the "
        f"options of the form that your training loop uses{'' if passed else _OWN}:{''.join(lines)}"
    )


def _not_set_up(runs: Sequence[CaseRun]) -> UsageError | None:
    """Return the error for code that lacks its script's setup before communicating, or None."""
    ends = [outcome for run in runs for outcome in run.outcomes if not outcome.lost_peer]
    # A collective without a place is torch's own, as in the constructor of DistributedDataParallel.
    silent = [one for one in ends if one.call is None or not one.call.place]
    raised = [one for one in silent if one.outcome == RankEnd.RAISED]
    if not raised or len(raised) < len([o for o in ends if o.outcome != RankEnd.ENDED]):
        return None
    error = raised[0].error
    at = f" ({raised[0].place})" if raised[0].place else ""
    if runs[0].case.device == "cpu" and all(_NEEDS_GPU.search(one.error) for one in raised):
        return UsageError(
            f"strategy {runs[0].case.strategy!r} raised {error}{at}: it needs a GPU. Pass "
            "--device cuda on a machine with a GPU"
        )
    if not all(_LACKS.search(one.error) for one in raised):
        return None
    return UsageError(
        f"strategy {runs[0].case.strategy!r} raised {error}{at} before its first collective: it "
        "needs state that the training script sets up. Pass it by --set NAME=VALUE or --arg, or "
        "set it up in a function of a file next to it and pass that function"
    )


def _not_marked(runs: Sequence[CaseRun]) -> UsageError | None:
    """Return the error for code that did not communicate, and that tests attributes which only its
    script sets, or None.
    """
    marks = runs[0].facts.marks
    raised = any(one.outcome == RankEnd.RAISED for run in runs for one in run.outcomes)
    if not marks or raised or any(trial_of(run).exchanged for run in runs):
        return None
    return UsageError(
        f"strategy {runs[0].case.strategy!r} called no collective, and reads the attribute "
        f"{' or '.join(marks)}, which these models do not have. Set it as your training script "
        "does, in your own workload (--workload FILE.py:CLASS) or in a function that sets it and "
        "calls this code"
    )


def _tried(decision: GuessDecision, given: Sequence[tuple[str, str]]) -> str:
    """The values of arguments that were tried in vain, as one more sentence."""
    pairs = [pair for one in (decision.guess, *decision.ways) for pair in one.way.arguments]
    values = dict.fromkeys(f"{n}={value}" for n, value in pairs if (n, value) not in given)
    return f". It fails with each of {', '.join(values)}; pass a different value" if values else ""


def _options(way: Adaptation) -> str:
    return shlex.join(Case(id="", strategy="", world=1, adaptation=way).adapter_options)
