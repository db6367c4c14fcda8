"""Links of pages lead to files and headings that exist, in a checkout and on a package index."""

import importlib
import re
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")), ROOT / "strategies" / "README.md",
    *sorted((ROOT / "tests").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub and MkDocs form them: from headings, and as they are given in HTML."""
    text = prose(page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    formed = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
    return formed | set(re.findall(r'<a id="([^"]+)">', text))


def broken(page: Path) -> list[str]:
    found = []
    for path, anchor in LINK.findall(prose(page.read_text())):
        target = (page.parent / path).resolve() if path else page
        if path.startswith(("http:", "https:")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{path}#{anchor}" if anchor else path)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Here\n\n[a](#here) [b](#there) [c](page.md#here) [d](other.md)\n")
    assert broken(page) == ["#there", "other.md"]


def described() -> tuple[str, str]:
    """The long description of the package that this tree builds, and the address of its pages."""
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    return core.readme, core.urls["Documentation"].rstrip("/")


def test_the_readme_has_no_relative_link_on_a_package_index() -> None:
    text, _ = described()
    links = [path for path, _ in LINK.findall(prose(text))]
    assert len(links) > 20
    assert [path for path in links if not path.startswith("https://")] == []


def test_its_links_there_name_pages_of_the_site() -> None:
    """Each is a page of docs/, or a folder or README that docs/site_pages.py adds to the site."""
    text, base = described()
    for path, anchor in LINK.findall(prose(text)):
        name = path.removeprefix(f"{base}/").removesuffix("/")
        places = (f"docs/{name}.md", f"docs/{name}", f"docs/{name}/README.md", f"{name}.md", name)
        sources = [ROOT / place for place in places]
        source = next((s for s in sources if s.exists()), None)
        assert source is not None, path
        assert not anchor or anchor in anchors(source)


def test_what_a_page_does_not_render_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these ends `mkdocs build --strict`; on a right page nothing does."""
    markdown = pytest.importorskip("markdown")
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    found = importlib.import_module("site_pages").not_rendered

    def of(text: str) -> list[str]:
        return found(text, markdown.markdown(text, extensions=["tables", "fenced_code"]))

    assert of("a list:\n- one\n- two\n")
    assert of("a table:\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert of("| a | b |\n|---|---|\n| 1 | 2 |\n- one\n- two\n")
    assert of("| a | b |\n|---|---|\n| 1 | 2 |\nA sentence.\n") == ["A sentence."]
    assert of("**not closed\n")
    assert (
        of("a list:\n\n- one\n- `a | b`\n\n| a |\n|---|\n| `- x` |\n\n```\n| x |\n- y\n```\n") == []
    )
