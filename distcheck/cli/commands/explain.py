"""`distcheck explain`: what a guard has found, and why."""

from pathlib import Path

import click

from distcheck.cli.group import Command


@click.command("explain", cls=Command)
@click.argument("bundle", metavar="FILE", type=click.Path())
def command(bundle: str) -> int:
    """Explain a bundle that distcheck.guard has saved: what differs, since when, and why.

    \b
    distcheck explain distcheck-guard/step-000200.json
    """
    from distcheck.errors import ExitCode
    from distcheck.errors.shown_text import say
    from distcheck.job.guard import explaining, records

    found = records.read(Path(bundle))
    say(found.text)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    say(f"  {len(found.ranks)} ranks, checked every {found.every} steps; {found.optimizer}, "
        f"{found.wrapper or 'no model seen'}; {versions}")  # fmt: skip
    for one in found.findings:
        if one.differing > 1:
            more = f" and {one.differing - 8} more" if one.differing > 8 else ""
            say(f"  {one.kind} that differ: {', '.join(one.names[:8])}{more}")
    for sums in found.sums:
        say(f"  {sums.name}: ranks are up to {explaining.distance(sums):.3g} of its norm apart")
    for cause in explaining.causes(found):
        say(f"cause   {cause.cause}: {cause.evidence}")
        say(f"to do   {cause.suggestion}")
    return int(ExitCode.MISMATCH)
