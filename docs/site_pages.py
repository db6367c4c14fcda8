"""Writes the pages of the documentation site to a folder: docs/, the README, the files that pages
link to, and `llms.txt`. Any generator can build the site from it.

python docs/site_pages.py build/pages

In the sources, links work in a checkout; here, they work on the site. `llms.txt` is an index of all
pages for language models, in the order of the navigation; the site serves each page as Markdown,
too (gate.md next to gate/). mkdocs.yml names this module as a hook, so `mkdocs build` runs it.
"""

import logging
import posixpath
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.site_pages")  # a warning of it ends a strict build
CODE = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.DOTALL)
LEFT_OVER = re.compile(r"\]\(|```|\*\*|\|\s*-{3}|^\s*(?:\||[-*] )", re.MULTILINE)
AFTER_A_TABLE = re.compile(r"^ *\|.*\|\n(?! *\||\s*$)(.*)", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!https?:)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
OTHER_PAGES = (
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "strategies/README.md",
    "tests/mutants/README.md",
)  # fmt: skip


def on_config(config: Any) -> Any:
    """Build from the written pages, at the address in `[project.urls]`, where it is set once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_url = project["urls"]["Documentation"]
    config.docs_dir = str(ROOT / "build" / "pages")
    write(Path(config.docs_dir), list(_titled(config.nav)))
    return config


def on_post_build(config: Any) -> None:
    """Serve every page as Markdown, too."""
    pages = Path(config.docs_dir)
    for page in pages.rglob("*.md"):
        target = Path(config.site_dir) / page.relative_to(pages)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Warns of what a page's source means and its HTML does not show."""
    for found in not_rendered(page.markdown, content):
        LOG.warning("%s is not rendered as it is meant: %s", page.file.src_uri, found)
    return content


def write(folder: Path, titled: list[tuple[str, str]]) -> None:
    """Write all pages with their links, and `llms.txt`; `titled` is (title, page) in order."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    names = ["README.md", *OTHER_PAGES]
    names += [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md"))]
    texts = {name: (ROOT / name).read_text() for name in names}
    for page, text in texts.items():
        _put(folder, page, LINK.sub(lambda link, page=page: _on_site(page, link), text))  # type: ignore[misc]
    for target in sorted({found for page, text in texts.items() for found in _outside(page, text)}):
        _add(folder, target)
    (folder / "llms.txt").write_text(index_of(titled, folder))


def index_of(titled: list[tuple[str, str]], folder: Path) -> str:
    """Return `llms.txt`: the summary of the project, and every page with its first sentence."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = project["urls"]["Documentation"].rstrip("/")
    lines = [f"# distcheck\n\n> {project['description']}\n"]
    for title, page in titled:
        if not page:
            lines.append(f"\n## {title}\n")
            continue
        text = (folder / page).read_text()
        name = title or next(line for line in text.splitlines() if line.startswith("# "))[2:]
        lines.append(f"- [{name}]({base}/{page}): {_first_sentence(text)}")
    return "\n".join(lines) + "\n"


def _first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph of prose, without links."""
    text = re.sub(r"<!--.*?-->|^( *)```.*?^\1```", "", text, flags=re.S | re.M)
    text = re.sub(r"^#.*$", "\n", text, flags=re.M)
    prose = [part for part in text.split("\n\n") if re.match(r"[\w`*\[\"]", part.lstrip("\n"))]
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(prose[0].split()) if prose else "")
    return re.split(r"(?<=[.:?])\s", plain)[0]


def _titled(nav: Any, section: str = "") -> Iterator[tuple[str, str]]:
    """Yield (title, page) of a navigation, and (section, "") before the pages of each."""
    for entry in nav or ():
        title, target = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if isinstance(target, str):
            yield title, target
            continue
        if not section:
            yield title, ""
        yield from _titled(target, title)


def not_rendered(markdown: str, content: str) -> list[str]:
    """Lists and tables that stand as text in the HTML, for want of a blank line or indentation, and
    lines that became a row of the table before them.
    """
    text = re.sub(r"<[^>]+>", "", CODE.sub("", content))
    rows = AFTER_A_TABLE.findall(re.sub(r"^( *)```.*?^\1```", "", markdown, flags=re.S | re.M))
    return [text[max(0, m.start() - 20) : m.end() + 40] for m in LEFT_OVER.finditer(text)] + rows


def _target(page: str, path: str) -> str:
    """A link's target as a path from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def _place_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    return path.removeprefix("docs/")


def _on_site(page: str, link: re.Match[str]) -> str:
    here = posixpath.dirname(_place_of(page)) or "."
    place = posixpath.relpath(_place_of(_target(page, link["path"])), here)
    return place + (link["anchor"] or "")


def _outside(page: str, text: str) -> set[str]:
    targets = {_target(page, link["path"]) for link in LINK.finditer(text)}
    known = {"README.md", *OTHER_PAGES}
    return {
        target
        for target in targets
        if not target.startswith("docs/") and target not in known and (ROOT / target).exists()
    }


def _put(folder: Path, path: str, text: str) -> None:
    target = folder / _place_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def _add(folder: Path, target: str) -> None:
    """A file as it is; of a folder a page that lists its files, and each of them."""
    source = ROOT / target
    if not source.is_dir():
        _put(folder, target, source.read_text())
        return
    rows = []
    for path in sorted(source.glob("*.py")):
        code = path.read_text()
        _put(folder, f"{target}/{path.name}", code)
        summary = code.splitlines()[0].strip('"')
        rows.append(f"- [`{path.name}`]({path.name}): {summary}")
    _put(folder, target, f"# {target}\n\n" + "\n".join(rows) + "\n")


def main() -> None:
    """Write the pages to a folder."""
    import yaml

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    write(
        Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "pages",
        list(_titled(config["nav"])),
    )


if __name__ == "__main__":
    main()
