"""Display of a report as a Python value: its screen, its page in a notebook cell, its JSON."""

import shutil
from typing import Any

import msgspec
from markupsafe import escape

from distcheck.records import Report
from distcheck.reports import json_report, terminal

_NARROWEST = 60  # columns
_HEIGHT = 640  # pixels, resizable


def screen(report: Report) -> str:
    """Return the command line's output, in the terminal's width."""
    if not report.cases:
        return report.given_up or f"{report.verdict}: no case was judged"
    width = shutil.get_terminal_size((100, 24)).columns
    return terminal.render_text(report, width=max(width, _NARROWEST)).rstrip("\n")


def document(report: Report) -> dict[str, Any]:
    """Return the parsed `--json` document."""
    read: dict[str, Any] = msgspec.json.decode(json_report.render_json(report))
    return read


def in_a_cell(report: Report) -> str:
    """Return the HTML page in a frame that separates its styles from the notebook's; `sandbox`
    without permissions runs no script, whatever the report's contents.
    """
    from distcheck.reports import html_report  # slow import of templates

    page = escape(html_report.render(json_report.as_document(report)))
    style = f"width: 100%; height: {_HEIGHT}px; border: 0; resize: vertical"
    return f'<iframe sandbox title="distcheck report" style="{style}" srcdoc="{page}"></iframe>'
