"""What the tests of the plugin have in common."""

import pytest


@pytest.fixture(autouse=True)
def at_a_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the service of a CI pytest shortens nothing; what it prints is compared here."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
