"""`distcheck doctor`: examines this machine."""

import click

from distcheck.cli.group import OnceCommand


@click.command("doctor", cls=OnceCommand)
def command() -> int:
    """Versions, machine, calibration and what can run here; made to be pasted."""
    from distcheck.cli.doctor import doctor_command

    return doctor_command()
