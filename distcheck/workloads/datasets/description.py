"""What is known of a data set whose images are bytes in shared memory."""

import msgspec


class ArrayDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes are, and their digest; `mean` and `std` are per channel, for pixels scaled to
    0..1.
    """

    shape: tuple[int, int, int]
    classes: int
    train_size: int
    test_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str
    note: str = ""
