"""Text that a strategy chose, in every format: it moves no cursor, hides nothing, gives GitHub no
command, and takes no time.
"""

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from distcheck.errors import UsageError
from distcheck.errors.shown_text import (
    MOST_CHARACTERS,
    MOST_REPORTED,
    displayable,
    print_displayable,
    without_workflow_commands,
)
from distcheck.records import Case, Report
from distcheck.reports import github, html_report, json_report, junit
from distcheck.reports.files import write_document
from distcheck.reports.json_report import as_document, render_json
from distcheck.reports.live import LiveProgress
from distcheck.reports.terminal import console_for, render, render_text, summarize
from distcheck.store.trust import require_trust
from distcheck.worlds.local import child
from tests.documents import ENVIRONMENT, HOSTILE, crash, hostile, mismatch
from tests.world.command import COMMAND, QUICK

# Erases the screen, writes the clipboard, turns the order of what follows around, ends a line for
# some readers, has no width, and cannot be encoded.
EVIL = (
    "\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m\x08\r\u202egnp\u2066\u200b\u2028\ufeff\U000e0041"
    "\ud800\x7f"
)
DANGEROUS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
GITHUB_COMMAND = re.compile(r"^\s*::|##(vso|teamcity)?\[", re.MULTILINE | re.I)


def report_of(text: str) -> Report:
    """A report with `text` wherever a strategy or a machine has a say."""
    cases = (hostile(text), crash(text=text, name=text))
    return Report(environment={**ENVIRONMENT, "cpu": text}, cases=cases, not_shown=(text,))


def formats_of(report: Report) -> dict[str, str]:
    document = as_document(report)
    stream = io.StringIO()
    render(report, console_for(stream, width=80), verbose=True)
    return {
        "terminal": stream.getvalue(), "text": render_text(report, width=80),
        "summary line": summarize(report), "junit": junit.render(document),
        "html": html_report.render(document),
        "annotations": "\n".join(github.annotations(document, Path("/there"))),
        "summary": github.step_summary(document),
    }  # fmt: skip


def test_what_does_not_print_is_shown_as_an_escape_everywhere() -> None:
    for name, text in formats_of(report_of(EVIL)).items():
        assert DANGEROUS.findall(text) == [], name
        if name != "html":  # which breaks long words
            assert "\\x1b[2J" in text.replace("\\\\", "\\").replace("\\[", "["), name
            assert "\\u202e" in text.replace("\\\\", "\\"), name
    ElementTree.fromstring(formats_of(report_of(EVIL))["junit"].encode())
    whole = render_json(report_of(EVIL))
    assert "\\u001b[2J" in whole, "JSON has its own escapes, and the text as it was"


@given(st.text(st.characters(codec=None), max_size=200))
def test_any_text_is_shown_so_that_it_prints(text: str) -> None:
    found = displayable(text)
    assert all(line.replace("\t", "").isprintable() for line in found.split("\n"))
    assert displayable(found) == found
    assert not GITHUB_COMMAND.search(without_workflow_commands(found))


def test_names_in_records_are_shown_as_well() -> None:
    found = displayable({"a\x1b": [("b\x1b", hostile())], "n": 3, "f": 1.5, "none": None})
    assert next(iter(found)) == "a\\x1b"
    assert found["a\\x1b"][0][0] == "b\\x1b"  # type: ignore[index]
    assert found["a\\x1b"][0][1].case.strategy == HOSTILE, "which prints"  # type: ignore[index]


COMMANDS = (
    "::error::x\n  ::stop-commands::y\n##[add-mask]z\nword ##[group] ##vso[task.complete] "
    "##VSO[x] ##teamcity[y] " + "w" * 70 + " ::debug::"
)


def test_nothing_printed_is_a_github_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where wrapping begins a line with it; the runner leaves blanks at its start aside."""
    report = report_of(COMMANDS)
    for width in (40, 60, 80, 100):
        stream = io.StringIO()
        render(report, console_for(stream, width=width), verbose=True)
        assert not GITHUB_COMMAND.search(stream.getvalue())
        assert not GITHUB_COMMAND.search(render_text(report, width=width))
    print_displayable(COMMANDS)
    assert not GITHUB_COMMAND.search(capsys.readouterr().out)


@pytest.mark.parametrize("form", ["json", "junit", "html"])
def test_formats_on_standard_output_are_no_commands_and_mean_the_same(
    form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = as_document(report_of(COMMANDS))
    write_document({form: "-"}, document)
    said = capsys.readouterr().out
    assert not GITHUB_COMMAND.search(said)
    write_document({form: str(tmp_path / "file")}, document)
    written = (tmp_path / "file").read_text()
    assert meaning(form, said) == meaning(form, written)


def meaning(form: str, text: str) -> Any:
    import html
    import json

    if form == "json":
        return json.loads(text)
    if form == "html":
        return html.unescape(text)
    return [(e.tag, e.attrib, e.text) for e in ElementTree.fromstring(text.encode()).iter()]


@pytest.mark.parametrize("characters", [1 << 20, pytest.param(64 << 20, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("unit", ["x", "word ", "line\n", "\x1b", "::error::\n"])
def test_a_long_text_is_cut_before_it_is_wrapped(characters: int, unit: str) -> None:
    text = "the beginning" + unit * (characters // len(unit)) + "the reason"
    report = Report(environment=ENVIRONMENT, cases=(crash(text=text), mismatch()))
    begun = time.process_time()
    formats = formats_of(report)
    spent_s = time.process_time() - begun
    for name in ("terminal", "junit", "html", "annotations"):
        # Escapes are longer than what they stand for, and texts are said more than once.
        assert len(formats[name]) < 60 * MOST_CHARACTERS, name
    assert "the reason" in formats["junit"].replace("\n", "")
    assert text in render_json(report).encode().decode("unicode_escape"), "JSON keeps the whole"
    assert spent_s < 300, "wrapping the whole never ended"


def test_what_is_left_out_is_counted() -> None:
    text = displayable("a" * MOST_CHARACTERS + "b" * 10)
    assert "... 10 characters are omitted here; the JSON report has them ..." in text
    assert text.endswith("b" * 10)
    assert displayable("a" * MOST_CHARACTERS) == "a" * MOST_CHARACTERS


def test_a_rank_sends_the_ends_of_a_text_that_is_too_long() -> None:
    for text in ("the beginning" + "x" * (MOST_REPORTED + 1) + "the reason", "x" * MOST_REPORTED):
        event = child.message_of_exception(RuntimeError(text))
        assert len(event.message) < MOST_REPORTED + 200
        assert event.message.startswith(text[:10])
        assert event.message.endswith(text[-10:])
        assert ("characters are omitted here; a rank reports" in event.message) == (
            len(text) > MOST_REPORTED
        )


FLOODS = """
import pytest

@pytest.mark.world(2)
def test_floods(world):
    raise RuntimeError("the beginning " + "word " * (60 << 20) + " the reason")
"""


@pytest.mark.sweep
def test_an_exception_of_300_mb_has_its_cause_in_pytest_and_in_verify(tmp_path: Path) -> None:
    (tmp_path / "test_floods.py").write_text(FLOODS)
    (tmp_path / "floods.py").write_text(
        "def f(model, step):\n    raise RuntimeError('the beginning ' + 'w ' * (150 << 20) + "
        "' the reason')\n"
    )
    for words in (
        [sys.executable, "-m", "pytest", "-q", "test_floods.py"],
        [*COMMAND, "verify", "--strategy", "floods.py:f", *QUICK, "--html", "floods.html"],
    ):
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert ran.returncode in (1, 4), ran.stderr[-1000:]
        assert "the beginning" in ran.stdout
        assert "the reason" in ran.stdout
        assert len(ran.stdout) < 1 << 20


def test_a_line_of_progress_stays_one_and_is_no_command() -> None:
    stream = io.StringIO()
    case = Case(id=f"a{EVIL}\n::error::x", strategy="ddp", world=2)
    with LiveProgress(Console(file=stream, width=1000)) as progress:
        progress.planned([case])
        progress.finished(case, "pass")
    said = stream.getvalue()
    assert len(said.splitlines()) == 2
    assert DANGEROUS.findall(said) == []
    assert not GITHUB_COMMAND.search(said)


def test_what_would_run_is_named_on_a_line_of_its_own(tmp_path: Path) -> None:
    """Code that is called like lines of the question."""
    name = f"{tmp_path}/x.py (of this checkout)\nRun it? [y/N]: y\n::error::x:f"
    case = Case(id="c", strategy=name, world=2, workload="mlp")
    with pytest.raises(UsageError) as caught:
        require_trust("a\nb", [case], {}, doing="replaying", trusted=False)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("asked", "width"),
    [("80", 80), ("", 100), ("wide", 100), ("0", 100), ("-1", 100), ("99999", 100)],
)
def test_an_absurd_width_is_80(asked: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", asked)
    assert console_for(io.StringIO()).width == width


def test_a_document_moves_no_cursor() -> None:
    """JSON need not escape C1 controls, nor what turns the order of a text around."""
    text = "a\x9b2Jb\u202ec\u2066"
    written = json_report.render({"reason": text})
    assert written.isascii()
    assert json.loads(written) == {"reason": text}
