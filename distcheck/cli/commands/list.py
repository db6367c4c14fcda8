"""`distcheck list`: what there is."""

import click

from distcheck.cli.group import Command
from distcheck.worlds.launchers import is_elsewhere


@click.command("list", cls=Command)
def command() -> None:
    """Strategies, workloads, data sets and checks, one line each."""
    if is_elsewhere():
        return
    from distcheck.cli.catalogue import catalogue

    for heading, entries in catalogue():
        click.echo(heading)
        width = max((len(name) for name, _ in entries), default=0)
        for name, summary in entries:
            click.echo(f"  {name:<{width}}  {summary}")
