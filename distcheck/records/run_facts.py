"""What is known of a run besides its checks: what a case had in it, and where it comes from."""

import msgspec

# How a rerun's result says where it was, and that it left other bits, which are right as well.
from distcheck.records.decoding import Steps, World

SEPARATELY = "in separate interpreters"
DIFFERS = "; there the bits differ"
# How notes begin that say in which form code was called.
TAKEN_AS, FOUND_AS = "taken as: ", "its form was found by trying: "
# How the check `data` says that ranks draw alike, which fails nothing.


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Something that code uses, and the line; `number` is the one that a limit is."""

    feature: str
    line: int
    number: int = 0


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a case had in it, as far as a pass depends on it.

    worlds    how many worlds ran: 2 with a rerun
    schedules how many other schedules a simulated world came to its end under
    batch     samples a step; `elements` of all parameters; both 0 in reports that lack them
    tensors   how many parameters; `most_elements` and `most_dimensions` are those of the largest,
              `depth` the most modules that one of them is nested in
    kinds     the classes of the modules that hold parameters or buffers
    sizes     of the largest element of a gradient: the smallest and the largest; may be empty
    features  names of what else it had; `distcheck.verification.contents` lists them
    uses      what the strategy's code uses, whatever the case had
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
    """Where a report comes from, for its reader.

    date     when the run began, with the offset from UTC
    command  the command line, "" where it is not known
    commit   of the git repository that the run was started in, "" outside one
    clean    whether nothing there differed from that commit or was not in it; None: not known
    """

    date: str
    command: str = ""
    commit: str = ""
    clean: bool | None = None
