"""The screen of `distcheck train`: what is trained, a line for each epoch, and how ranks failed."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from distcheck.errors.shown_text import one_line, shown
from distcheck.records import Case, Outcome
from distcheck.reports.failures import ends_of_ranks
from distcheck.reports.wrapping import VERDICT, Lines, hanging, print_verdict

_MOST_TRACEBACK = 4  # lines of a rank's


def heading(case: Case, torch: object, *, width: int) -> Iterator[str]:
    case = shown(case)
    how = f"{case.strategy}, {case.world} ranks" if case.strategy else "one process"
    text = (
        f"{case.workload} on {case.data}, {how}: batch {case.batch}, seed {case.seed}, "
        f"{case.dtype}, 1 thread a rank, torch {torch}"
    )
    yield from hanging(one_line(text), width, first="train", indent=VERDICT)


def epoch(row: Mapping[str, Any], epochs: int, *, width: int) -> Iterator[str]:
    """The figures of an epoch; `row` is what --json has of it."""
    accuracy = "not known"  # some buffers of the model are on no rank as a whole
    if row["tested"]:
        accuracy = f"{100 * row['accuracy']:.2f} % of {row['tested']:,}"
    timed = max(row["steps"] - 1, 1)
    text = (
        f"loss {row['loss']:.4f}, accuracy {accuracy}, {row['mean_step_s']:.3f} s per step (mean "
        f"of {timed}{', first left out' * (row['steps'] > 1)}; median {row['median_step_s']:.3f}, "
        f"max {row['max_step_s']:.3f})"
    )
    name = f"epoch {row['epoch']}/{epochs}:"
    yield from hanging(text, width, first=f"{name} ", indent=len(name) + 1)


def print_failure(case: Case, outcomes: Sequence[Outcome], console: Console) -> None:
    """Whose ranks failed, how, and the command that names the cause."""
    case = shown(case)
    ranks = f"{case.world} rank{'s' * (case.world != 1)}"
    name = case.strategy or case.workload
    print_verdict(f"{name}   {ranks}", "fail", console, bold="")
    lines = Lines(console)
    for label, text in ends_of_ranks(shown(list(outcomes)), lines=_MOST_TRACEBACK, says_cut=False):
        lines.add(label, text, most=2 * _MOST_TRACEBACK)
    lines.print()
    if case.strategy:
        words = ["distcheck", "verify", "--strategy", case.strategy, *case.adapter_words]
        words += ["--world", str(case.world)]
        console.print(Text(f"next   {shlex.join(words)}    # names the cause"), soft_wrap=True)
