"""The `next:` line of a screen: the next command, with the given options."""

import shlex
from collections.abc import Sequence

from distcheck.errors import ExitCode
from distcheck.records import Case, Diagnosis, Report
from distcheck.records.causes import NOT_EXERCISED
from distcheck.records.mesh import MESH
from distcheck.reports.files import FORMATS
from distcheck.reports.wording import most_telling_first

_FILES = (*(f"--{name}" for name in FORMATS), "--save")  # of the finished run; they exist now
_ONLY_THEN = ("--last-failed", "--failed-first", "--watch")
_USUAL = Case(id="", strategy="", world=1)
_LARGER_WORLDS = (3, 5)


def next_step(report: Report) -> str:
    """Return the next command: a replay of a failure; for an interrupted run the same command; else
    a run that covers more.
    """
    failed = most_telling_first([case for case in report.cases if case.verdict != "pass"])
    if failed and all(c.case.world == 1 and c.verdict == "unknown" for c in failed):
        asked = _typed(report) or _words_of(failed[0].case)
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
    words = _typed(report)
    if report.exit_code is ExitCode.INTERRUPTED:
        if words is None:
            words = [*_words_of(case), "--world", str(case.world)]
        return shlex.join(words_without(words, _FILES))
    words = _words_of(case) if words is None else words
    words = words_without(words, (*_FILES, *_ONLY_THEN, "--shard"))
    if gap := next(filter(option_of, gaps_of(report)), None):
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
    """Return the command that exercises a missing feature."""
    option = option_of(gap).split()
    own = [word for word in option if word.startswith("--")]
    kept = words_without(words, (*own, "--workload", "--thorough", "--without", "--steps"))
    return f"{shlex.join([*kept, *option])}    # {gap.evidence}"


def gaps_of(report: Report) -> list[Diagnosis]:
    """Return the features of the code that no case has exercised, each once."""
    remarks = dict.fromkeys(one for case in report.cases for one in case.remarks)
    return [one for one in remarks if one.cause == NOT_EXERCISED]


def option_of(gap: Diagnosis) -> str:
    """Return the options that exercise a feature, or ""."""
    return gap.suggestion.partition("--")[1] and "--" + gap.suggestion.partition("--")[2]


def _is_recorded(report: Report) -> bool:
    words = shlex.split(report.made.command) if report.made is not None else []
    complete = report.verdict == "pass" and report.saved_to is not None
    return complete and words[:2] == ["distcheck", "record"]


def _typed(report: Report) -> list[str] | None:
    """Return the typed words of `distcheck verify`; None for another command."""
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
        if value != getattr(_USUAL, name) and (name, value) != ("data", "lattice"):
            shown = f"{value:g}" if name == "deadline_s" else str(value)
            words += [f"--{name.replace('_', '-')}", shown]
    words += [] if case.separate else ["--no-separate"]
    return words + case.adapter_words


_FLAGS = ("--thorough", *_ONLY_THEN)  # omitted options without a value


def words_without(
    words: Sequence[str], options: Sequence[str], *, flags: Sequence[str] = _FLAGS
) -> list[str]:
    """Return a command line without some options and their values; `flags` have none."""
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
