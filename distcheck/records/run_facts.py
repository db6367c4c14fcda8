"""Facts about a run in addition to its checks: the contents of a case, and its origin."""

import msgspec

# Text of a rerun in separate interpreters, and of other bits there that are also right.
from distcheck.records.decoding import Steps, World

SEPARATELY = "in separate interpreters"
DIFFERS = "; there the bits differ"
# Beginnings of notes about the form in which code was called.
TAKEN_AS, FOUND_AS = "taken as: ", "its form was found by trying: "
# Text of the check `data` if ranks draw equal random numbers, which fails nothing.


class Use(msgspec.Struct, frozen=True, kw_only=True):
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
    uses: tuple[Use, ...] = ()


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
