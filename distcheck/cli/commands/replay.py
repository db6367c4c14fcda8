"""`distcheck replay`: replays a case, or the cases of a bundle."""

from collections.abc import Sequence
from typing import Any

import click

from distcheck.cli.group import Command
from distcheck.cli.options import RUNS, trust_option
from distcheck.reports.files import GITHUB, output_options, pop_output_files


@click.command("replay", cls=Command)
@click.argument("case_file", metavar="CASE.json|RUN|BUNDLE.zip", type=click.Path(), **RUNS)
@output_options
@click.option("--save", metavar="DIR", type=click.Path(), help="Save everything in a new folder.")
@trust_option
@click.option("-v", "--verbose", is_flag=True, help="Print every check, note and table in full.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict lines.")
def command(
    case_file: str, save: str | None, trust: bool, verbose: bool, quiet: bool, **asked: Any
) -> int:
    """Rerun a case exactly as it was saved, or all cases of a saved run or a bundle.

    The report lists all changes since then: files, versions, machine, settings. For a job,
    distcheck job runs the command again, after confirmation or with --trust.

    Code from a bundle or from another user's folder, and files that git does not track here or
    that have changed, are listed first, with a digest. They run only after confirmation on a
    terminal, or with --trust.
    """  # fmt: skip
    from distcheck.store.bundle import read_cases_to_replay
    from distcheck.store.trust import require_trust
    from distcheck.worlds.launchers import launch_of

    replay = read_cases_to_replay(case_file)
    cases, made = replay.cases, replay.made
    launch, _ = launch_of({}, tuple(dict.fromkeys(case.world for case in cases)))
    require_trust(
        case_file, cases, made, doing="replaying", trusted=trust, may_ask=launch is None,
        folder=replay.folder, unpacked=replay.unpacked,
    )  # fmt: skip
    if cases[0].job:
        return _job_again(cases[0].job, asked, save=save, verbose=verbose, quiet=quiet)
    if launch is not None and not launch.is_front:
        from distcheck.cli.under_launchers import lend_ranks

        return lend_ranks(launch, lambda: cases, deadline_s=cases[0].deadline_s)
    from distcheck.cli.show_and_keep import OutputOptions, verify_command
    from distcheck.verification.run import RunOptions

    return verify_command(
        cases,
        RunOptions(made=made),
        OutputOptions(files=pop_output_files(asked), verbose=verbose, quiet=quiet),
        save=save,
        launch=launch,
    )


def _job_again(
    words: Sequence[str],
    outputs: dict[str, Any],
    *,
    save: str | None,
    verbose: bool,
    quiet: bool,
) -> int:
    """Run `distcheck job` again with a saved job's arguments."""
    from distcheck.cli.commands import job

    annotates = outputs[GITHUB]
    asked = {
        f"--{name}": path for name, path in pop_output_files(outputs).items() if name != GITHUB
    }
    asked |= {} if save is None else {"--save": save}
    options = [word for pair in asked.items() for word in pair]
    options += [f"--{GITHUB}"] if annotates else []
    options += [*["--verbose"] * verbose, *["--quiet"] * quiet]
    return int(job.command.main([*options, *words], standalone_mode=False))
