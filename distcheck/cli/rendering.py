"""What `distcheck report` does: a document from a file, and out again in other formats."""

from collections.abc import Mapping
from pathlib import Path

from distcheck.errors import ExitCode, UsageError
from distcheck.reports.documents import read_report
from distcheck.reports.files import FORMATS, check_outputs, damage_said, write_document


def report_command(run: str, *, files: Mapping[str, str]) -> int:
    """Renders a report again; returns the exit code. `run` is a JSON, or a run's folder.

    Raises UsageError for what is not a report, CannotRunError where nothing can be written.
    """
    if not files:
        options = ", ".join(f"--{name} FILE" for name in FORMATS)
        raise UsageError(f"no output is given for {run}; give at least one of: {options}")
    path = Path(run)
    if path.is_dir():
        path /= "report.json"
    document = read_report(path)
    if any(Path(file).absolute() == path.absolute() for file in files.values()):
        raise UsageError(f"{path} is the report that is read; write to another file")
    check_outputs(files)
    with damage_said(path):
        write_document(files, document)
    return int(ExitCode.PASS)
