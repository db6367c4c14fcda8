"""`distcheck merge`: merges the reports of the shards of a plan."""

from typing import Any

import click

from distcheck.cli.group import OnceCommand
from distcheck.reports.files import errors_annotated, output_options, pop_output_files


@click.command("merge", cls=OnceCommand)
@click.argument("parts", metavar="PART.json...", nargs=-1, required=True, type=click.Path())
@output_options
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict line.")
def command(parts: tuple[str, ...], quiet: bool, **asked: Any) -> int:
    """Merge the reports of verify --shard; a planned case that is in none of them is unknown.

    \b
    distcheck merge part-*.json --json whole.json --junit whole.xml
    """  # fmt: skip
    from distcheck.verification.merging import merge_command

    files = pop_output_files(asked)
    with errors_annotated(files):
        return merge_command(parts, files=files, quiet=quiet)
