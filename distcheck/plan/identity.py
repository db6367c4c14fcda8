"""What must be the same in every process that takes part in one verification. No torch."""

import sys
from collections.abc import Sequence

from distcheck import __version__
from distcheck.plan.provenance import file_digest
from distcheck.records import Case
from distcheck.records.case_ids import digest_of_all


def identity_of(cases: Sequence[Case]) -> dict[str, str]:
    """What must be the same in every process, by the name that a person knows it by."""
    found = {
        "the version of distcheck": __version__,
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    for what, specs in (
        ("strategy", [case.strategy for case in cases]),
        ("workload", [case.workload for case in cases]),
    ):
        for spec in dict.fromkeys(specs):
            found[f"the file of {what} {spec}"] = file_digest(what, spec)
    return {**found, "what was asked for": digest_of_all(cases)}
