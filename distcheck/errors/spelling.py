"""Suggestions for misspelled names."""

import difflib
from collections.abc import Iterable

_ALIKE = 0.6  # of difflib's ratio


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to another one, ignoring case; "" if none is."""
    lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=_ALIKE)
    return lower[close[0]] if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question to append to the name; "" if no known name is similar."""
    found = nearest(name, known)
    return f" (did you mean {found}?)" if found else ""
