"""What a rank tells of an exception, whatever that is."""

import msgspec
import pytest

from distcheck.worlds.local.child import message_of_exception


class TextlessError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("the reason"), "the reason"),
        (ValueError("half \udcff"), "half \\udcff"),
        (TextlessError(), "(its text is not available: KeyError)"),
    ],
)
def test_an_exception_is_told_whatever_its_text(error: Exception, message: str) -> None:
    """One that could not be sent would end its rank as if nothing had been."""
    event = message_of_exception(error)
    assert (event.kind, event.message) == (type(error).__name__, message)
    assert type(error).__name__ in event.traceback
    assert msgspec.msgpack.encode(event)
