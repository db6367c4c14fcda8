"""`distcheck list`: what there is."""

import click

from distcheck.cli.group import OnceCommand


@click.command("list", cls=OnceCommand)
def command() -> None:
    """Strategies, workloads, data sets and checks, one line each."""
    from distcheck.cli.catalog import catalog

    for heading, entries in catalog():
        click.echo(heading)
        width = max((len(name) for name, _ in entries), default=0)
        for name, summary in entries:
            click.echo(f"  {name:<{width}}  {summary}")
