"""`distcheck record`: runs a verification and saves all of its traces, for `distcheck compare`."""

import click

from distcheck.cli.group import Command


@click.command(
    "record",
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[OPTIONS of distcheck verify]",
)
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--digests",
    is_flag=True,
    help="Save digests instead of tensors: small enough to commit. compare then finds the first "
    "divergence, but not its size.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="")
def command(folder: str, words: tuple[str, ...], digests: bool) -> int:
    """Verify, and save cases, traces and verdicts in a new folder, for distcheck compare.

    \b
    distcheck record golden --strategy allreduce --world 4
    distcheck record golden --digests --strategy allreduce --world 4
    """  # fmt: skip
    from distcheck.cli.commands.verify import command as verify
    from distcheck.errors import UsageError

    if any(word == "--save" or word.startswith("--save=") for word in words):
        raise UsageError(f"record saves the run in {folder}; remove --save")
    if folder.startswith("-"):
        raise UsageError(
            "the first argument of record must be the folder: distcheck record DIR --strategy ..."
        )
    code: int = verify.main(
        args=[*words, "--save", folder, *(["--digests"] * digests)],
        prog_name="distcheck record",
        standalone_mode=False,
    )
    return code
