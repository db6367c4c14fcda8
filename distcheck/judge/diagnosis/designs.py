"""Finds the design by which ranks combine parameters, and known mistakes in such a combination."""

import importlib
from collections.abc import Iterator
from functools import lru_cache

from distcheck.errors import UsageError
from distcheck.judge.acceptance import parse_deviation
from distcheck.judge.designs import KINDS
from distcheck.judge.oracles.design import ParameterDesign, Updates, UpdatesAt, make_design
from distcheck.judge.oracles.references import References
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import NotBoundedError


def updates_of(references: References, *, large: bool) -> UpdatesAt:
    """Return a function for all ranks' updates at a step; of a `large` model it keeps one step."""

    @lru_cache(maxsize=1 if large else None)
    def at(step: int) -> Updates:
        run = references.update.run
        return [run(rank, step) for rank in range(references.trace.layout.world)]

    return at


def find_design(references: References, updates_at: UpdatesAt) -> str:
    """Return the first acceptance that every step fits, or ""."""
    for text in _candidates(references, updates_at):
        try:
            design = make_design(references, parse_deviation(text))
            if isinstance(design, ParameterDesign) and design.fits(updates_at):
                return text
        except (UsageError, NotBoundedError, NotRecordedError):
            continue  # settings out of range, or nothing to compare
    return ""


def _candidates(references: References, updates_at: UpdatesAt) -> Iterator[str]:
    for kind in KINDS.values():
        if kind.changes != "parameters":
            continue
        module, _, name = kind.oracle.partition(":")
        design = getattr(importlib.import_module(f"distcheck.judge.oracles.{module}"), name)
        yield from design.candidates(references, updates_at)


def find_mistake(references: References, updates_at: UpdatesAt, step: int) -> str:
    """Return the known mistake that explains the combined tensors after a step, or ""."""
    design = references.parameter_design
    if design is None or not 0 <= step < references.trace.steps_written():
        return ""
    for says, expected in design.wrong_combinations(step, updates_at(step)):
        if design.has_combined(step, expected):
            return says
    return ""
