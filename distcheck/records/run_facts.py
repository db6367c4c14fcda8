"""Facts about a run in addition to its checks: compared modules, the contents of a case, the origin
of a report, and searches for further failures. No torch.
"""

from typing import Literal

import msgspec

from distcheck.records.decoding import Steps, World

# `wrong`: inputs are right, outputs are not; `follows`: neither are; `near`: both are within their
# bounds, with other bits; `unseen`: in one run only.
ModuleState = Literal["same", "near", "wrong", "follows", "unseen"]


class ModuleSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A module over its calls in one step of one rank; `error` is the largest distance of an
    output, or of its gradient, relative to its norm, and `bound` its rounding bound.
    """

    name: str
    kind: str
    state: ModuleState
    calls: int = 1
    error: float = 0.0
    bound: float = 0.0


class ByModule(msgspec.Struct, frozen=True, kw_only=True):
    """All modules at a step: the first step with a wrong one, or else the last.

    first      the sentence on the first wrong module
    name       of that module; "" for the whole model, or if none is wrong
    is_found   True if one is wrong
    compared   compared calls, over all steps and ranks
    left_out   omitted calls beyond the limit
    compiled   modules whose inside is not recorded
    """

    first: str
    name: str = ""
    is_found: bool = False
    step: int = 0
    rank: int = 0
    compared: int = 0
    left_out: int = 0
    compiled: tuple[str, ...] = ()
    modules: tuple[ModuleSeen, ...] = ()


# Text of a rerun in separate interpreters, and of other bits there that are also right.
SEPARATELY = "in separate interpreters"
DIFFERS = "; there the bits differ"
# Beginnings of notes about the form in which code was called, and about properties of it that were
# not judged because it fails there. Screens never cut these notes.
TAKEN_AS, FOUND_AS, LIMIT = "taken as: ", "its form was found by trying: ", "limit: "


class UsedFeature(msgspec.Struct, frozen=True, kw_only=True):
    """A feature that code uses, and its line; `number` is a limit's value."""

    feature: str
    line: int
    number: int = 0


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a case that limit the coverage of a pass.

    worlds    number of worlds that ran: 2 with a rerun
    schedules number of further schedules that a simulated world completed
    batch     samples per step; `elements` of all parameters; 0 in reports that lack them
    tensors   number of parameters; `most_elements` and `most_dimensions` are those of the largest,
              `depth` the maximum number of modules that a parameter is nested in
    kinds     the classes of the modules that hold parameters or buffers
    sizes     smallest and largest of the largest gradient elements; may be empty
    features  names of other features; `distcheck.verification.contents` lists them
    uses      features that the strategy's code uses, in any case
    """

    world: World
    backend: str
    device: str
    dtype: str
    steps: Steps
    worlds: int
    tensors: int
    most_elements: int
    most_dimensions: int
    depth: int
    kinds: tuple[str, ...]
    features: tuple[str, ...]
    schedules: int = 0
    batch: int = 0
    elements: int = 0
    sizes: tuple[float, ...] = ()
    uses: tuple[UsedFeature, ...] = ()


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a report.

    date     start of the run, with the offset from UTC
    command  the command line, "" if unknown
    commit   of the git repository in which the run was started, "" outside one
    clean    if True, the work tree equaled that commit; None: unknown
    """

    date: str
    command: str = ""
    commit: str = ""
    clean: bool | None = None


class PlannedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search of the complete plan, and the part that runs it."""

    strategy: str
    budget_s: float
    shard: int = 1


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """The extent of a search for the smallest failure of a strategy (`verify --thorough`). A case
    that is found is one of the report's cases. A search that was not run does not affect the
    report's verdict.

    cases, passed, insensitive  cases that ran; that passed; that passed but could not have
                                revealed every simple mistake
    found      ids of the report's cases that the search added: the smallest failing case, or
               those that could not be judged
    left_out   words that were not drawn, each with the reason
    reason     why it was not run, or is unknown
    """

    strategy: str
    verdict: Literal["pass", "unknown", "fail", "not run"]
    budget_s: float
    spent_s: float = 0.0
    seed: int = 0
    most_world: int = 0
    most_steps: int = 0
    cases: int = 0
    passed: int = 0
    insensitive: int = 0
    found: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    reason: str = ""
