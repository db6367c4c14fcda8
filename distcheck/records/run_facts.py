"""Facts about a run in addition to its checks: compared modules, the contents of a case, the origin
of a report, and searches for further failures. Does not import torch.
"""

from typing import Literal

import msgspec

# `wrong`: inputs are right, outputs are not; `follows`: neither are; `near`: both are within their
# bounds, with other bits; `unseen`: in one run only.
ModuleState = Literal["same", "near", "wrong", "follows", "unseen"]


class ComparedModule(msgspec.Struct, frozen=True, kw_only=True):
    """A module over its calls in one step of one rank.

    `error` is the largest distance of an output, or of its gradient, relative to its norm; `bound`
    is the rounding bound of that distance.
    """

    name: str
    kind: str
    state: ModuleState
    calls: int = 1
    error: float = 0.0
    bound: float = 0.0


class ModuleComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All modules at one step: the first step with a wrong module, or else the last step.

    first      the sentence on the first wrong module
    name       its name; "" for the whole model, or if none is wrong
    is_found   True if a module is wrong
    compared   number of compared calls, over all steps and ranks
    left_out   number of calls beyond the limit, which are not compared
    compiled   modules whose submodules are not recorded
    """

    first: str
    name: str = ""
    is_found: bool = False
    step: int = 0
    rank: int = 0
    compared: int = 0
    left_out: int = 0
    compiled: tuple[str, ...] = ()
    modules: tuple[ComparedModule, ...] = ()


# Text of a rerun in separate interpreters, and of other bits there that are also right.
SEPARATELY = "in separate interpreters"
DIFFERS = "; there the bits differ"
# Beginnings of notes about the form in which code was called, and about properties of it that were
# not judged because it fails there. Screens never cut these notes.
TAKEN_AS, FOUND_AS, LIMIT = "taken as: ", "its form was found by trying: ", "limit: "


class UsedFeature(msgspec.Struct, frozen=True, kw_only=True):
    """A feature that code uses, and its line; `number` is the value of a limit."""

    feature: str
    line: int
    number: int = 0


class CaseContents(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a case that limit the coverage of a pass.

    worlds    number of worlds that ran: 2 with a rerun
    schedules number of further schedules that a simulated world completed
    elements  number of elements of all parameters
    tensors   number of parameters
    most_elements, most_dimensions   of the largest parameter
    depth     maximum number of modules that a parameter is nested in
    kinds     classes of the modules that hold parameters or buffers
    sizes     range of the largest gradient element of each step; may be empty
    features  names of further features; `distcheck.verification.contents` lists them
    uses      features that the strategy's code uses, in any case
    """

    worlds: int
    tensors: int
    most_elements: int
    most_dimensions: int
    depth: int
    kinds: tuple[str, ...]
    features: tuple[str, ...]
    schedules: int = 0
    elements: int = 0
    sizes: tuple[float, ...] = ()
    uses: tuple[UsedFeature, ...] = ()


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a report.

    date     start of the run, with the offset from UTC
    command  the command line; "" if unknown
    commit   commit of the git repository in which the run started; "" outside a repository
    clean    True if the work tree equaled that commit; None: unknown
    """

    date: str
    command: str = ""
    commit: str = ""
    clean: bool | None = None


class PlannedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search of the complete plan; `shard` is the part that runs it."""

    strategy: str
    budget_s: float
    shard: int = 1


class ExploredSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Coverage of a search for the smallest failure of a strategy (`verify --thorough`). A case
    that the search finds is one of the report's cases. A search that did not run does not affect
    the verdict.

    cases        number of cases that ran
    passed       number of cases that passed
    insensitive  number of these that could not have revealed every simple mistake
    found        ids of the report's cases that the search added: the smallest failing case, or
                 cases that could not be judged
    left_out     words that were not drawn, each with the reason
    reason       why the search did not run, or is unknown
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
