"""Writes a report to files in addition to the screen, with an option `--NAME FILE` for each format.

A format is a module of `distcheck.reports` with `render(document) -> str`. Its only input is the
document that `--json` writes, so a saved JSON file can be rendered again. `--github` takes no file:
annotations are lines of standard output, and the summary goes to a file that GitHub names.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from distcheck import private
from distcheck.errors import CannotRunError, DistcheckError, UsageError
from distcheck.errors.masking import mask_secret_patterns, masked_json
from distcheck.errors.shown_text import without_secrets, without_workflow_commands
from distcheck.records import Report

F = TypeVar("F", bound=Callable[..., Any])

# Option: module of `distcheck.reports`, and help text.
FORMATS = {
    "json": ("json_report", "Write the report as JSON; - for standard output."),
    "junit": ("junit", "Write the report as JUnit XML, with one test case for each case."),
    "html": ("html_report", "Write the report as one HTML page, with pictures."),
    "sarif": (
        "sarif",
        "Write causes and lines as SARIF, for code scanning; - for standard output.",
    ),
    "gitlab": ("gitlab", "Write causes and lines as GitLab's code quality report (JSON)."),
}
GITHUB = "github"
_IN_JSON = ("--json", "--sarif", "--gitlab")
_SUMMARY = "GITHUB_STEP_SUMMARY"
_STDOUT = "-"


def output_options(command: F) -> F:
    """Add `--json FILE` and the options of the other formats to a command, as parameters
    `json_file` etc.
    """
    command = click.option(
        f"--{GITHUB}",
        is_flag=True,
        help="Annotate failed cases on GitHub, and write the job summary.",
    )(command)
    for name in reversed(FORMATS):
        command = click.option(
            f"--{name}",
            f"{name}_file",
            metavar="FILE",
            type=click.Path(dir_okay=False),
            help=FORMATS[name][1],
        )(command)
    return command


def output_names() -> list[str]:
    """Return the parameters of `output_options`."""
    return [GITHUB, *(f"{name}_file" for name in FORMATS)]


def pop_output_files(asked: dict[str, Any]) -> dict[str, str]:
    """Remove the parameters of `output_options` from `asked`, and return the files by format. The
    file of `--github` is the summary of the step; "" if GitHub names none.
    """
    given = {name: asked.pop(f"{name}_file") for name in FORMATS}
    if asked.pop(GITHUB):
        given[GITHUB] = os.environ.get(_SUMMARY, "")
    return {name: path for name, path in given.items() if path is not None}


def check_outputs(files: Mapping[str, str]) -> None:
    """Check before a run that output files can be written, because the verdict would otherwise be
    lost. Raises CannotRunError; UsageError if two outputs have the same path.
    """
    for name, path in files.items():
        if name != GITHUB:
            check_writable(path, option=f"--{name}")
        elif path:
            check_writable(path, option=f"${_SUMMARY}")
    if len(set(files.values())) < len(files):
        options = " and ".join(f"--{name} {path}" for name, path in files.items())
        raise UsageError(f"{options} name the same file; give each option a different file")
    for name, path in files.items():
        if path == _STDOUT and GITHUB in files:
            raise UsageError(
                f"--{name} - and --{GITHUB} would both write to standard output; pass --{name} a "
                "file"
            )


def write_outputs(files: Mapping[str, str], report: Report) -> None:
    """Write every file. Raises CannotRunError."""
    from distcheck.reports.json_report import as_document

    if files:
        write_document(files, as_document(report))


def write_answer(path: str | None, schema: str, **answer: Any) -> bool:
    """Write the result of a command that has no report as JSON. Return False if `path`
    is not set.
    """
    from distcheck.reports.json_report import render

    if path is not None:
        check_writable(path)
        write_text(path, render({"schema": schema, **answer}))
    return path is not None


def write_document(files: Mapping[str, str], document: dict[str, Any]) -> None:
    """Write a document in every requested format, with secrets masked. Raises CannotRunError."""
    document = without_secrets(document)
    for name, path in files.items():
        if name == GITHUB:
            _write_for_github(path, document)
            continue
        module = importlib.import_module(f"distcheck.reports.{FORMATS[name][0]}")
        write_text(path, module.render(document), option=f"--{name}")


@contextlib.contextmanager
def damaged_file_as_usage_error(*files: str | Path) -> Iterator[None]:
    """Raise UsageError for any exception within the block, which processes documents read from
    `files`. The documents are valid JSON of the right schema, but may contradict themselves, such
    as a map with fewer rows than names.
    """
    try:
        yield
    except (DistcheckError, click.ClickException):
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UsageError(
            f"{' or '.join(map(str, files))} is damaged: its contents contradict each other "
            f"({said}); write the report again"
        ) from error


@contextlib.contextmanager
def errors_annotated(files: Mapping[str, str]) -> Iterator[None]:
    """Annotate an error that prevents a report, for GitHub."""
    try:
        yield
    except DistcheckError as error:
        if GITHUB in files:
            from distcheck.reports import github

            click.echo(github.error(str(error)))
        raise


def _write_for_github(summary: str, document: dict[str, Any]) -> None:
    from distcheck.reports import github

    root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    for line in github.annotations(document, root):
        click.echo(line)
    if not summary:
        return
    try:
        with private.held(summary) as place:
            opened = private.open_held(place, os.O_WRONLY | os.O_APPEND)
        room = github.MOST_SUMMARY_BYTES - os.fstat(opened).st_size
        with os.fdopen(opened, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(github.step_summary(document, room_bytes=room))
    except OSError as error:
        raise CannotRunError(
            f"${_SUMMARY} {summary} cannot be written: {error.strerror}"
        ) from error


def check_writable(path: str | None, *, option: str = "--json") -> None:
    """Check that a file can be written. Raises CannotRunError before anything runs."""
    if path is None or path == _STDOUT:
        return
    try:
        with private.held(path) as place:
            there = place.exists()
            # Opening a pipe without a reader fails at once instead of blocking.
            os.close(private.open_held(place, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
            if not there:
                place.unlink()
    except OSError as error:
        why = error.strerror
        if isinstance(error, FileNotFoundError):
            why = f"the folder {Path(path).parent} does not exist; create it first"
        raise CannotRunError(f"{option} {path} cannot be written: {why}") from error


def write_text(path: str, text: str, *, option: str = "--json") -> None:
    """Write a file, or standard output for "-". Secrets are masked again. Raises CannotRunError."""
    text = masked_json(text) if option in _IN_JSON else mask_secret_patterns(text)
    if path == _STDOUT:
        form = "json" if option in _IN_JSON else "xml"
        click.echo(without_workflow_commands(text, form=form), nl=False)
        return
    try:
        private.publish(path, text)
    except OSError as error:
        raise CannotRunError(f"{option} {path} cannot be written: {error.strerror}") from error
