"""Where a check failed, in words."""

from collections.abc import Mapping

from distcheck.records import CheckResult

Failures = Mapping[tuple[str, str], CheckResult]  # by (check, layer)


def where(result: CheckResult) -> str:
    """Step, tensor and rank of the first divergence; the check's own words where it has none."""
    place = result.first or result.worst
    if place is None:
        return result.reason
    index = f"[{','.join(map(str, place.index))}]" if place.index else ""
    return f"step {place.step}, {place.parameter}{index}, rank {place.rank}"
