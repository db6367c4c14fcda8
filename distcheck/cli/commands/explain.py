"""`distcheck explain`: explains a cause, and findings of a guard."""

from pathlib import Path

import click

from distcheck.cli.group import Command
from distcheck.cli.options import completing


def _names() -> list[str]:
    from distcheck.records.causes import causes

    return [*causes()]


@click.command("explain", cls=Command)
@click.argument(
    "what",
    metavar="[CAUSE|FILE]",
    type=click.Path(),
    required=False,
    **completing(_names, files=True),
)
def command(what: str | None) -> int:
    """Explain a cause (symptoms, an example, the repair), or a bundle that distcheck.guard saved.
    Without an argument, list all causes.

    \b
    distcheck explain missing-sync
    distcheck explain .distcheck/guard/step-000200.json
    """  # fmt: skip
    from distcheck.errors import ExitCode, UsageError, did_you_mean
    from distcheck.records.causes import causes
    from distcheck.reports.causes import explained, listed

    if what is None or what in causes():
        for line in listed() if what is None else explained(causes()[what]):
            click.echo(line)
        return int(ExitCode.PASS)
    if not what or (not Path(what).exists() and "/" not in what and not what.endswith(".json")):
        raise UsageError(
            f"unknown cause {what!r}{did_you_mean(what, causes())}; distcheck explain lists them. "
            "For a finding of a guard, pass its file, for example .distcheck/guard/step-000200.json"
        )
    return _explain_bundle(Path(what))


def _explain_bundle(file: Path) -> int:
    from distcheck.errors import ExitCode
    from distcheck.errors.shown_text import say
    from distcheck.job.guard import explaining, records

    found = records.read(file)
    say(found.text)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    say(f"  {len(found.ranks)} ranks, checked every {found.every} steps; {found.optimizer}, "
        f"{found.wrapper or 'no model recorded'}; {versions}")  # fmt: skip
    for one in found.findings:
        if one.differing > 1:
            more = f" and {one.differing - 8} more" if one.differing > 8 else ""
            say(f"  {one.kind} that differ: {', '.join(one.names[:8])}{more}")
    for sums in found.sums:
        say(f"  {sums.name}: ranks differ by up to {explaining.distance(sums):.3g} of its norm")
    for cause in explaining.causes(found):
        say(f"cause   {cause.cause}: {cause.evidence}")
        say(f"try     {cause.suggestion}")
    return int(ExitCode.MISMATCH)
