"""`distcheck bundle`: packs a run into a zip file for another user."""

import click

from distcheck.cli.group import OnceCommand
from distcheck.cli.options import RUNS


@click.command("bundle", cls=OnceCommand)
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(), **RUNS)
@click.option(
    "-o",
    "--output",
    metavar="FILE.zip",
    type=click.Path(dir_okay=False),
    help="Name of the zip file. [default: RUN's name]",
)
@click.option("--traces", is_flag=True, help="Include all recordings, for distcheck recheck.")
def command(run: str | None, output: str | None, traces: bool) -> int:
    """Pack a run, the latest by default, into a zip that a colleague can replay.

    It contains cases, report and the code under test, and only environment variables from a list
    of non-secret names. The report contains the text of exceptions and output, in which
    distcheck masks passwords in addresses and the values of variables whose names contain TOKEN,
    SECRET, PASSWORD, CREDENTIAL, AUTH, COOKIE, KEY or similar words. Source files are included
    unchanged: a secret in one of them is in the bundle.
    """  # fmt: skip
    import shlex
    from pathlib import Path

    from distcheck.errors.shown_text import print_displayable
    from distcheck.store.bundle import make_bundle
    from distcheck.store.run_folder import latest_run

    folder = Path(run) if run is not None else latest_run()
    target = Path(output or f"{folder.resolve().name}.zip")
    manifest, remarks = make_bundle(folder, target, traces=traces)
    for remark in remarks:
        print_displayable(f"distcheck: {remark}", err=True)
    print_displayable(f"{target}: {len(manifest.cases)} cases of {folder}")
    for source in manifest.sources:
        print_displayable(f"  {source.spec}: {source.file}{'' if source.runs else ' (to be read)'}")
    if manifest.variables:
        print_displayable(f"  variables: {', '.join(manifest.variables)}")
    print_displayable(f"next:  {shlex.join(['distcheck', 'replay', str(target)])}")
    return 0
