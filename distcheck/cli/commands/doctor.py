"""`distcheck doctor`: examines this machine."""

import click

from distcheck.cli.group import OnceCommand


@click.command("doctor", cls=OnceCommand)
def command() -> int:
    """Print versions, machine, calibration and available backends, for example for a bug report."""
    from distcheck.cli.doctor import doctor_command

    return doctor_command()
