"""What `distcheck report` does: a document from a file, and out again in other formats."""

from collections.abc import Mapping
from pathlib import Path

from distcheck.documents import read_report
from distcheck.errors import ExitCode, UsageError
from distcheck.outputs import FORMATS, check_outputs, write_document
from distcheck.reports.json_report import SCHEMA


def report_command(run: str, *, files: Mapping[str, str]) -> int:
    """Renders a report again; returns the exit code. `run` is a JSON, or a run's folder.

    Raises UsageError for what is no report, CannotRunError where nothing can be written.
    """
    if not files:
        options = ", ".join(f"--{name} FILE" for name in FORMATS)
        raise UsageError(f"say what to make of {run}: {options}")
    path = Path(run)
    if path.is_dir():
        path /= "report.json"
    document = read_report(path)
    if any(Path(file).absolute() == path.absolute() for file in files.values()):
        raise UsageError(f"{path} is the report that is read; write to another file")
    check_outputs(files)
    try:
        write_document(files, document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{path} says that it is {SCHEMA!r}, and lacks what such a report has, or has it in "
            f"another form ({type(error).__name__}: {error}); write the report again"
        ) from error
    return int(ExitCode.PASS)
