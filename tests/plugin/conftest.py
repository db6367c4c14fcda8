"""What the tests of the plugin have in common."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugin.running import run_pytest, run_warm


@pytest.fixture(autouse=True)
def at_a_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the service of a CI pytest shortens nothing; what it prints is compared here."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Writes test_it.py and runs pytest on it, in a folder of its own, with torch imported; what
    `more` is given for needs a `new` interpreter.
    """

    def go(
        text: str, *options: str, new: bool = False, **more: object
    ) -> subprocess.CompletedProcess[str]:
        text = "import pytest\n" + text
        if new or more:
            return run_pytest(tmp_path, text, "--tb=short", *options, columns=120, **more)
        return run_warm(tmp_path, text, "--tb=short", *options, columns=120)

    return go
