"""Command line: selects a command, runs it, and exits. The commands are modules in `commands/`."""

import contextlib
import errno
import importlib
import os
import sys
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from distcheck import __version__, private, registry
from distcheck.cli import streams
from distcheck.cli.commands import COMMANDS
from distcheck.errors import CannotRunError, DistcheckError, ExitCode, InternalError, did_you_mean
from distcheck.errors.defects import innermost_own_place, save_traceback
from distcheck.worlds import interrupts

# Errors of this machine's disks, not defects of a program.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def main() -> NoReturn:
    """Entry point of the console script. All exit codes are members of `ExitCode`."""
    output = streams.replace_standard_streams()
    interrupts.handle_signals()
    try:
        code = root_command.main(standalone_mode=False, prog_name="distcheck")
    except (KeyboardInterrupt, click.Abort):  # click turns the one into the other
        _print_error("interrupted; nothing is left running")
        code = ExitCode.INTERRUPTED
    except click.ClickException as error:
        code = ExitCode.USAGE
        _print_error(error.format_message(), code)
    except InternalError as error:
        code = ExitCode.INTERNAL
        _print_error(_defect_line(str(error), error.traceback), code)
    except DistcheckError as error:
        code = error.exit_code
        _print_error(str(error), code)
    except Exception as error:
        code = _print_unexpected_error(error)
    interrupts.ignore_signals()
    output.flush()
    if output.lost:
        _print_error(
            f"warning: standard output was not written: {output.lost}; the verdict is unaffected"
        )
        code = code or ExitCode.CANNOT_RUN
    sys.exit(int(code or 0))


class _Commands(click.Group):
    """Command group that imports a command's module only when that command is used. It also lists
    the commands of installed add-ons.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        of = registry.COMMANDS
        return [name for name in COMMANDS if name not in of or registry.is_installed(of[name])]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries of the commands without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands, without importing their modules, and options."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name]) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            word = args[0]
            if word.endswith(".py") or ":" in word:
                raise click.UsageError(f"{word!r} is not a command; {_hint_for_code(word)}", ctx)
            known = ", ".join(COMMANDS)
            meant = did_you_mean(word, [*COMMANDS, "--help", "--version"])
            raise click.UsageError(f"unknown command {word!r}{meant}; known are {known}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments as click does. For an option that is unknown at this position, the error
        asks to put it after a command. Arguments and the working directory must be UTF-8, because
        reports contain them.
        """
        names = [*args]
        with contextlib.suppress(OSError):
            names.append(os.getcwd())
        for name in names:
            if name.encode(errors="ignore").decode() != name:
                raise click.UsageError(f"{name!a} is not UTF-8; rename it", ctx)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            said = error.format_message().rstrip(".")
            raise click.UsageError(
                f"{said}; options follow the command: distcheck verify {error.option_name} ...", ctx
            ) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = (
            registry.command_module(cmd_name)
            if cmd_name in registry.COMMANDS
            else f"distcheck.cli.commands.{cmd_name}"
        )
        found: click.Command = importlib.import_module(module).command
        return found


def _hint_for_code(word: str) -> str:
    if ":" in word:
        return f"to check it, run distcheck verify --strategy {word}"
    return (
        f"to check a function in it, run distcheck verify --strategy {word}:NAME; to check the "
        f"whole script, run distcheck job --world 2 -- python {word}"
    )


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 pass, 1 mismatch, 2 usage, 3 cannot run, 4 a rank failed, 5 unknown, "
    "70 internal error.\n\n"
    "To complete commands, options and names with Tab, put this into ~/.bashrc (for zsh: "
    "zsh_source and ~/.zshrc):\n\n\b\n"
    'eval "$(_DISTCHECK_COMPLETE=bash_source distcheck)"',
)
@click.version_option(__version__)
@click.pass_context
def root_command(context: click.Context) -> ExitCode | None:
    """Do N ranks train the same model as one process?"""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        return ExitCode.USAGE
    try:
        os.getcwd()
    except OSError as error:  # torch cannot be imported there, either
        raise CannotRunError(
            "the working directory no longer exists; change to an existing directory"
        ) from error
    return None


def _print_unexpected_error(error: Exception) -> ExitCode:
    """Print an error that no command handles: a problem of the machine, or a defect of
    distcheck.
    """
    if isinstance(error, MemoryError):
        _print_error(
            "memory is insufficient; free some, raise the limit (ulimit -v), or pass a smaller "
            "--world or --workload",
            ExitCode.CANNOT_RUN,
        )
        return ExitCode.CANNOT_RUN
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        _print_error(f"{error.strerror}; raise their limit (ulimit -n)", ExitCode.CANNOT_RUN)
        return ExitCode.CANNOT_RUN
    temporary = private.temporary_folder()
    if isinstance(error, OSError) and (error.errno in _OF_THE_MACHINE or temporary is None):
        where = error.filename or f"a file in {os.getcwd()} or {temporary or 'TMPDIR'}"
        _print_error(
            f"{where} cannot be written: {error.strerror}; free some space, or work in another "
            "folder and set TMPDIR",
            ExitCode.CANNOT_RUN,
        )
        return ExitCode.CANNOT_RUN
    import traceback

    trace = traceback.format_exc()
    what = f"{type(error).__name__}: {error} (at {innermost_own_place(trace)})"
    _print_error(_defect_line(what, trace), ExitCode.INTERNAL)
    return ExitCode.INTERNAL


def _defect_line(what: str, traceback: str) -> str:
    saved = save_traceback(traceback)
    kept = f"the traceback is in {saved}" if saved else "its traceback could not be saved"
    return (
        f"internal error: {what}; this is a bug in distcheck, and there is no verdict; {kept}: "
        "please report it with that file"
    )


def _print_error(message: str, code: ExitCode | None = None) -> None:
    from distcheck.errors.shown_text import print_displayable

    print_displayable(f"distcheck: {message}", err=True)
    if code is not None and "TORCHELASTIC_ERROR_FILE" in os.environ:
        from distcheck.cli.under_launchers import write_error_file

        write_error_file(int(code), message)
