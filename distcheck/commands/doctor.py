"""`distcheck doctor`: this machine."""

import click

from distcheck.launchers import is_elsewhere


@click.command("doctor")
def command() -> int:
    """Versions, machine, calibration and what can run here; made to be pasted."""
    if is_elsewhere():
        return 0
    from distcheck.doctor import doctor_command

    return doctor_command()
