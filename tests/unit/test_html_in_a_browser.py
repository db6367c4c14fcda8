"""The HTML report in a real browser: it fits a phone, keeps to its policy, survives a stricter one.

A page around it measures: the report itself runs no script. Everything is served on loopback.
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distcheck.compare.screen import render_page
from distcheck.reports import html_report, training_report
from distcheck.reports.json_report import as_document
from tests import documents
from tests.unit.test_golden_outputs import compared
from tests.unit.test_screens import REPORTS as SCREENS
from tests.unit.test_training_page import runs

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")

WIDTHS = (360, 390, 1280)
DOCUMENTS = {
    "pass": documents.document(documents.passing(), changed=False),
    "several": documents.document(
        documents.mismatch(), documents.passing(world=3), documents.passing("ddp"),
        documents.crash(), documents.vgg11(),
    ),
    "hostile": documents.document(documents.hostile(), **{documents.HOSTILE: documents.HOSTILE}),
}  # fmt: skip
REPORTS = {name: html_report.render(document) for name, document in DOCUMENTS.items()}
REPORTS["job"] = html_report.render(as_document(SCREENS["job"]))
REPORTS["comparison"] = render_page(
    compared(("fail", "changed", 3), ("pass", "same", 0)), command="distcheck compare before"
)
PICTURED = {*DOCUMENTS, "training"}
REPORTS["training"] = training_report.render(runs(documents.HOSTILE, steps=900), version="0")

MEASURE = """<!doctype html><body><script>
const found = [];
const wanted = WANTED;
function topOf(page, what) {
  const found = page.querySelector(what);
  return found === null ? null : found.getBoundingClientRect().top;
}
function scrolls(element) {
  for (let e = element; e !== null; e = e.parentElement)
    if (/auto|scroll/.test(e.ownerDocument.defaultView.getComputedStyle(e).overflowX)) return true;
  return false;
}
function outside(elements, boxOf) {
  return [...elements].filter(element => {
    const box = element.getBoundingClientRect(), room = boxOf(element);
    return box.width > 0 && (box.left < room.left - 1 || box.right > room.right + 1);
  }).map(element => `${element.tagName}: ${element.textContent.slice(0, 40)}`);
}
function measure(frame, name) {
  const page = frame.contentDocument, root = page.documentElement;
  const cause = topOf(page, ".first strong");
  page.querySelectorAll("OPENED").forEach(d => { d.open = true; });
  const style = frame.contentWindow.getComputedStyle(page.body);
  const seen = [...page.querySelectorAll("svg[role=img]")].map(s => s.getBoundingClientRect());
  found.push({name, width: frame.width, wide: root.scrollWidth, text: page.body.innerText.length,
    background: style.backgroundColor, color: style.color, scripts: page.scripts.length,
    images: page.images.length, pictures: seen.filter(b => b.width > 50 && b.height > 50).length,
    drawn: seen.length, styled: style.fontFamily, cause,
    cut: outside(page.querySelectorAll("svg text"), e => e.ownerSVGElement.getBoundingClientRect()),
    lost: outside([...page.body.querySelectorAll("*")].filter(e => !scrolls(e)),
      () => ({left: 0, right: Number(frame.width)}))});
}
Promise.all(wanted.map(([name, width]) => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800;
  frame.onload = () => { measure(frame, name); frame.remove(); done(); };
  frame.src = name;
  document.body.append(frame);
}))).then(() => { document.body.textContent = JSON.stringify(found); });
</script>"""


class Served(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; under /blocked/ with a policy that blocks the style sheet, too."""

    def end_headers(self) -> None:
        if self.path.startswith("/blocked/"):
            self.send_header("Content-Security-Policy", "default-src 'none'")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name there)
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("site")
    for place in ("free", "blocked"):
        (folder / place).mkdir()
        for name, text in REPORTS.items():
            (folder / place / f"{name}.html").write_text(text, "utf-8")
        wanted = [(f"/{place}/{name}.html", width) for name in REPORTS for width in WIDTHS]
        # Unstyled, a table of numbers is as wide as its run is long; it is folded until asked for.
        opened = "details" if place == "free" else "details:not(.numbers)"
        page = MEASURE.replace("WANTED", json.dumps(wanted)).replace("OPENED", opened)
        (folder / f"{place}.html").write_text(page)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Served, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def browse(url: str, folder: Path, *, dark: bool = False) -> tuple[str, list[str]]:
    """The page's text when it has measured, and what the browser's console said."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--log-level=0",
        "--virtual-time-budget=60000", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--dump-dom", url,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    console = [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]
    return ran.stdout, console


def measured(dom: str) -> list[dict[str, Any]]:
    text = re.search(r"\[\{.*\}\]", dom)
    assert text is not None, dom[:2000]
    found: list[dict[str, Any]] = json.loads(text[0])
    return found


def name_of(page: dict[str, Any]) -> str:
    return Path(page["name"]).stem


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_and_obeys_its_own_policy(site: tuple[Path, str], *, dark: bool) -> None:
    folder, address = site
    dom, console = browse(f"{address}/free.html", folder, dark=dark)
    found = measured(dom)
    assert len(found) == len(REPORTS) * len(WIDTHS)
    assert not console
    for page in found:
        assert page["wide"] <= int(page["width"]), page
        assert not page["lost"], "wider than the window, in nothing that scrolls"
        assert not page["cut"], "words of a picture beyond its edge"
        assert page["scripts"] == page["images"] == 0
        assert page["pictures"] == page["drawn"], page
        assert bool(page["drawn"]) == (name_of(page) in PICTURED), page
        assert page["text"] > 500
        if name_of(page) not in ("pass", "training", "comparison"):
            assert 0 < page["cause"] < 3 * 800, "at most three screens of a phone before it"
    light = {sum(map(int, re.findall(r"\d+", page["background"])[:3])) > 384 for page in found}
    assert light == {not dark}


def test_it_can_be_read_where_its_style_is_blocked(site: tuple[Path, str]) -> None:
    folder, address = site
    dom, console = browse(f"{address}/blocked.html", folder)
    assert console, "the stricter policy was not in force"
    assert all("style" in line for line in console)
    for page in measured(dom):
        assert page["wide"] <= int(page["width"]), page
        assert page["pictures"] == page["drawn"], page
        assert bool(page["drawn"]) == (name_of(page) in PICTURED), page
        assert "system-ui" not in page["styled"]
        assert page["text"] > 500
