"""Adds to the documentation site what lies outside docs/: the README and the files pages link to.

mkdocs.yml names this module as a hook. Links stay as they are in the sources, where they work in a
checkout; here each is turned into one that works on the site.
"""

import logging
import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

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


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the address of the site from `[project.urls]`, where it is set once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_url = project["urls"]["Documentation"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README as the first page, and every linked file that is not below docs/."""
    texts = {"README.md": (ROOT / "README.md").read_text()}
    texts |= {page: (ROOT / page).read_text() for page in OTHER_PAGES}
    texts |= {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for page, text in texts.items():
        if not page.startswith("docs/"):
            content = LINK.sub(lambda link, page=page: _on_site(page, link), text)  # type: ignore[misc]
            files.append(File.generated(config, _place_of(page), content=content))
    for target in sorted({found for page, text in texts.items() for found in _outside(page, text)}):
        _add(files, config, target)
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Turns links of a page of docs/ to files outside of it into links on the site."""
    source = page.file.src_uri  # type: ignore[attr-defined]
    if (ROOT / "docs" / source).exists():
        return LINK.sub(lambda link: _on_site(f"docs/{source}", link), markdown)
    return markdown


def on_page_content(content: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Warns of what a page's source means and its HTML does not show."""
    source = page.file.src_uri  # type: ignore[attr-defined]
    for found in not_rendered(page.markdown, content):  # type: ignore[attr-defined]
        LOG.warning("%s is not rendered as it is meant: %s", source, found)
    return content


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


def _add(files: Files, config: MkDocsConfig, target: str) -> None:
    """A file as it is; of a folder a page that lists its files, and each of them."""
    source = ROOT / target
    if target in files.src_uris:  # listed by its folder already
        return
    if not source.is_dir():
        content = source.read_text()
        files.append(File.generated(config, target, content=content))
        return
    rows = []
    for path in sorted(source.glob("*.py")):
        code = path.read_text()
        files.append(File.generated(config, f"{target}/{path.name}", content=code))
        summary = code.splitlines()[0].strip('"')
        rows.append(f"- [`{path.name}`]({path.name}): {summary}")
    page = File.generated(
        config,
        _place_of(target),
        content=f"# {target}\n\n" + "\n".join(rows) + "\n",
        inclusion=InclusionLevel.NOT_IN_NAV,
    )
    files.append(page)
