"""How long to search, as a person says it."""

import re

from distcheck.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_MOST_S = 7 * 24 * 3600


def seconds_of(text: str) -> float:
    """`90s`, `5m`, `1h` in seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= _MOST_S:
        raise UsageError(
            f"--budget {text} is not a duration; give a number and s, m or h, as in 90s, 5m "
            "or 1h, at most 168h"
        )
    return seconds
