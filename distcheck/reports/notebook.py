"""The report where Python shows a value: its screen, its page in a cell, its JSON as a value."""

import shutil
from typing import Any

import msgspec
from markupsafe import escape

from distcheck.records import Report
from distcheck.reports import json_report, terminal

_NARROWEST = 60  # columns
_HEIGHT = 640  # pixels, until a reader drags the frame


def screen(report: Report) -> str:
    """What the command line prints, as wide as the terminal."""
    if not report.cases:
        return report.given_up or f"{report.verdict}: no case was judged"
    width = shutil.get_terminal_size((100, 24)).columns
    return terminal.render_text(report, width=max(width, _NARROWEST)).rstrip("\n")


def document(report: Report) -> dict[str, Any]:
    """What a reader of `--json` gets."""
    read: dict[str, Any] = msgspec.json.decode(json_report.render_json(report))
    return read


def in_a_cell(report: Report) -> str:
    """The HTML page in a frame of its own: its styles and the notebook's do not meet, and a
    `sandbox` without any permission runs no script, whatever the report holds.
    """
    from distcheck.reports import html_report  # its templates take time at every start

    page = escape(html_report.render(json_report.as_document(report)))
    style = f"width: 100%; height: {_HEIGHT}px; border: 0; resize: vertical"
    return f'<iframe sandbox title="distcheck report" style="{style}" srcdoc="{page}"></iframe>'
