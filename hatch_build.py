"""Installs `strategies/` as the import package `distcheck_strategies`, and `tests/mutants/` without
its tests as `distcheck_mutants`.

In a wheel that is a plain rename (pyproject.toml, force-include, for a whole folder; here for
single files). An editable install would get a *copy* that way, and edits would go unseen, so it
gets a package of a few lines that points back at the folder.

It also makes the README's links absolute, so that they work on a package index.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

POINTERS = {"distcheck_strategies": "strategies", "distcheck_mutants": "tests/mutants"}

# A package found through this has the folder's own `__init__.py` as its own.
POINTER = '''"""Points at a checkout."""

from pathlib import Path

__path__ = [{folder!r}]
__file__ = {folder!r} + "/__init__.py"
exec(compile(Path(__file__).read_text(), __file__, "exec"))
'''


# A relative link in Markdown. MkDocs serves docs/gate.md as gate/, folders and pictures under their
# own names.
RELATIVE_LINK = re.compile(
    r"\]\((?!https?:|#)(?:docs/)?(?P<page>[^)#]+?)(?:\.md|/|(?=\.png))(?P<anchor>\.png|#[^)]*)?\)"
)


def with_absolute_links(text: str, base: str) -> str:
    """The README with links to the documentation site in place of those to files."""

    def absolute(link: re.Match[str]) -> str:
        page = link["page"].removesuffix("/README")
        end = link["anchor"] or ""
        return f"]({base.rstrip('/')}/{page}{'' if end == '.png' else '/'}{end})"

    return RELATIVE_LINK.sub(absolute, text)


class ReadmeForAnIndex(MetadataHookInterface):  # type: ignore[misc]
    """Sets the long description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table `[project]`."""
        text = with_absolute_links(
            Path(self.root, "README.md").read_text(), metadata["urls"]["Documentation"]
        )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class RenamedPackages(BuildHookInterface):  # type: ignore[misc]
    """Adds what pyproject.toml cannot say; an sdist is left alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each build; `version` is "standard" or "editable"."""
        if self.target_name != "wheel":
            return
        if version == "editable":
            build_data["force_include_editable"] = self._pointers()
            return
        mutants = Path(self.root, "tests/mutants")
        for file in sorted(mutants.rglob("*.py")):
            if not file.name.startswith("test_"):
                place = file.relative_to(mutants).as_posix()
                build_data["force_include"][str(file)] = f"distcheck_mutants/{place}"

    def _pointers(self) -> dict[str, str]:
        given = {}
        for package, folder in POINTERS.items():
            pointer = Path(self.directory) / f"{package}.py.in"
            pointer.parent.mkdir(parents=True, exist_ok=True)
            pointer.write_text(POINTER.format(folder=str(Path(self.root, folder))))
            given[str(pointer)] = f"{package}/__init__.py"
        return given
