"""`distcheck open`: opens the HTML report of a saved run."""

import webbrowser
from pathlib import Path

import click

from distcheck.cli.commands.report import convert
from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS
from distcheck.errors import ExitCode, UsageError
from distcheck.errors.shown_text import print_displayable
from distcheck.store.run_folder import latest_run


@click.command("open", cls=OnceCommand)
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(), **RUNS)
def command(run: str | None) -> int:
    """Open the HTML report of a saved run, the last by default, in a browser.

    distcheck renders it from the run's JSON, and saves it next to it as report.html. If no browser
    can be started, the command prints its address.
    """  # fmt: skip
    folder = Path(run) if run is not None else latest_run(with_report=True)
    page = (folder if folder.is_dir() else folder.parent) / "report.html"
    if page.is_symlink() or (page.exists() and not page.is_file()):
        raise UsageError(f"{page} is a link or a special file; expected a regular file; remove it")
    convert(str(folder), files={"html": str(page)})
    address = page.absolute().as_uri()
    try:
        shown = webbrowser.open(address)
    except webbrowser.Error:
        shown = False
    print_displayable(address if shown else f"no browser could be started; open {address}")
    return int(ExitCode.PASS)
