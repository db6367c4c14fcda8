"""Names that are nearly right: what was probably meant."""

import difflib
from collections.abc import Iterable

_ALIKE = 0.6  # of difflib's ratio


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like another one, in capitals or not; "" where none is."""
    lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=_ALIKE)
    return lower[close[0]] if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question, to be put after the name; "" where no known name is like it."""
    found = nearest(name, known)
    return f" (did you mean {found}?)" if found else ""
