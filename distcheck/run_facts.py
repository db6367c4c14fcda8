"""What is known of a case's run besides its checks: what it had in it, and how its worlds compared.
No torch.
"""

import msgspec


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a case had in it, as far as a pass depends on it.

    worlds    how many worlds ran: 2 with a rerun
    tensors   how many parameters; `most_elements` and `most_dimensions` are those of the largest,
              `depth` the most modules that one of them is nested in
    kinds     the classes of the modules that hold parameters or buffers
    features  names of what else it had; `distcheck.contents` lists them
    """

    world: int
    backend: str
    device: str
    dtype: str
    steps: int
    worlds: int
    tensors: int
    most_elements: int
    most_dimensions: int
    depth: int
    kinds: tuple[str, ...]
    features: tuple[str, ...]


class Separation(msgspec.Struct, frozen=True, kw_only=True):
    """What further worlds showed of a rerun in separate interpreters that was not the first world.

    `depends` says whether it depends on process state, and was not a matter of chance: on each of
    `factors` alone, or, where there are several, on no single one of them. Where it does not, one
    factor says that this one made the difference, as delays do to a race. `harmless`: the rerun
    passed every check too, and its factor is the machines that ranks are on. `lines` are those of
    the code under test that read such state, as text.
    """

    depends: bool
    factors: tuple[str, ...] = ()
    worlds: int
    harmless: bool = False
    lines: tuple[str, ...] = ()
