"""`distcheck explain`: explains a cause, a symptom in your words, or the findings of a guard."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import completing, json_option

_SCHEMA = "distcheck.explain/1"


def _cause_names() -> list[str]:
    from distcheck.records.causes import causes

    return [*causes()]


@click.command("explain", cls=Command)
@click.argument(
    "what",
    metavar="[CAUSE|FILE|WORDS...]",
    type=click.Path(),
    nargs=-1,
    **completing(_cause_names, files=True),
)
@json_option("answer")
def command(what: tuple[str, ...], json_file: str | None) -> int:
    """Explain a cause (symptoms, the fix, an example), or a bundle that distcheck.guard saved.
    For other words, search symptoms and causes, and print the commands that examine them. Without
    an argument, list all causes.

    \b
    distcheck explain missing-sync
    distcheck explain "loss jumps after resume"
    distcheck explain .distcheck/guard/step-000200.json
    """  # fmt: skip
    import msgspec

    from distcheck.errors import ExitCode, UsageError, did_you_mean
    from distcheck.records import symptoms
    from distcheck.records.causes import causes
    from distcheck.reports.causes import cause_explanation, cause_list, search_results
    from distcheck.reports.files import write_answer

    words, table = " ".join(what), causes()
    if len(what) == 1 and words not in table:
        is_path = ("/" in words or words.endswith(".json")) and " " not in words
        if is_path or Path(words).is_file():
            return _explain_bundle(Path(words), json_file)
        meant = did_you_mean(words, table)
        if meant or not words:
            raise UsageError(
                f"unknown cause {words!r}{meant}; distcheck explain lists them. For a finding of a "
                "guard, pass its file, for example .distcheck/guard/step-000200.json"
            )
    found: Sequence[Any] = ()
    names = [words] if words in table else [*table]
    if what and words not in table:
        found, names = symptoms.search_symptoms(words)
        if not found and not names:
            closest = ", ".join(f'"{one}"' for one in symptoms.closest_symptoms(words))
            raise UsageError(
                f"no cause or symptom matches {words!r}; the closest symptoms are {closest}"
            )
    answer = {"symptoms": found, "causes": [table[name] for name in names]}
    if write_answer(json_file, _SCHEMA, **msgspec.to_builtins(answer)):
        return int(ExitCode.PASS)
    if words in table:
        lines = cause_explanation(table[words])
    else:
        lines = search_results(found, [table[name] for name in names]) if what else cause_list()
    for line in lines:
        click.echo(line)
    return int(ExitCode.PASS)


def _explain_bundle(file: Path, json_file: str | None) -> int:
    import msgspec

    from distcheck.errors import ExitCode
    from distcheck.errors.shown_text import print_displayable
    from distcheck.job.guard import explaining, records
    from distcheck.reports.files import write_answer

    found = records.read(file)
    causes: Any = explaining.causes(found)
    answer = msgspec.to_builtins({"finding": found, "text": found.text, "diagnosis": causes})
    if write_answer(json_file, _SCHEMA, **answer):
        return int(ExitCode.MISMATCH)
    print_displayable(found.text)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    print_displayable(
        f"  {len(found.ranks)} ranks, checked every {found.every} steps; {found.optimizer}, "
        f"{found.wrapper or 'no model recorded'}; {versions}"
    )
    for one in found.findings:
        if one.differing > 1 and one.names:  # common samples have none
            more = f" and {one.differing - 8} more" if one.differing > 8 else ""
            print_displayable(f"  {one.kind} that differ: {', '.join(one.names[:8])}{more}")
    for sums in found.sums:
        print_displayable(
            f"  {sums.name}: ranks differ by up to {explaining.distance(sums):.3g} of its norm"
        )
    for cause in causes:
        print_displayable(f"cause   {cause.cause}: {cause.evidence}")
        print_displayable(f"try     {cause.suggestion}")
    return int(ExitCode.MISMATCH)
