"""`distcheck skill`: prints instructions for coding agents."""

import click

from distcheck.cli.group import OnceCommand

_FOLDER = ".agents/skills"


@click.command("skill", cls=OnceCommand)
@click.option("--install", metavar="[DIR]", is_flag=False, flag_value=_FOLDER,
              help="Write DIR/distcheck/SKILL.md instead. DIR is the folder in which your agent "
              f"looks for skills, such as .claude/skills. [default: {_FOLDER}]")  # fmt: skip
def command(install: str | None) -> None:
    """Print a SKILL.md for coding agents: which command answers which question, how to read
    verdicts, exit codes and JSON, and which rules to follow.

    \b
    distcheck skill
    distcheck skill --install .claude/skills
    """  # fmt: skip
    from importlib.resources import files
    from pathlib import Path

    from distcheck import private
    from distcheck.errors import CannotRunError, UsageError
    from distcheck.errors.shown_text import print_displayable
    from distcheck.records.symptoms import symptoms
    from distcheck.reports.files import check_writable, write_text

    rows = [f"| {one.text} | `{'`, then `'.join(one.commands)}` |" for one in symptoms().values()]
    text = files("distcheck.cli").joinpath("skill.md").read_text("utf-8")
    text = text.replace("{symptoms}", "\n".join(rows))
    if install is None:
        click.echo(text, nl=False)
        return
    place = Path(install) / "distcheck" / "SKILL.md"
    around = "." if install == _FOLDER else install
    try:
        if not private.link_target(str(place)).is_relative_to(private.link_target(around)):
            raise UsageError(f"{place} leads out of {around} through a link; remove the link")
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotRunError(f"{place} cannot be written: {error.strerror}") from error
    check_writable(str(place), option="--install")
    write_text(str(place), text, option="--install")
    print_displayable(f"wrote {place}")
