"""The HTML report, from fixed documents: complete, well-formed, inert, and small."""

import base64
import hashlib
import importlib.util
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from distcheck.cli.commands.report import command
from distcheck.errors import CannotRunError, UsageError
from distcheck.records.run_facts import ComparedModule, ModuleComparison
from distcheck.reports import html_report, json_report
from distcheck.reports.html_report import breakable
from distcheck.reports.json_report import decode_document
from tests import documents

ROOT = Path(__file__).parents[2]
VOID = {"meta", "br", "wbr", "img", "link", "input", "hr", "path"}
MODULES = ModuleComparison(
    first=f"first wrong module: layers.1.up {documents.HOSTILE}", name="layers.1.up",
    is_found=True, compared=8,
    modules=(
        ComparedModule(name="layers.0", kind="Block", state="near", error=1e-7, bound=2e-6),
        ComparedModule(name="layers.1.up", kind="Linear", state="wrong", error=0.1, bound=2e-6),
        ComparedModule(name="layers.1", kind=documents.HOSTILE, state="follows", calls=2),
        ComparedModule(name="a." * 3000, kind="", state="unseen"),
        ComparedModule(name="", kind="Net", state="follows"),
    ),
)  # fmt: skip
ALL = {
    "modules": documents.document(msgspec.structs.replace(documents.mismatch(), modules=MODULES)),
    "pass": documents.document(documents.passing(), changed=False),
    "mismatch": documents.document(documents.mismatch()),
    "crash": documents.document(documents.crash()),
    "several": documents.document(
        documents.passing(), documents.mismatch(), documents.crash(), documents.passing("ddp", 3)
    ),
    "hostile": documents.document(documents.hostile(), **{documents.HOSTILE: documents.HOSTILE}),
    "vgg11": documents.document(documents.vgg11()),
}
SEEN: dict[str, "Page"] = {}


class Page(HTMLParser):
    """A page, taken apart; raises where an end tag closes something else than was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "wbr":  # which breaks a word, and is none
            self.words.append(" ")
        if tag not in VOID or tag == "path":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.elements if tag in tags]

    @property
    def visible(self) -> str:
        return " ".join("".join(self.words).split())


def page(name: str) -> Page:
    if name not in SEEN:
        SEEN[name] = Page(html_report.render(ALL[name]))
    return SEEN[name]


@pytest.mark.parametrize("name", ALL)
def test_it_is_well_formed_and_needs_nothing_else(name: str) -> None:
    seen = page(name)
    assert not seen.all("script", "img", "link", "iframe", "object", "embed", "form", "base")
    for _, attrs in seen.elements:
        assert "style" not in attrs
        assert not [a for a in attrs if a.startswith("on") or a in ("src", "srcset", "data")]
        assert (attrs.get("href") or "#").startswith("#")
    style = re.findall(r"<style>(.*?)</style>", seen.text, re.DOTALL)
    assert len(style) == 1
    assert "url(" not in style[0]
    assert "@import" not in style[0]
    digest = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    policy = seen.all("meta")[1]["content"]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


@pytest.mark.parametrize("name", ALL)
def test_a_screen_reader_finds_its_way(name: str) -> None:
    seen = page(name)
    tags = [tag for tag, _ in seen.elements]
    assert [tags.count(tag) for tag in ("header", "main", "footer", "h1")] == [1, 1, 1, 1]
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert tags.count("table") == tags.count("caption")
    assert all(attrs.get("scope") in ("row", "col") for attrs in seen.all("th"))
    ids = [attrs["id"] for _, attrs in seen.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for attrs in seen.all("svg"):
        if attrs.get("aria-hidden") != "true":
            assert attrs["role"] == "img"
            assert set((attrs["aria-labelledby"] or "").split()) <= set(ids)
    links = {attrs["href"] for attrs in seen.all("a")}
    assert links <= {f"#{found}" for found in ids}
    assert len(links) == len(ALL[name]["cases"])


def test_a_mismatch_is_shown_from_every_side() -> None:
    text = page("mismatch").visible
    wrong = documents.VGG11[3]
    for words in (
        "mine.py:sync, world 4, cnn float32: partial-sync.",
        "distcheck replay cases/mine.json",
        "Error / bound: gradients, rounding",
        f"2 cells exceed the bound. The largest ratio of error to bound is 5.5, at {wrong}, step "
        "2.",
        "Bits: gradients, bitwise",
        "22 of 24 cells are bit-identical. 2 differ.",
        f"{wrong} 1, 2 ",  # the mask's numbers
        "3b39ec1e 3b39ec12",
        "check the code that selects the parameters to reduce",
        "torch 2.12.1 2.13.0",
    ):
        assert words in text, words


def test_a_crash_shows_the_root_cause_first_and_who_called_what() -> None:
    text = page("crash").visible
    ends = ("rank 1 raised an exception", "rank 2 was terminated", "rank 3 was killed")
    assert sorted(map(text.index, ends)) == [text.index(end) for end in ends]
    assert (
        "At call 7, ranks 0, 4 called all_reduce of [64] and rank 2 called all_reduce of [10x64], "
        "and rank 3 reported no data; so it is unknown which is wrong." in text
    )
    assert "Call 7 is missing on rank 1." in text
    assert "exited; no data" in text


def test_failed_cases_come_first_and_passed_ones_are_folded() -> None:
    seen = page("several")
    text = seen.visible
    assert text.rindex("mine.py:sync, world 4") < text.rindex("allreduce, world 4")
    assert text.rindex("crashes.py:sync, world 5") < text.rindex("allreduce, world 4")
    assert "2 of 4 cases failed" in text
    assert "not run" in text  # the grid has a hole


def test_cases_of_several_backends_are_called_by_theirs() -> None:
    document = documents.document(documents.passing(), documents.passing())
    heading = "allreduce, world 4, cnn float32"
    assert Page(html_report.render(document)).visible.count(heading) == 2
    document["cases"][1]["case"]["backend"] = "simulated:tree"
    text = Page(html_report.render(document)).visible
    assert heading not in text
    assert "allreduce, world 4, simulated:tree, cnn float32" in text


def test_of_very_many_cases_those_that_passed_are_not_drawn() -> None:
    cases = [documents.passing(f"s{at}") for at in range(30)]
    text = Page(html_report.render(documents.document(*cases, documents.mismatch()))).visible
    assert (
        text.count("Error / bound: gradients, rounding") == 3
    )  # its title, its caption, its table's
    assert text.count("too many cases to draw those that passed") == 30
    assert "All 30 cases passed." in Page(html_report.render(documents.document(*cases))).visible


def test_what_was_accepted_left_out_or_put_together_is_said() -> None:
    document = documents.document(documents.passing(), documents.passing("ddp"))
    why = {"kind": "quantized:8", "widened": "widens R", "not_owed": ["agreement: it rounds"]}
    document["cases"][1]["accepted"] = why
    document["left_out"] = {"fp16-exact": "it would overflow"}
    document["parts"] = [{"file": "a", "shard": 1, "exit_code": 1, "environment": {}}] * 2
    text = Page(html_report.render(document)).visible
    assert "All 2 cases passed, 1 of them with an accepted deviation." in text
    assert "pass quantized:8 accepted" in text
    assert "Accepted: quantized:8 widens R; not checked: agreement: it rounds." in text
    assert "fp16-exact: it would overflow" in text
    assert "Merged from 2 parts" in text


def test_a_pass_says_what_it_does_not_show() -> None:
    text = page("pass").visible
    assert "The one case passed." in text
    assert "Not covered by this pass: world sizes other than 4." in text
    assert "Unchanged since the last run that passed" in text
    assert "Every cell is within its bound" in text


def test_nothing_of_a_hostile_document_is_markup() -> None:
    seen = page("hostile")
    assert "alert('x')" in seen.visible
    assert "{{7*7}}" in seen.visible
    assert "49" not in [word.strip() for word in seen.words]
    assert "<script" not in seen.text
    assert "<img" not in seen.text
    assert seen.text.count("</style>") == 1


def test_vgg11_over_60_steps_is_under_a_megabyte() -> None:
    assert len(page("vgg11").text.encode()) < 1_000_000
    assert len(json_report.render(ALL["vgg11"]).encode()) < 300_000


def test_what_is_beyond_the_size_of_a_map_shares_cells() -> None:
    report = documents.document(documents.vgg11(steps=300))
    found = next(c["map"] for c in report["cases"][0]["checks"] if c["layer"] == "rounding")
    assert found["steps_per_column"] == 3
    assert len(found["rows"][0].split()) == len(found["steps"]) == 100
    assert (
        max(map(float, found["rows"][9].split())) == 302
    )  # three digits; the worst of a cell stays
    text = Page(html_report.render(report)).visible
    assert "Each cell shows the worst of 1 parameter and 3 steps." in text
    assert "Each cell shows the worst of 2 parameters and 3 steps." in text


def test_control_characters_of_a_log_are_shown() -> None:
    text = html_report.render(documents.document(documents.crash(text="a\x1b[31mred\x00\r\nb")))
    assert "a\\x1b[31mred\\x00\\r\nb" in text.replace("<wbr>", "")


def test_an_older_report_without_the_keys_for_pictures_is_rendered() -> None:
    document = json.loads(json_report.render(ALL["mismatch"]))
    del document["since_green"]
    for case in document["cases"]:
        case["checks"] = [{k: v for k, v in c.items() if k != "map"} for c in case["checks"]]
    text = Page(html_report.render(document)).visible
    assert "partial-sync" in text
    assert "Pictures" not in text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_json_cannot_hold(value: str) -> None:
    document = json.loads(json_report.render(ALL["mismatch"]))
    for check in document["cases"][0]["checks"]:
        if check.get("map", {}).get("kind") == "bound":
            check["map"]["rows"][0] = " ".join([value, "-", "0.5"])
        if "worst" in check:
            check["worst"].update(actual=value, error=value)
    Page(html_report.render(document))


def ask(*words: object) -> Any:
    return CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)


def write(folder: Path, document: Any) -> Path:
    path = folder / "report.json"
    path.write_text(json.dumps(document))
    return path


def test_the_command_renders_a_file_or_a_run(tmp_path: Path) -> None:
    path = write(tmp_path, ALL["mismatch"])
    for source, target in ((path, "one.html"), (tmp_path, "two.html")):
        assert ask(source, "--html", tmp_path / target).return_value == 0
    written = (tmp_path / "one.html").read_text("utf-8")
    assert written == (tmp_path / "two.html").read_text("utf-8") == page("mismatch").text
    assert ask(path, "--json", tmp_path / "again.json").return_value == 0
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**ALL["pass"], "schema": "distcheck.report/2"}, "distcheck.report/2"),
        ({"a": 1}, "schema None"),
        ([1], "is not a report"),
        ({"schema": "distcheck.report/1"}, "is damaged: Object missing required field"),
        ({**ALL["pass"], "cases": [{"case": {"strategy": 3}}]}, "at `$.cases[0].case.strategy`"),
    ],
    ids=["version", "other", "list", "empty", "malformed"],
)
def test_an_invalid_report_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    path = write(tmp_path, content)
    error = ask(path, "--html", tmp_path / "out.html").exception
    assert isinstance(error, UsageError)
    assert words in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / "out.html").exists()


def test_bad_places(tmp_path: Path) -> None:
    path = write(tmp_path, ALL["pass"])
    error = ask(path, "--html", tmp_path / "no" / "out.html").exception
    assert isinstance(error, CannotRunError)
    assert "cannot be written" in str(error)
    for words, said in (
        ((tmp_path / "none.json", "--html", "x"), "does not exist"),
        ((path, "--json", path), "write to a different file"),
    ):
        error = ask(*words).exception
        assert isinstance(error, UsageError)
        assert said in str(error)


def test_an_option_is_not_broken_between_its_hyphens() -> None:
    found = breakable("pass --loss mean/world, or a--b --nproc-per-node=2")
    assert "<nobr>--loss</nobr> mean/<wbr>world" in found
    assert "<nobr>--nproc-per-node</nobr>" in found
    assert found.count("<nobr>") == 2


def test_the_picture_of_the_docs_is_of_the_code_that_the_readme_shows() -> None:
    spec = importlib.util.spec_from_file_location("make_picture", ROOT / "docs/make_picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text()
    lines = module.code_of(readme).splitlines()
    where = re.search(r"where    my_sync\.py:(\d+)  (.*)", readme)
    assert where is not None
    assert lines[int(where[1]) - 1].strip() == where[2]


def test_the_page_begins_with_its_causes_each_once() -> None:
    """However many verdicts there are: on a phone their grid is longer than three screens."""
    many = [documents.mismatch(f"s{n}.py:f") for n in range(30)]
    markup = html_report.render(documents.document(*many, documents.crash())).replace("<wbr>", "")
    first, grid = markup.index("partial-sync"), markup.index('id="verdicts"')
    assert first < grid
    begin = markup[:grid]
    assert begin.count("<strong>partial-sync</strong>") == 1
    assert "and 24 more" in " ".join(begin.split())
    assert "<strong>crash</strong>" in begin
    assert 'class="first"' not in html_report.render(documents.document(documents.passing()))
    case = markup.index('<article id="c0"')
    assert markup.index("<h3>Diagnosis</h3>", case) < markup.index("batch 256", case)


def test_differing_elements_are_those_of_the_cause() -> None:
    """Not of later steps, nor of a check that may follow from the first."""
    report = documents.mismatch()
    at, later = documents.place(documents.VGG11[1], 1), documents.place("later", 2)
    follows = documents.place("follows", 1)
    note = "begins after gradients had diverged at step 1, and may follow from it"
    checks = (
        documents.check("gradients", "rounding", "fail", first=at, worst=later),
        documents.check("parameters", "bitwise", "fail", first=follows, reason=note),
    )
    report = msgspec.structs.replace(report, checks=checks)
    (case,) = decode_document(documents.document(report)).cases
    view = html_report._case_view("c0", case, name="a", opened=True, pictured=False)
    assert [element["parameter"] for element in view["elements"]] == [documents.VGG11[1]]


def test_a_legend_says_what_the_layers_of_the_page_are() -> None:
    markup = html_report.render(documents.document(documents.passing()))
    assert "<dt>rounding</dt><dd>allows rounding errors in any summation order</dd>" in markup
    assert "<dt>bitwise</dt><dd>" in markup
    assert "<dt>full batch float64</dt>" not in markup, "no check of the page has it"


def test_a_table_that_goes_on_shows_that_it_does() -> None:
    style = html_report._style()
    assert "background-attachment" in style or "no-repeat local" in style
    assert "var(--shade)" in style


def test_the_tree_of_modules_is_open_where_one_is_wrong() -> None:
    seen = page("modules")
    text = re.sub(r"<[^>]+>", "", seen.text)
    tree = seen.text[seen.text.index('<ul class="modules">') :]
    opened = tree.index("<details open>")
    assert tree.index("layers") < tree.index(">up<")
    assert opened < tree.index(">up<")
    assert '<li class="fail"><span class="badge fail">up</span>' in tree
    assert "inputs match, outputs do not" in re.sub(r"\s+", " ", text)
