"""`distcheck doctor`: this machine."""

import click

from distcheck.cli.group import Command
from distcheck.worlds.launchers import is_elsewhere


@click.command("doctor", cls=Command)
def command() -> int:
    """Versions, machine, calibration and what can run here; made to be pasted."""
    if is_elsewhere():
        return 0
    from distcheck.cli.doctor import doctor_command

    return doctor_command()
