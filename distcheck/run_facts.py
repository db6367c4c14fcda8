"""What is known of a case's run besides its checks: what it had in it. No torch."""

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
