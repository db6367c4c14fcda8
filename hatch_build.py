"""Installs `strategies/` as the import package `distcheck_strategies`.

In a wheel that is a plain rename (pyproject.toml, force-include). An editable
install would get a *copy* that way, and edits to `strategies/` would go unseen,
so it gets a package of one line that points back at the folder.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StrategiesHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the pointer to an editable install; leaves every other build alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each build; `version` is "standard" or "editable"."""
        if version != "editable":
            return
        folder = Path(self.root) / "strategies"
        pointer = Path(self.directory) / "distcheck_strategies.py.in"
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.write_text(f'"""Points at a checkout."""\n\n__path__ = [{str(folder)!r}]\n')
        build_data["force_include_editable"] = {
            str(pointer): "distcheck_strategies/__init__.py",
        }
