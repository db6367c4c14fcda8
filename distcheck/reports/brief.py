"""The first screen of a report: verdict, cause, repair; then coverage, and the next command.

For the cases of one strategy in one world it has at most about twelve lines; `terminal` prints the
rest with `--verbose`. Long text is cut at the end of a clause, and repetitions are printed once.
"""

import shlex
from collections.abc import Iterable, Sequence
from itertools import chain
from math import isfinite

from rich.console import Console
from rich.text import Text

from distcheck.errors import ExitCode
from distcheck.judge.checks.merging import earliest_failure
from distcheck.records import (
    Case,
    CaseReport,
    CheckResult,
    Diagnosis,
    Difference,
    Report,
    VerdictName,
)
from distcheck.records.causes import NOT_EXERCISED
from distcheck.records.layers import BITWISE, EXACT, FULL_BATCH_LAYERS, NO_LAYER, ROUNDING
from distcheck.records.mesh import MESH
from distcheck.records.mistakes import (
    SENSITIVITY,
    RevealedMistakes,
    count_revealing_tensors,
    joined_list,
    smallest_revealed_scale_errors,
)
from distcheck.records.run_facts import DIFFERS, FOUND_AS, LIMIT, SEPARATELY, TAKEN_AS
from distcheck.reports.failures import (
    PrintedCauses,
    describe_rank_exits,
    group_by_evidence,
    group_equal_failures,
)
from distcheck.reports.files import FORMATS
from distcheck.reports.wording import (
    advice_lines,
    describe_accepted,
    describe_site,
    most_telling_first,
    sentence_on_modules,
    show,
)
from distcheck.reports.wrapping import CUT, VERDICT, LabeledLines, print_hanging, print_verdict

_FILES = (*(f"--{name}" for name in FORMATS), "--save")  # of the finished run; they exist now
_ONLY_THEN = ("--last-failed", "--failed-first", "--watch")
_USUAL = Case(id="", strategy="", world=1)
_LARGER_WORLDS = (3, 5)


def next_step(report: Report) -> str:
    """Return the next command for the user: a replay of a failure; the same command after an
    interrupt; otherwise a run that covers more.
    """
    failed = most_telling_first([case for case in report.cases if case.verdict != "pass"])
    if failed and all((c.verdict, c.case.world, c.case.job) == ("unknown", 1, ()) for c in failed):
        asked = _typed_words(report) or _words_of(failed[0].case)
        return shlex.join(
            [*words_without(asked, (*_FILES, *_ONLY_THEN, "--world")), "--world", "2"]
        )
    if failed and report.exit_code is not ExitCode.INTERRUPTED:
        return failed[0].replay
    if not failed and _is_recorded(report):
        return f"distcheck compare {shlex.quote(report.saved_to or '')}    # after the change"
    case = report.cases[0].case
    if case.job:
        return case.command_line if report.exit_code is ExitCode.INTERRUPTED else ""
    words = _typed_words(report)
    if report.exit_code is ExitCode.INTERRUPTED:
        if words is None:
            words = [*_words_of(case), "--world", str(case.world)]
        return shlex.join(words_without(words, _FILES))
    words = _words_of(case) if words is None else words
    words = words_without(words, (*_FILES, *_ONLY_THEN, "--shard"))
    if gap := next(filter(options_that_exercise, unexercised_features(report)), None):
        return _closing(gap, words)
    worlds = {c.case.world for c in report.cases}
    if any(note.startswith(MESH) for c in report.cases for note in c.notes):
        return shlex.join([*words_without(words, ("--seed",)), "--seed", str(case.seed + 1)])
    if not worlds & set(_LARGER_WORLDS) and max(case.adaptation.without_data, default=0) < 3:
        asked = [word for world in _LARGER_WORLDS for word in ("--world", str(world))]
        line = shlex.join([*words_without(words, ("--world",)), *asked])
        return f"{line}    # covers uneven shards and other reduction orders"
    if "--world" not in words:
        words = [*words, "--world", str(case.world)]
    if all(c.case.workload != "vgg11" for c in report.cases):
        words = words_without(words, ("--workload", "--thorough", "--without", "--steps"))
        return f"{shlex.join([*words, '--workload', 'vgg11'])}    # BatchNorm, 37 MB of gradients"
    return shlex.join([*words_without(words, ("--seed",)), "--seed", str(case.seed + 1)])


def _closing(gap: Diagnosis, words: Sequence[str]) -> str:
    """Return the command that exercises a feature which no case has exercised."""
    option = options_that_exercise(gap).split()
    own = [word for word in option if word.startswith("--")]
    kept = words_without(words, (*own, "--workload", "--thorough", "--without", "--steps"))
    return f"{shlex.join([*kept, *option])}    # {gap.evidence}"


def unexercised_features(report: Report) -> list[Diagnosis]:
    """Return the features of the code that no case has exercised, without duplicates."""
    remarks = dict.fromkeys(one for case in report.cases for one in case.remarks)
    return [one for one in remarks if one.cause == NOT_EXERCISED]


def options_that_exercise(gap: Diagnosis) -> str:
    """Return the options that exercise a feature; "" if there are none."""
    return gap.suggestion.partition("--")[1] and "--" + gap.suggestion.partition("--")[2]


def _is_recorded(report: Report) -> bool:
    words = shlex.split(report.made.command) if report.made is not None else []
    complete = report.verdict == "pass" and report.saved_to is not None
    return complete and words[:2] == ["distcheck", "record"]


def _typed_words(report: Report) -> list[str] | None:
    """Return the words of the command line, if it is `distcheck verify`; otherwise None."""
    words = shlex.split(report.made.command) if report.made is not None else []
    if words[:2] == ["distcheck", "verify"]:
        return words
    if words[:2] == ["distcheck", "record"] and len(words) > 2:
        typed = [word for word in words[2:] if word != "--digests"]
        folder = report.saved_to if report.saved_to in typed else typed[0]
        typed.remove(folder)
        return ["distcheck", "verify", *typed]
    return None


def _words_of(case: Case) -> list[str]:
    words = ["distcheck", "verify", "--strategy", case.strategy]
    for name in ("backend", "device", "data", "data_dir", "batch", "deadline_s"):
        value = getattr(case, name)
        if value != getattr(_USUAL, name) and (name, value) != ("data", "exact"):
            shown = f"{value:g}" if name == "deadline_s" else str(value)
            words += [f"--{name.replace('_', '-')}", shown]
    words += [] if case.separate else ["--no-separate"]
    return words + case.adapter_options


_FLAGS = ("--thorough", *_ONLY_THEN)  # omitted options without a value


def words_without(
    words: Sequence[str], options: Sequence[str], *, flags: Sequence[str] = _FLAGS
) -> list[str]:
    """Return a command line without some options. `options` have values, `flags` have none."""
    kept: list[str] = []
    value_follows = False
    for word in words:
        if value_follows:
            value_follows = False
        elif word in options:
            value_follows = word not in flags
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept


_MOST_FAILURES, _MOST_REASONS, _MOST_NOTES = 2, 2, 2  # of a group; the rest is counted
_MOST_OF_FORM = 9  # lines of a note on the form, which is never cut
_MOST_TRACEBACK = 3  # lines, the last ones
# The properties a reader most likely needs next, among those that neither a pass nor the code
# covers.
_TELLING = ("uneven shards", "accumulation", "clipping", "loss scaling", "a resumed run")
_MORE = "-v"


def print_group(
    cases: Sequence[CaseReport],
    verdict: VerdictName,
    console: Console,
    *,
    alone: bool,
    said: "PrintedCauses",
) -> None:
    """Print the cases of one strategy in one world. They are printed in full if they are `alone` on
    the screen or did not pass, and in one line otherwise. Causes that were printed for another
    world (`said`) are not repeated.
    """
    print_headline(cases, verdict, console)
    lines = LabeledLines(console)
    for allowance in dict.fromkeys(case.accepted for case in cases if case.accepted is not None):
        lines.add("accepted", describe_accepted(allowance).removeprefix("accepted: "), most=5)
    if verdict == "pass":
        if alone:
            _add_pass(cases, lines)
    else:
        _add_failures([case for case in cases if case.verdict != "pass"], lines, said)
        passed = _passed_checks(cases)
        if passed:
            lines.add("ok", _ok(passed), most=2)
    remarks = (one for case in cases for one in case.remarks if one.cause != NOT_EXERCISED)
    for one in dict.fromkeys(remarks):
        lines.add("warning", f"{one.cause}: {one.evidence}; {one.suggestion}", most=3)
    right = [c.modules for c in cases if c.modules is not None and c.verdict == "pass"]
    for found in dict.fromkeys(map(sentence_on_modules, right)):
        lines.add("module", found, most=3)
    notes = list(dict.fromkeys(note for case in cases for note in case.notes))
    of_form = [note for note in notes if note.startswith((TAKEN_AS, FOUND_AS, LIMIT))]
    others = [note for note in notes if note not in of_form]
    shown = [*of_form, *others[: max(1, _MOST_NOTES - len(of_form))]]
    shown = shown if alone or verdict != "pass" else []
    for note in shown:
        lines.add("note", note, most=_MOST_OF_FORM if note in of_form else 2)
    if shown and len(notes) > len(shown):
        lines.add("", f"{len(notes) - len(shown)} more notes ({_MORE})")
    said.cut |= lines.print()


def print_end(report: Report, console: Console, *, verbose: bool, cut: bool = False) -> None:
    """Print the end of the screen for all cases: properties that are not covered, the folder of the
    run, and the next command. If lines were `cut`, also print where the complete lines are.
    """
    if report.verdict == "pass" and report.not_shown and not verbose:
        gaps = [
            f"{one.evidence}: {options_that_exercise(one) or one.suggestion}"
            for one in unexercised_features(report)
        ]
        telling = [one for one in _TELLING if one in report.not_shown]
        others = [*telling, *(one for one in report.not_shown if one not in telling)]
        others = [one for one in others if not any(gap.startswith(f"{one} (") for gap in gaps)]
        first = [*gaps, *others][:4]
        left = len(gaps) + len(others) - len(first)
        text = f"not covered: {'; '.join(first)}{f'; {left} more' * bool(left)} ({_MORE})"
        print_hanging(text, console, indent=0, style="dim")
    failed = most_telling_first([case for case in report.cases if case.verdict != "pass"])
    step = next_step(report)
    is_job = bool(report.cases[0].case.job)
    if failed and report.saved_to is not None and not report.interrupted and not is_job:
        step = f"distcheck replay {shlex.quote(report.saved_to)}"
    causes = dict.fromkeys(one.cause for case in failed for one in case.diagnosis)
    explained = [f"distcheck explain {cause}" for cause in causes if cause != "unexplained"][:1]
    more = [*explained, *_open_command(report.saved_to), *[_MORE][verbose:]]
    whole = f'    # "{CUT}" in full: {" or ".join(more[len(explained) :])}' if cut else ""
    ends = [
        ("replay" if is_job or step.startswith("distcheck replay ") else "next", step),
        ("saved", report.saved_to or ""),
        (
            "more",
            f"{', '.join(more)}{whole}" if any(not c.unfinished for c in report.cases) else "",
        ),
    ]
    for label, text in ends:  # not wrapped, so that they can be copied
        if text:
            console.print(Text(f"{label:<{VERDICT - 1}}{text}"), soft_wrap=True)


def _open_command(saved_to: str | None) -> list[str]:
    """Return the command that opens the HTML page of the report. It names the run if that was saved
    elsewhere.
    """
    if saved_to is None:
        return []
    is_last = saved_to.startswith(".distcheck/")
    return ["distcheck open" if is_last else f"distcheck open {shlex.quote(saved_to)}"]


def headline(cases: Sequence[CaseReport]) -> str:
    """Return the strategy, the world size and the size of the run, and the cause if
    there is one.
    """
    case = cases[0].case
    ranks = f"{case.world} rank{'s' * (case.world != 1)}"
    if case.backend not in ("gloo", "none"):
        ranks += f" on {case.backend}"
    if case.device != "cpu":
        ranks += f", {case.device}"
    causes = dict.fromkeys(
        one.cause for c in most_telling_first([c for c in cases if c.verdict != "pass"])
        for one in c.diagnosis
    )  # fmt: skip
    if causes:
        return f"{case.strategy}   {ranks}: {', '.join([*causes][:3])}"
    names = [f"{c.case.workload} {c.case.dtype}" for c in cases]
    if case.job:
        of = f"{case.steps} steps"
    else:
        of = ", ".join(names) if len(names) < 3 else f"{len(names)} training runs"
    return f"{case.strategy}   {ranks}, {of}, {sum(len(c.checks) for c in cases)} checks"


def print_headline(cases: Sequence[CaseReport], verdict: VerdictName, console: Console) -> None:
    print_verdict(headline(cases), verdict, console, bold=cases[0].case.strategy)


def _add_pass(cases: Sequence[CaseReport], lines: LabeledLines) -> None:
    """Add the lines of a pass: the largest error, and the mistakes that would have been
    detected.
    """
    results = [r for case in cases for r in case.checks if r.verdict == "pass"]
    for label, layer, how in (
        (EXACT, EXACT, "bit-identical in integer arithmetic"),
        (BITWISE, BITWISE, "bit-identical in the declared reduction order"),
    ):
        names = _check_names(
            r for r in results if r.layer == layer and r.check != "local gradients"
        )
        if names:
            lines.add(label, f"{joined_list(names)} {how}", most=2)
    closest = _worst(results)
    if closest is not None:
        share, of = closest
        lines.add(ROUNDING, f"max error is {share:.2g}% of the rounding bound ({of})")
    if reruns := [result.reason for result in results if result.check == "rerun"]:
        lines.add("repeat", _describe_reruns(reruns), most=2)
    others = _check_names(r for r in results if r.layer == NO_LAYER and r.check not in _SAID)
    if others:
        lines.add("ok", _ok(others), most=2)
    shown = [r.shown for r in results if r.check == SENSITIVITY and r.shown]
    if shown:
        ranks = len(cases[0].case.with_data)
        lines.add("catches", would_have_caught(shown, ranks=ranks), most=3)


def _describe_reruns(reasons: Sequence[str]) -> str:
    apart = " in fresh interpreters" * all(one.startswith(SEPARATELY) for one in reasons)
    other = [text for one in reasons if (text := one.partition(DIFFERS)[2].partition(";")[0])]
    if not other:
        return f"a second run{apart} is bit-identical"
    cases = f" in {len(other)} of {len(reasons)} cases" * (len(reasons) > 1)
    return f"a second run{apart} is not bit-identical{cases}{other[0]}"


_SAID = ("outcome", "rerun", SENSITIVITY)
_SHORT = {
    "missing-sync": "missing sync", "times-world": "missing division",
    "divided-by-world": "second division", "stale": "stale gradient",
    "lost-rank": "dropped rank", "doubled-rank": "duplicated rank",
    "other-parameter": "swapped parameters",
}  # fmt: skip


def _ok(checks: Sequence[str]) -> str:
    return ", ".join("agreement of ranks" if name == "agreement" else name for name in checks)


def would_have_caught(shown: Iterable[dict[str, RevealedMistakes]], *, ranks: int) -> str:
    """Return the basic mistakes that the comparisons would have revealed; with the number of
    tensors, unless that is all tensors.
    """
    several = list(shown)
    by_share: dict[str, list[str]] = {}
    for name, number, possible in count_revealing_tensors(
        [one for part in several for one in part.values()], ranks
    ):
        if number:
            share = "" if number == possible else f"in {number} of {possible} tensors"
            by_share.setdefault(share, []).append(_SHORT[name])
    found = [
        ", ".join(names) + (f" ({'each ' * (len(names) > 1)}{share})" if share else "")
        for share, names in sorted(by_share.items())
    ]
    factors = [
        limits[1]
        for part in several
        if (limits := smallest_revealed_scale_errors(part)) is not None
    ]
    if factors and isfinite(max(factors)):
        found.append(f"scale errors >= {max(factors):.0e}")
    return "; ".join(found) or "none of the simplest mistakes"


def _worst(results: Iterable[CheckResult]) -> tuple[float, str] | None:
    """Return the largest error in percent of its bound, and the check in which it occurred."""
    layers = (ROUNDING, *FULL_BATCH_LAYERS)
    bounded = [
        (float(r.worst.error) / float(r.worst.bound), r)
        for r in results
        if r.worst is not None and r.layer in layers and float(r.worst.bound) > 0
    ]
    if not bounded:
        return None
    share, result = max(bounded, key=lambda pair: pair[0])
    return 100 * share, result.check


def _check_names(results: Iterable[CheckResult]) -> list[str]:
    return list(dict.fromkeys(result.check for result in results))


def _passed_checks(cases: Sequence[CaseReport]) -> list[str]:
    results = [r for case in cases for r in case.checks if r.check not in _SAID]
    wrong = {result.check for result in results if result.verdict != "pass"}
    return [name for name in _check_names(results) if name not in wrong]


def _add_failures(cases: Sequence[CaseReport], lines: LabeledLines, said: PrintedCauses) -> None:
    """Add each failure once, with the names of the other cases that have the same failure."""
    alike = group_equal_failures(cases)
    new = [key for key in alike if key not in said.failures]
    failed, not_run = list[CaseReport](), dict[str, list[CaseReport]]()
    shown = 0
    for key in new:
        case, *others = alike[key]
        if why := _why_not_run(case):
            not_run.setdefault(why, []).extend(alike[key])
            continue
        causes, known = said.new_and_known(case)
        if known and not causes:
            names = ", ".join(one.cause for one in known)
            lines.add("also in", f"{_cases(alike[key])} (only {names})", most=2)
        elif shown == _MOST_FAILURES:
            failed += alike[key]
        else:
            shown += 1
            add_failure(case, causes, lines)
            for world in dict.fromkeys(said.world_of(case, one) for one in known):
                there = ", ".join(o.cause for o in known if said.world_of(case, o) == world)
                lines.add("also", f"{there} ({_above(case, world)})", most=2)
            said.add(case, causes)
            if others:
                lines.add("also in", _cases(others), most=2)
    if failed:
        lines.add("others", f"{_cases(failed)} did not pass either ({_MORE})", most=2)
    for why, left in not_run.items():
        lines.add("unknown", f"{_cases(left)}: {why}", most=3)
    for key in alike.keys() & said.failures.keys():
        where = _above(alike[key][0], said.failures[key])
        lines.add("also in", f"{_cases(alike[key])} ({where})", most=2)
    said.failures |= {key: found[0].case.world for key, found in alike.items() if key in new}


def _above(case: CaseReport, world: int) -> str:
    """Refer to causes that are printed further up, for another world of the same strategy."""
    return "described above" if world == case.case.world else f"as with {world} ranks, see above"


def _why_not_run(case: CaseReport) -> str:
    """Return the reason why nothing of a case was judged, if there is just one and nothing else to
    print; else "".
    """
    reasons = {result.reason if result.verdict == "unknown" else "" for result in case.checks}
    return reasons.pop() if len(reasons) == 1 and not (case.outcomes or case.diagnosis) else ""


def _cases(cases: Sequence[CaseReport]) -> str:
    return ", ".join(f"{case.case.workload} {case.case.dtype}" for case in cases)


def add_failure(case: CaseReport, causes: Sequence[Diagnosis], lines: LabeledLines) -> None:
    """Add the description of a failure, and its causes that are not yet on this screen."""
    for label, text in describe_rank_exits(
        case.outcomes, lines=_MOST_TRACEBACK + 1, says_cut=False
    ):
        lines.add(label, text, most=2 * _MOST_TRACEBACK + 2)
    first = earliest_failure([r for r in case.checks if r.check != "outcome"])
    seen = group_by_evidence(
        causes, first if first is not None and first.first is not None else None
    )
    for evidence, alike in [*seen.items()][:_MOST_FAILURES]:
        lines.add("cause", evidence, most=3 if len(seen) == 1 else 2)
        if len(alike) > 1:
            others = ", ".join(one.cause for one in alike[1:])
            larger = "; --world 3 distinguishes them" * any(
                "world of 3" in a.evidence for a in alike
            )
            lines.add("or", f"{others}, which look the same here{larger}", most=2)
    if case.modules is not None:
        lines.add("module", sentence_on_modules(case.modules), most=3)
    if first is not None and first.first is not None:
        of = "" if case.case.job else f"workload {case.case.workload} {case.case.dtype}: "
        lines.add("first", f"{of}{_format_place(first.check, first.first)}", most=3)
    elif not case.ranks_failed and (
        failed := [r for r in case.checks if r.verdict == "fail" and r.reason]
    ):
        lines.add("first", failed[0].reason, most=2)  # as of a guard, which keeps digests
    lines.add("where", describe_site(case.where, case.strategy_file), most=2)
    shown = causes[:_MOST_FAILURES]
    for label, text in chain.from_iterable(advice_lines(one.suggestion) for one in shown):
        lines.add(label, text, most=3 if len(causes) == 1 else 2)
    if case.ranks_failed:
        return  # the rest is not judged for that reason
    wanted = ("unknown",) if any(r.verdict == "fail" for r in case.checks) else ("unknown", "fail")
    by_reason: dict[str, list[str]] = {}
    for result in case.checks:
        if result.verdict in wanted and result.reason:
            by_reason.setdefault(result.reason, []).append(result.check)
    for reason, checks in [*by_reason.items()][:_MOST_REASONS]:
        lines.add("unknown", f"{', '.join(dict.fromkeys(checks))}: {reason}", most=3)


def _format_place(check: str, difference: Difference) -> str:
    """Format a place and its values: "gradients, step 0, parameter fc.weight, rank 2: got ..."."""
    where = f"{check}, {difference.place}"
    if check.endswith(("gradients", "parameters")):
        where = where.replace(f"step {difference.step}, ", f"step {difference.step}, parameter ", 1)
    elif difference.parameter in check.split():
        where = where.replace(f", {difference.parameter}", "", 1)
    if difference.actual == "" and difference.expected == "":
        return where
    norm = "norm " * (difference.unit == "L2 norm")
    actual, expected = show(difference.actual), show(difference.expected)
    if actual == expected and difference.ulp:
        return f"{where}: {difference.ulp:,} ULP from {expected}"
    return f"{where}: got {norm}{actual}, expected {expected}"
